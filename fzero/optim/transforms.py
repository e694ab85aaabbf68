"""Stages of an optimizer, for `chain`. Names and meanings are optax's."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from fzero.base import tree
from fzero.base.errors import FzeroError
from fzero.base.shapes import of_whole
from fzero.base.tree import Tree
from fzero.optim import kernels
from fzero.optim.base import (
    GradientTransformation,
    Mask,
    Schedule,
    add_multiple,
    cast,
    check_decay,
    check_finite,
    check_not_negative,
    flatten_alike,
    init_count,
    init_zeros,
    same_kind,
    stage,
    stateless,
)


class ScaleByAdamState(NamedTuple):
    """Adam's running means of past gradients."""

    count: Tensor  # type: ignore[assignment]  # 0-d int32, steps so far (hides tuple.count, as in optax)
    mu: Tree  # as params: running mean of gradients
    nu: Tree  # as params: running mean of squared gradients


LAST = 2**31 - 1
"""The last step count. Adam corrects nothing there, because `1 - b ** LAST` is 1 for each decay rate `b` in use."""


def scale_by_adam(
    b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8, *, corrects: bool = True
) -> GradientTransformation:
    """`m / (sqrt(v) + eps)`, with running means `m` of gradients and `v` of their squares, which are corrected for
    their bias towards 0 where it `corrects`.

    Kingma and Ba, Adam, https://arxiv.org/abs/1412.6980. The state has the parameters' dtypes.

    Raises:
        FzeroError: for a decay rate outside [0, 1) or a negative `eps`; in `init`, for a parameter that is not
            floating; in `update`, where gradients differ from the parameters of `init` in paths or shapes. The last
            two name the leaf.
    """
    check_decay("scale_by_adam", "b1", b1)
    check_decay("scale_by_adam", "b2", b2)
    check_not_negative("scale_by_adam", "eps", eps)

    def init(params: Tree) -> ScaleByAdamState:
        return ScaleByAdamState(init_count(params), init_zeros(params), init_zeros(params))

    def update(updates: Tree, state: ScaleByAdamState, params: Tree | None = None) -> tuple[Tree, ScaleByAdamState]:
        treedef, (mu, nu, grads) = flatten_alike(state.mu, state.nu, updates)
        count = state.count + 1
        updates, mu, nu = (
            tree.unflatten(treedef, leaves)
            for leaves in kernels.scale_by_adam(
                grads, mu, nu, count if corrects else torch.full_like(count, LAST), *same_kind(count, b1, b2, eps)
            )
        )
        return updates, ScaleByAdamState(count, mu, nu)

    return stage(ScaleByAdamState, init, update)


class TraceState(NamedTuple):
    """A decayed sum of past gradients: momentum."""

    trace: Tree  # as params


def trace(decay: float, nesterov: bool = False) -> GradientTransformation:
    """Momentum: each new update is the trace `t = g + decay * t`; with `nesterov`, `g + decay * t` of that new trace.

    Nesterov's form is that of Sutskever et al., ICML 2013.

    Raises:
        FzeroError: for a decay rate outside [0, 1); in `init` and `update`, as `scale_by_adam`.
    """
    check_decay("trace", "decay", decay)

    def init(params: Tree) -> TraceState:
        return TraceState(init_zeros(params))

    def update(updates: Tree, state: TraceState, params: Tree | None = None) -> tuple[Tree, TraceState]:
        treedef, (traces, grads) = flatten_alike(state.trace, updates)
        if not grads:
            return updates, state
        momentum = add_multiple(grads, traces, decay)
        steps = add_multiple(grads, momentum, decay) if nesterov else momentum
        return tree.unflatten(treedef, steps), TraceState(tree.unflatten(treedef, cast(momentum, traces)))

    return stage(TraceState, init, update)


