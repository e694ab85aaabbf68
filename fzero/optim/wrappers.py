"""Stages around other stages: on some leaves only, on groups of leaves, only where gradients are finite."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.base import tree
from fzero.base.errors import FzeroError
from fzero.base.shapes import of_whole
from fzero.base.tree import Tree
from fzero.optim import list_ops
from fzero.optim.base import (
    GradientTransformation,
    Mask,
    State,
    cast,
    check_function,
    check_not_negative,
    check_number,
    check_stages,
    init_count,
    stage,
    stateless,
)

Labels = Callable[[str, Any], Any]
"""(dotted path, leaf with its global `shape`, `ndim` and `dtype`) -> the label of the leaf."""


def set_to_zero() -> GradientTransformation:
    """Zeros in the place of all updates."""
    return stateless(lambda updates, params: tree.map(torch.zeros_like, updates), takes_integers=True)


class MaskedState(NamedTuple):
    """The state of `masked`."""

    inner_state: State  # of the leaves that take part


def masked(inner: GradientTransformation, mask: Mask) -> GradientTransformation:
    """`inner` for the leaves that `mask(path, leaf)` chooses. The updates of other leaves pass as they are.

    The mask looks at the parameters; where `update` gets none, at the updates. State is kept for chosen leaves only.

    Raises:
        FzeroError: for an `inner` that is no optimizer and no stage, and for a mask that is no function.
    """
    check_stages("masked", inner)
    check_function("masked", "mask", mask, "give a function of a leaf's path and the leaf")

    def init(params: Tree) -> MaskedState:
        return MaskedState(inner.init(tree.split(params, of_whole(mask))[0]))

    def update(updates: Tree, state: MaskedState, params: Tree | None = None) -> tuple[Tree, MaskedState]:
        seen = updates if params is None else params
        chosen = {path for path, leaf in zip(tree.paths(seen), tree.leaves(seen)) if of_whole(mask)(path, leaf)}
        _, others = tree.split(updates, lambda path, leaf: path in chosen)
        moved, inner_state = inner.update(_take(updates, chosen), state.inner_state, _take(params, chosen))
        return tree.merge(moved, others), MaskedState(inner_state)

    return stage(MaskedState, init, update, takes_integers=True)


class MultiTransformState(NamedTuple):
    """The state of `multi_transform`."""

    inner_states: dict[Any, State]  # label -> state of the leaves of that label


def multi_transform(transforms: Mapping[Any, GradientTransformation], labels: Labels) -> GradientTransformation:
    """Parameter groups: each leaf is updated by `transforms[labels(path, leaf)]`, with rates and decay of its own.

    `labels` looks at the parameters; where `update` gets none, at the updates.

    Raises:
        FzeroError: without a transform; for `labels` that is no function; in `init` and `update`, for a label that
            `transforms` does not have, naming the leaf; in `update`, for a state of other labels.
    """
    if not transforms:
        raise FzeroError("multi_transform", "has no transform", "give one for each label")
    check_stages("multi_transform", *transforms.values())
    check_function("multi_transform", "labels", labels, "give a function of a leaf's path and the leaf")

    def group(params: Tree) -> dict[Any, set[str]]:
        groups: dict[Any, set[str]] = {label: set() for label in transforms}
        for path, leaf in zip(tree.paths(params), tree.leaves(params)):
            label = of_whole(labels)(path, leaf)
            try:
                groups[label].add(path)
            except (KeyError, TypeError):  # a label that does not hash
                raise FzeroError(path, f"has the label {label!r}", f"give one of {list(transforms)}") from None
        return groups

    def init(params: Tree) -> MultiTransformState:
        groups = group(params)
        return MultiTransformState(
            {label: transform.init(_take(params, groups[label])) for label, transform in transforms.items()}
        )

    def update(
        updates: Tree, state: MultiTransformState, params: Tree | None = None
    ) -> tuple[Tree, MultiTransformState]:
        groups = group(updates if params is None else params)
        if set(state.inner_states) != set(groups):
            problem = f"the state has the labels {list(state.inner_states)}, the optimizer {list(groups)}"
            raise FzeroError("multi_transform", problem, "give the state that this optimizer's init or update returned")
        parts, states = [], {}
        for label, transform in transforms.items():
            taken, held = _take(updates, groups[label]), _take(params, groups[label])
            part, states[label] = transform.update(taken, state.inner_states[label], held)
            parts.append(part)
        return functools.reduce(tree.merge, parts), MultiTransformState(states)

    return stage(MultiTransformState, init, update, takes_integers=True)


def _take(values: Tree | None, paths: set[str]) -> Tree | None:
    """The leaves of a tree at these paths, with None in the places of the others."""
    return None if values is None else tree.split(values, lambda path, leaf: path in paths)[0]


class ApplyIfFiniteState(NamedTuple):
    """The state of `apply_if_finite`."""

    notfinite_count: Tensor  # 0-d int32, updates in a row up to the last that were not finite
    last_finite: Tensor  # 0-d bool, whether the last updates were finite
    total_notfinite: Tensor  # 0-d int32
    inner_state: State


def apply_if_finite(inner: GradientTransformation, max_consecutive_errors: int) -> GradientTransformation:
    """`inner`, where all updates are finite. Other updates change no bit of parameters and of the state of `inner`.

    More than `max_consecutive_errors` such updates in a row are taken as they are, as in optax.

    Raises:
        FzeroError: for a negative `max_consecutive_errors`.
    """
    check_stages("apply_if_finite", inner)
    check_number("apply_if_finite", max_consecutive_errors=max_consecutive_errors)
    check_not_negative("apply_if_finite", "max_consecutive_errors", max_consecutive_errors)

    def init(params: Tree) -> ApplyIfFiniteState:
        zero = init_count(params)
        return ApplyIfFiniteState(zero, zero == 0, init_count(params), inner.init(params))

    def update(updates: Tree, state: ApplyIfFiniteState, params: Tree | None = None) -> tuple[Tree, ApplyIfFiniteState]:
        finite = all_finite(updates)
        count = torch.where(finite, 0, state.notfinite_count + 1)
        total = torch.where(finite, state.total_notfinite, state.total_notfinite + 1)
        takes = finite | (count > max_consecutive_errors)
        updates, inner_state = inner.update(updates, state.inner_state, params)
        leaves, treedef = tree.flatten(updates)
        if leaves:  # a step of -0.0 changes no bit: -0.0 + 0.0 is 0.0
            updates = tree.unflatten(treedef, list_ops.masked_fill(leaves, ~takes, -0.0))
        return updates, ApplyIfFiniteState(count, finite, total, select(takes, inner_state, state.inner_state))

    return stage(ApplyIfFiniteState, init, update, takes_integers=True)


def all_finite(values: Tree) -> Tensor:
    """Whether no element of a tree is inf or nan, a 0-d bool, the same on all ranks for `Sharded` leaves.

    One reduction over the mesh: it joins the collective of a global norm.
    """
    leaves = [leaf for leaf in tree.leaves(values) if leaf.dtype.is_floating_point or leaf.dtype.is_complex]
    if not leaves:
        return torch.ones((), dtype=torch.bool)
    # x - x is nan for inf and nan, else 0, and a sum of such is nan or 0. Sums of one dtype are one collective.
    return torch.stack([_narrow((leaf - leaf).sum()) for leaf in leaves]).sum().isfinite()


def _narrow(total: Tensor) -> Tensor:
    return (total.abs() if total.dtype.is_complex else total).to(torch.float32)


def select(condition: Tensor, new: Tree, old: Tree) -> Tree:
    """The tree `new` where `condition`, a 0-d bool, is true, else `old`, bit for bit: one list operation.

    Raises:
        FzeroError: for a condition that is no tensor; where the trees differ in structure, naming the leaf.
    """
    if not isinstance(condition, Tensor):
        raise FzeroError("select", f"condition is {condition!r:.80}", "give a 0-d bool tensor")
    olds, treedef = tree.flatten(old)
    news, new_def = tree.flatten(new)
    if new_def != treedef:
        raise tree.mismatch(treedef, new_def)
    return tree.unflatten(treedef, list_ops.masked_fill(olds, condition, cast(news, olds))) if olds else old
