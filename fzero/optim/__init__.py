"""Optimizers as pairs of pure functions, with optax's names and meanings.

In: trees of gradients, optimizer state and parameters, plain or `Sharded`. Out: trees of updates and of new state.
`base` says what an optimizer is, `transforms` has the stages, `presets` whole optimizers, `kernels` Adam on lists.
"""

from fzero.optim.adam8bit import ScaleByAdam8bitState, adamw8bit, scale_by_adam8bit
from fzero.optim.base import (
    EmptyState,
    GradientTransformation,
    apply_updates,
    chain,
    identity,
    stateless,
)
from fzero.optim.muon import MuonState, ScaleByMuonState, muon, scale_by_muon
from fzero.optim.presets import adam, adamw, sgd
from fzero.optim.report import report
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
    "GradientTransformation",
    "MuonState",
    "ScaleByAdam8bitState",
    "ScaleByAdamState",
    "ScaleByMuonState",
    "ScaleByScheduleState",
    "TraceState",
    "adam",
    "adamw",
    "adamw8bit",
    "add_decayed_weights",
    "apply_updates",
    "chain",
    "clip_by_global_norm",
    "constant_schedule",
    "cosine_decay_schedule",
    "global_norm",
    "identity",
    "join_schedules",
    "linear_schedule",
    "muon",
    "report",
    "scale",
    "scale_by_adam",
    "scale_by_adam8bit",
    "scale_by_learning_rate",
    "scale_by_muon",
    "scale_by_schedule",
    "sgd",
    "stateless",
    "trace",
    "warmup_cosine_decay_schedule",
]
