"""Schedule-free learning: an average of the iterates takes the place of a schedule that falls to 0."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fzero.base import tree
from fzero.base.errors import FzeroError
from fzero.base.frozen import is_frozen
from fzero.base.tree import Tree
from fzero.optim import kernels
from fzero.optim.base import (
    GradientTransformation,
    Schedule,
    State,
    cast,
    check_not_negative,
    check_number,
    check_stages,
    flatten_alike,
    init_count,
    init_number,
    is_number,
    stage,
)


class ScheduleFreeState(NamedTuple):
    """The state of `schedule_free`. Numbers are 0-d float64."""

    base_optimizer_state: State
    z: Tree  # as params: the iterates of the base optimizer
    step_count: Tensor  # 0-d int32, steps so far
    max_lr: Tensor  # the largest learning rate so far
    weight_sum: Tensor  # of the weights of the steps so far
    b1: Tensor


def schedule_free(
    base_optimizer: GradientTransformation,
    learning_rate: float | Schedule,
    b1: float = 0.9,
    weight_lr_power: float = 2.0,
) -> GradientTransformation:
    """`base_optimizer` without a schedule that falls: Defazio et al., https://arxiv.org/abs/2405.15682.

    The base optimizer moves the iterates z. Their running average x weighs a step by the largest learning rate so far
    to the power `weight_lr_power`. The parameters, at which gradients are taken, are `y = b1 * x + (1 - b1) * z`.
    Evaluate at x: `schedule_free_eval_params(state, params)`.

    `learning_rate` is that of the base optimizer, with its warmup. The base optimizer has no momentum of its own: take
    `sgd(rate)`, or `adamw(rate, b1=0.0)`. `update` needs the parameters. Formula and defaults are the paper's.

    Raises:
        FzeroError: for a `b1` outside (0, 1), a negative power or rate; in `update`, as `add_decayed_weights`.
    """
    check_stages("schedule_free", base_optimizer)
    check_number("schedule_free", b1=b1)
    if not (is_number(b1) and 0 < b1 < 1):
        raise FzeroError("schedule_free", f"b1 is {b1!r}", "give one in (0, 1)")
    if not callable(learning_rate):
        check_not_negative("schedule_free", "learning_rate", learning_rate)
    check_not_negative("schedule_free", "weight_lr_power", weight_lr_power)

    def init(params: Tree) -> ScheduleFreeState:
        z = tree.map(lambda leaf: None if is_frozen(leaf) else leaf.clone(), params)
        numbers = (init_number(params, x, torch.float64) for x in (0.0, 0.0, b1))
        return ScheduleFreeState(base_optimizer.init(params), z, init_count(params), *numbers)

    def update(updates: Tree, state: ScheduleFreeState, params: Tree | None = None) -> tuple[Tree, ScheduleFreeState]:
        if params is None:
            raise FzeroError("schedule_free", "has no parameters", "pass them: update(updates, state, params)")
        rate = learning_rate(state.step_count) if callable(learning_rate) else learning_rate
        max_lr = torch.maximum(state.max_lr, rate) if isinstance(rate, Tensor) else state.max_lr.clamp(min=rate)
        weight = max_lr**weight_lr_power
        weight_sum = state.weight_sum + weight
        share = torch.where(weight_sum > 0, weight / weight_sum, 0.0)
        updates, base_state = base_optimizer.update(updates, state.base_optimizer_state, params)
        moving, _ = tree.split_as(params, state.z)
        treedef, (z, steps, weights) = flatten_alike(state.z, updates, moving)
        updates, z = (tree.unflatten(treedef, leaves) for leaves in kernels.schedule_free(steps, z, weights, share, b1))
        return updates, ScheduleFreeState(base_state, z, state.step_count + 1, max_lr, weight_sum, state.b1)

    return stage(ScheduleFreeState, init, update)


def schedule_free_eval_params(state: State, params: Tree) -> Tree:
    """The parameters to evaluate: the average `x = (y - (1 - b1) * z) / b1`, where y are the `params` of training.

    Raises:
        FzeroError: for a state that is not that of `schedule_free`, or of other parameters.
    """
    if not isinstance(state, ScheduleFreeState):
        way_out = "give the state of schedule_free: one part of the state of a chain"
        raise FzeroError("schedule_free_eval_params", f"the state is a {type(state).__name__}", way_out)
    moving, still = tree.split_as(params, state.z)
    treedef, (z, weights) = flatten_alike(state.z, moving)
    if not z:
        return params
    away = torch._foreach_mul(torch._foreach_sub(weights, z), (1 - state.b1) / state.b1)
    averages = cast(torch._foreach_add(weights, away), weights)
    return tree.merge(tree.unflatten(treedef, averages), still)