def add_decayed_weights(weight_decay: float, mask: Mask | None = None) -> GradientTransformation:
    """`updates + weight_decay * params` for the leaves that `mask` chooses (None: all). Other leaves stay the same.

    Loshchilov and Hutter, Decoupled Weight Decay Regularization, https://arxiv.org/abs/1711.05101.

    Raises:
        FzeroError: for a negative `weight_decay`; in `update`, without `params`, or where `params` and `updates`
            differ, naming the leaf.
    """
    check_not_negative("add_decayed_weights", "weight_decay", weight_decay)

    def update(updates: Tree, params: Tree | None) -> Tree:
        if params is None:
            raise FzeroError("add_decayed_weights", "has no parameters", "pass them: update(updates, state, params)")
        params, _ = tree.split_as(params, updates)
        treedef, (weights, steps) = flatten_alike(params, updates)
        chosen = [i for i, path in enumerate(tree.paths(params)) if mask is None or of_whole(mask)(path, weights[i])]
        if not chosen:
            return updates
        decayed = add_multiple([steps[i] for i in chosen], [weights[i] for i in chosen], weight_decay)
        replaced = dict(zip(chosen, decayed))
        return tree.unflatten(treedef, [replaced.get(i, step) for i, step in enumerate(steps)])

    return stateless(update)


def scale(step_size: float) -> GradientTransformation:
    """`step_size * updates`.

    Raises:
        FzeroError: for a `step_size` that is no finite number.
    """
    check_finite("scale", "step_size", step_size)
    return stateless(lambda updates, params: _multiply(updates, step_size))


class ScaleByScheduleState(NamedTuple):
    """The step count of a schedule."""

    count: Tensor  # type: ignore[assignment]  # 0-d int32, steps so far (hides tuple.count, as in optax)


def scale_by_schedule(step_size_fn: Schedule) -> GradientTransformation:
    """`step_size_fn(count) * updates`, where `count` is the number of steps so far: 0 in the first step."""

    def init(params: Tree) -> ScaleByScheduleState:
        return ScaleByScheduleState(init_count(params))

    def update(
        updates: Tree, state: ScaleByScheduleState, params: Tree | None = None
    ) -> tuple[Tree, ScaleByScheduleState]:
        return _multiply(updates, step_size_fn(state.count)), ScaleByScheduleState(state.count + 1)

    return stage(ScaleByScheduleState, init, update)


def scale_by_learning_rate(learning_rate: float | Schedule) -> GradientTransformation:
    """`-learning_rate * updates`: down the gradient. The rate is a number, or a schedule of the steps so far.

    Raises:
        FzeroError: for a number that is negative, as in torch.optim, or not finite.
    """
    if callable(learning_rate):
        schedule = learning_rate
        return scale_by_schedule(lambda count: -schedule(count))
    check_not_negative("scale_by_learning_rate", "learning_rate", learning_rate)
    check_finite("scale_by_learning_rate", "learning_rate", learning_rate)
    return scale(-learning_rate)


def global_norm(updates: Tree) -> Tensor:
    """The 2-norm over all elements of all leaves, 0-d, in float32, or in float64 where a leaf is float64 or complex128.

    An element of a complex leaf counts with its absolute value.
    """
    squares = sum_squares(updates)
    return torch.stack(squares).sum().sqrt() if squares else torch.zeros(())


def sum_squares(updates: Tree) -> list[Tensor]:
    """The sum of squares of each leaf, 0-d, in the dtype of `global_norm`."""
    given, _ = tree.flatten(updates, is_leaf=lambda x: isinstance(x, Tensor))  # a quantized leaf is read as one tensor
    given = [leaf for leaf in given if getattr(leaf, "codes", leaf) is not None]  # whose gradient has no codes
    leaves = [leaf.abs() if leaf.dtype.is_complex else leaf for leaf in given]
    wide = functools.reduce(torch.promote_types, (leaf.dtype for leaf in leaves), torch.float32)
    return [leaf.to(wide).square().sum() for leaf in leaves]


def _multiply(updates: Tree, factor: float | Tensor) -> Tree:
    """`factor * updates`, each leaf in its own dtype. Without the cast, a 0-d leaf would take a 0-d factor's dtype."""
    leaves, treedef = tree.flatten(updates)
    if not leaves:
        return updates
    return tree.unflatten(treedef, cast(torch._foreach_mul(leaves, factor), leaves))
