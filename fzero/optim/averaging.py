"""Averages over steps: of updates, as a stage, and of parameters.

The average of parameters is a tree like the parameters. A step returns it beside them, and an evaluation takes it in
their place:

    ema = optim.incremental_update(params, ema, step_size=1 - 0.999)      # in the step, behind apply_updates
    loss = eval_step(ema, batch)
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fzero.base import tree
from fzero.base.errors import FzeroError
from fzero.base.tree import Tree
from fzero.optim.base import (
    GradientTransformation,
    cast,
    check_decay,
    check_finite,
    check_number,
    flatten_alike,
    init_count,
    init_zeros,
    stage,
)
from fzero.optim.kernels import bias_correction
from fzero.optim.operations import cast_each


class EmaState(NamedTuple):
    """An exponential moving average of past updates."""

    count: Tensor  # type: ignore[assignment]  # 0-d int32, steps so far (hides tuple.count, as in optax)
    ema: Tree  # as params


def ema(decay: float, debias: bool = True, accumulator_dtype: torch.dtype | None = None) -> GradientTransformation:
    """The average `e = decay * e + (1 - decay) * g` of past updates; with `debias`, `e / (1 - decay ** count)`.

    `accumulator_dtype` is the dtype of the state; None takes that of the parameters. New updates have the wider dtype
    of updates and state.

    Raises:
        FzeroError: for a decay rate outside [0, 1), or a tensor; in `init` and `update`, as `scale_by_adam`.
    """
    check_number("ema", decay=decay)
    check_decay("ema", "decay", decay)

    def init(params: Tree) -> EmaState:
        zeros = init_zeros(params)
        return EmaState(
            init_count(params),
            zeros if accumulator_dtype is None else tree.map(lambda x: x.to(accumulator_dtype), zeros),
        )

    def update(updates: Tree, state: EmaState, params: Tree | None = None) -> tuple[Tree, EmaState]:
        treedef, (means, grads) = flatten_alike(state.ema, updates)
        count = state.count + 1
        if not grads:
            return updates, EmaState(count, state.ema)
        wide = [torch.promote_types(mean.dtype, grad.dtype) for mean, grad in zip(means, grads)]
        new = torch._foreach_lerp(cast_each(means, wide), cast_each(grads, wide), 1 - decay)
        steps = torch._foreach_div(new, bias_correction(decay, count, wide)) if debias else new
        return tree.unflatten(treedef, cast(steps, new)), EmaState(count, tree.unflatten(treedef, cast(new, means)))

    return stage(EmaState, init, update)


def incremental_update(new_tensors: Tree, old_tensors: Tree, step_size: float) -> Tree:
    """`step_size * new + (1 - step_size) * old`, in the dtypes of `old_tensors`: one list operation.

    Polyak and Juditsky, Acceleration of Stochastic Approximation by Averaging, 1992.

    Raises:
        FzeroError: for a `step_size` that is no finite number; naming the leaf, where the trees differ in structure or
            shapes, and for a leaf of whole numbers, such as the codes of a quantized leaf.
    """
    check_finite("incremental_update", "step_size", step_size)
    treedef, (old, new) = flatten_alike(old_tensors, new_tensors)
    for path, leaf in zip(tree.paths(old_tensors), old):
        if not (leaf.dtype.is_floating_point or leaf.dtype.is_complex):
            way_out = "average the others alone, which fzero.tree.split sets apart"
            raise FzeroError(path, f"dtype is {leaf.dtype}, which has no average", way_out)
    return tree.unflatten(treedef, torch._foreach_lerp(old, cast(new, old), step_size)) if old else old_tensors
