"""Optimizers as pairs of pure functions, with optax's names and meanings.

In: trees of gradients, optimizer state and parameters, plain or `Sharded`. Out: trees of updates and of new state.
`base` says what an optimizer is, `presets` has whole optimizers, `schedules` their rates. Stages: `transforms`,
`adaptive` (per element), `blocks` (per leaf), `factored`, `schedule_free`. `kernels`, `factors`, `fused`: lists.
"""

from fzero.optim.adaptive import (
    ScaleByLionState,
    ScaleByNadamState,
    ScaleByRmsState,
    ScaleByRssState,
    ScaleByStddevState,
    scale_by_lion,
    scale_by_nadam,
    scale_by_rms,
    scale_by_rss,
    scale_by_stddev,
)
from fzero.optim.base import (
    EmptyState,
    GradientTransformation,
    apply_updates,
    cast_state,
    chain,
    identity,
    stateless,
)
from fzero.optim.blocks import clip_by_block_rms, scale_by_param_block_rms, scale_by_trust_ratio
from fzero.optim.factored import FactoredState, scale_by_factored_rms
from fzero.optim.presets import adafactor, adagrad, adam, adamw, lamb, lion, nadam, rmsprop, sgd
from fzero.optim.schedule_free import ScheduleFreeState, schedule_free, schedule_free_eval_params
from fzero.optim.schedules import (
    constant_schedule,
    cosine_decay_schedule,
    join_schedules,
    linear_schedule,
    warmup_cosine_decay_schedule,
)
from fzero.optim.transforms import (
    ScaleByAdamState,
    ScaleByScheduleState,
    TraceState,
    add_decayed_weights,
    clip_by_global_norm,
    global_norm,
    scale,
    scale_by_adam,
    scale_by_learning_rate,
    scale_by_schedule,
    trace,
)

__all__ = [
    "EmptyState",
    "FactoredState",
    "GradientTransformation",
    "ScaleByAdamState",
    "ScaleByLionState",
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
    "add_decayed_weights",
    "apply_updates",
    "cast_state",
    "chain",
    "clip_by_block_rms",
    "clip_by_global_norm",
    "constant_schedule",
    "cosine_decay_schedule",
    "global_norm",
    "identity",
    "join_schedules",
    "lamb",
    "linear_schedule",
    "lion",
    "nadam",
    "rmsprop",
    "scale",
    "scale_by_adam",
    "scale_by_factored_rms",
    "scale_by_learning_rate",
    "scale_by_lion",
    "scale_by_nadam",
    "scale_by_param_block_rms",
    "scale_by_rms",
    "scale_by_rss",
    "scale_by_schedule",
    "scale_by_stddev",
    "scale_by_trust_ratio",
    "schedule_free",
    "schedule_free_eval_params",
    "sgd",
    "stateless",
    "trace",
    "warmup_cosine_decay_schedule",
]
