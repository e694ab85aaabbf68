"""Stages that bound updates: by value, by the size of each leaf, by the norm over all leaves.

A norm that is not finite bounds nothing. Updates of such a norm go no further: they become zero, and by default the
next call of the step raises. `apply_if_finite` around the optimizer skips such a step instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fzero.base import tree
from fzero.base.flags import Flag
from fzero.base.tree import Tree
from fzero.optim import kernels, list_ops
from fzero.optim.base import (
    EmptyState,
    GradientTransformation,
    cast,
    check_choice,
    check_number,
    check_positive,
    init_number,
    stage,
    stateless,
)
from fzero.optim.transforms import global_norm

Nonfinite = Literal["raise", "zero"]
_WAY_OUT = (
    "look for inf and nan in the loss; optim.apply_if_finite skips such steps, on_nonfinite='zero' takes zeros for "
    "their updates"
)


class NonfiniteNorm(Flag):
    """The global norm is not finite."""

    where = "clip_by_global_norm"
    problem = "the norm of the updates is {value}"
    way_out = _WAY_OUT


class NonfiniteRms(Flag):
    """The root mean square of some leaf is not finite."""

    where = "clip_by_block_rms"
    problem = "the largest root mean square of the updates of a leaf is {value}"
    way_out = _WAY_OUT


class ClipState(NamedTuple):
    """The state of a clipping stage: what it has to report."""

    failed: Flag


def clip(max_delta: float) -> GradientTransformation:
    """Each element of the updates, bounded to `[-max_delta, max_delta]`.

    Raises:
        FzeroError: for a `max_delta` that is not positive, or a tensor.
    """
    check_number("clip", max_delta=max_delta)
    check_positive("clip", "max_delta", max_delta)

    def update(updates: Tree, params: Tree | None) -> Tree:
        leaves, treedef = tree.flatten(updates)
        if not leaves:
            return updates
        return tree.unflatten(
            treedef, torch._foreach_clamp_max(torch._foreach_clamp_min(leaves, -max_delta), max_delta)
        )

    return stateless(update)


def clip_by_block_rms(threshold: float, *, on_nonfinite: Nonfinite = "raise") -> GradientTransformation:
    """Each leaf of the updates, scaled down to a root mean square of `threshold` where its own is larger.

    `on_nonfinite` is as in `clip_by_global_norm`.

    Raises:
        FzeroError: for a `threshold` that is not positive or an unknown `on_nonfinite`; at the next call of a step, as
            `clip_by_global_norm`.
    """
    check_positive("clip_by_block_rms", "threshold", threshold)

    def measure(updates: Tree) -> tuple[Tensor, Tensor]:
        leaves = tree.leaves(updates)
        rms = torch.stack(kernels.sums_of_squares(leaves, [max(leaf.numel(), 1) for leaf in leaves])).sqrt()
        return rms.max(), (rms / threshold).clamp(min=1).reciprocal()

    return _clip(NonfiniteRms, on_nonfinite, measure)


_FACTORS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "optax": lambda norm, bound: torch.where(norm < bound, 1.0, bound / norm),
    "torch": lambda norm, bound: (bound / (norm + 1e-6)).clamp(max=1),
    "deepspeed": lambda norm, bound: ((norm + 1e-6) / bound).clamp(min=1).reciprocal(),
}
"""Whose formula -> a function of norm and bound that returns the factor of the updates."""


def clip_by_global_norm(
    max_norm: float,
    kind: Literal["optax", "torch", "deepspeed"] = "optax",
    *,
    on_nonfinite: Nonfinite = "raise",
) -> GradientTransformation:
    """`updates`, scaled down to a global norm of `max_norm` where their global norm is larger.

    `kind` says whose formula: the updates are multiplied by `max_norm / norm` where the norm is not below `max_norm`
    ("optax"), by `min(1, max_norm / (norm + 1e-6))` ("torch", as `clip_grad_norm_`), or divided by
    `max(1, (norm + 1e-6) / max_norm)` ("deepspeed"). Pascanu et al., On the difficulty of training recurrent neural
    networks, https://arxiv.org/abs/1211.5063.

    Where the norm is not finite the updates become zero. With `on_nonfinite="raise"` the next call of the step raises.

    Raises:
        FzeroError: for a `max_norm` that is not positive, an unknown `kind` or `on_nonfinite`; at the next call of a
            step, for a norm that was not finite.
    """
    check_positive("clip_by_global_norm", "max_norm", max_norm)
    check_choice("clip_by_global_norm", "kind", kind, _FACTORS)

    def measure(updates: Tree) -> tuple[Tensor, Tensor]:
        norm = global_norm(updates)
        return norm, _FACTORS[kind](norm, max_norm)

    return _clip(NonfiniteNorm, on_nonfinite, measure)


def _clip(
    flag: type[Flag], on_nonfinite: Nonfinite, measure: Callable[[Tree], tuple[Tensor, Tensor]]
) -> GradientTransformation:
    """A stage that multiplies updates by what `measure(updates)` says: a number that is to be finite, and the factor of
    all leaves, 0-d, or [leaves] one of each."""
    check_choice(flag.where, "on_nonfinite", on_nonfinite, ("raise", "zero"))
    raises = on_nonfinite == "raise"

    def init(params: Tree) -> Any:
        return ClipState(flag(init_number(params, 0.0, torch.float32))) if raises else EmptyState()

    def update(updates: Tree, state: Any, params: Tree | None = None) -> tuple[Tree, Any]:
        leaves, treedef = tree.flatten(updates)
        if not leaves:
            return updates, state
        size, factors = measure(updates)
        is_wrong = ~size.isfinite()
        scaled = (
            kernels.scale_each(leaves, factors) if factors.ndim else cast(torch._foreach_mul(leaves, factors), leaves)
        )
        clipped = list_ops.masked_fill(scaled, is_wrong, 0.0)
        if raises:
            state = ClipState(state.failed.note(is_wrong, size))
        return tree.unflatten(treedef, clipped), state

    return stage(ClipState if raises else EmptyState, init, update)
