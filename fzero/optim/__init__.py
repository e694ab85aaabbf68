"""Optimizers as pairs of pure functions, with optax's names and meanings.

In: trees of gradients, optimizer state and parameters, plain or `Sharded`. Out: trees of updates and of new state.
`base` says what an optimizer is, `transforms` has the stages, `presets` whole optimizers, `kernels` Adam on lists,
`wrappers` stages around others. `loss_scale` and `deepspeed` are families of their own.
"""

from fzero.base.flags import check_flags
from fzero.optim import deepspeed, loss_scale  # noqa: F401  families, found as optim.deepspeed and optim.loss_scale
from fzero.optim.averaging import EmaState, ema, incremental_update
from fzero.optim.base import (
    EmptyState,
    GradientTransformation,
    apply_updates,
    chain,
    identity,
    stateless,
)
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
from fzero.optim.inject import InjectHyperparamsState, inject_hyperparams
from fzero.optim.presets import adam, adamw, sgd
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
    "GradientTransformation",
    "InjectHyperparamsState",
    "MaskedState",
    "MultiTransformState",
    "ScaleByAdamState",
    "ScaleByScheduleState",
    "TraceState",
    "adam",
    "adamw",
    "add_decayed_weights",
    "all_finite",
    "apply_if_finite",
    "apply_updates",
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
    "global_norm",
    "identity",
    "incremental_update",
    "inject_hyperparams",
    "inverse_sqrt_schedule",
    "join_schedules",
    "linear_onecycle_schedule",
    "linear_schedule",
    "masked",
    "multi_transform",
    "piecewise_constant_schedule",
    "piecewise_interpolate_schedule",
    "polynomial_schedule",
    "scale",
    "scale_by_adam",
    "scale_by_learning_rate",
    "scale_by_schedule",
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
