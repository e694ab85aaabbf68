"""Optimizers as pairs of pure functions, with optax's names and meanings.

In: trees of gradients, optimizer state and parameters, plain or `Sharded`. Out: trees of updates and of new state.
`base` says what an optimizer is, `presets` has whole optimizers, `schedules` and `cycles` their rates. Stages:
`transforms`, `adaptive` (per element), `blocks` (per leaf), `factored`, `schedule_free`, `clipping`; `wrappers` are
stages around others. `kernels`, `factors`, `fused`: lists. `loss_scale` and `deepspeed` are families of their own.
`from_torch` reads torch's objects, by `groups`, `kinds` and `tables`.
"""

from fzero.base.flags import check_flags
from fzero.optim import deepspeed, loss_scale  # noqa: F401  families, found as optim.deepspeed and optim.loss_scale
from fzero.optim.adam8bit import ScaleByAdam8bitState, adamw8bit, scale_by_adam8bit
from fzero.optim.adaptive import (
    ScaleByAmsgradState,
    ScaleByLionState,
    ScaleByNadamState,
    ScaleByRmsState,
    ScaleByRssState,
    ScaleByStddevState,
    scale_by_amsgrad,
    scale_by_lion,
    scale_by_nadam,
    scale_by_rms,
    scale_by_rss,
    scale_by_stddev,
)
from fzero.optim.averaging import EmaState, ema, incremental_update
from fzero.optim.base import (
    EmptyState,
    GradientTransformation,
    apply_updates,
    cast_state,
    chain,
    identity,
    stateless,
)
from fzero.optim.blocks import scale_by_param_block_rms, scale_by_trust_ratio
from fzero.optim.carry import carry_state
from fzero.optim.clipping import ClipState, clip, clip_by_block_rms, clip_by_global_norm
from fzero.optim.cycles import (
    cosine_onecycle_schedule,
    linear_onecycle_schedule,
    sgdr_schedule,
    warmup_constant_schedule,
    warmup_cosine_decay_schedule,
    warmup_exponential_decay_schedule,
    warmup_inverse_sqrt_schedule,
    warmup_stable_decay_schedule,
)
from fzero.optim.factored import FactoredState, scale_by_factored_rms
from fzero.optim.from_torch import from_torch
from fzero.optim.inject import InjectHyperparamsState, inject_hyperparams
from fzero.optim.muon import MuonState, ScaleByMuonState, muon, scale_by_muon
from fzero.optim.presets import adafactor, adagrad, adam, adamw, amsgrad, lamb, lion, nadam, rmsprop, sgd
from fzero.optim.report import report
from fzero.optim.schedule_free import ScheduleFreeState, schedule_free, schedule_free_eval_params
from fzero.optim.schedules import (
    constant_schedule,
    cosine_decay_schedule,
    exponential_decay,
    inverse_sqrt_schedule,
    join_schedules,
    linear_schedule,
    piecewise_constant_schedule,
    piecewise_interpolate_schedule,
    polynomial_schedule,
    sqrt_decay_schedule,
)
from fzero.optim.transforms import (
    ScaleByAdamState,
    ScaleByScheduleState,
    TraceState,
    add_decayed_weights,
    global_norm,
    scale,
    scale_by_adam,
    scale_by_learning_rate,
    scale_by_schedule,
    trace,
)
from fzero.optim.wrappers import (
    ApplyIfFiniteState,
    MaskedState,
    MultiTransformState,
    all_finite,
    apply_if_finite,
    masked,
    multi_transform,
    select,
    set_to_zero,
)

__all__ = [
    "ApplyIfFiniteState",
    "ClipState",
    "EmaState",
    "EmptyState",
    "FactoredState",
    "GradientTransformation",
    "InjectHyperparamsState",
    "MaskedState",
    "MultiTransformState",
    "MuonState",
    "ScaleByAdam8bitState",
    "ScaleByAdamState",
    "ScaleByAmsgradState",
    "ScaleByLionState",
    "ScaleByMuonState",
    "ScaleByNadamState",
    "ScaleByRmsState",
    "ScaleByRssState",
    "ScaleByScheduleState",
    "ScaleByStddevState",
    "ScheduleFreeState",
    "TraceState",
    "adafactor",
    "adagrad",
    "adam",
    "adamw",
    "adamw8bit",
    "add_decayed_weights",
    "all_finite",
    "amsgrad",
    "apply_if_finite",
    "apply_updates",
    "carry_state",
    "cast_state",
    "chain",
    "check_flags",
    "clip",
    "clip_by_block_rms",
    "clip_by_global_norm",
    "constant_schedule",
    "cosine_decay_schedule",
    "cosine_onecycle_schedule",
    "ema",
    "exponential_decay",
    "from_torch",
    "global_norm",
    "identity",
    "incremental_update",
    "inject_hyperparams",
    "inverse_sqrt_schedule",
    "join_schedules",
    "lamb",
    "linear_onecycle_schedule",
    "linear_schedule",
    "lion",
    "masked",
    "multi_transform",
    "muon",
    "nadam",
    "piecewise_constant_schedule",
    "piecewise_interpolate_schedule",
    "polynomial_schedule",
    "report",
    "rmsprop",
    "scale",
    "scale_by_adam",
    "scale_by_adam8bit",
    "scale_by_amsgrad",
    "scale_by_factored_rms",
    "scale_by_learning_rate",
    "scale_by_lion",
    "scale_by_muon",
    "scale_by_nadam",
    "scale_by_param_block_rms",
    "scale_by_rms",
    "scale_by_rss",
    "scale_by_schedule",
    "scale_by_stddev",
    "scale_by_trust_ratio",
    "schedule_free",
    "schedule_free_eval_params",
    "select",
    "set_to_zero",
    "sgd",
    "sgdr_schedule",
    "sqrt_decay_schedule",
    "stateless",
    "trace",
    "warmup_constant_schedule",
    "warmup_cosine_decay_schedule",
    "warmup_exponential_decay_schedule",
    "warmup_inverse_sqrt_schedule",
    "warmup_stable_decay_schedule",
]
