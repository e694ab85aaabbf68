"""What an optimizer is: two pure functions, and how such pairs combine. Names and meanings are optax's.

    state = optimizer.init(params)
    updates, state = optimizer.update(grads, state, params)
    params = apply_updates(params, updates)

All leaves pass through one list operation at a time, so that a traced step has one node for a stage of the optimizer
and not one for each leaf.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fzero.base import tree
from fzero.base.errors import FzeroError
from fzero.base.tree import Tree, TreeDef

State = Any
Schedule = Callable[[Any], Any]
"""Step count, a 0-d integer tensor from 0 upwards -> a 0-d float32 tensor (or a number)."""
Mask = Callable[[str, Any], bool]
"""(dotted path, logical leaf with `shape`, `ndim` and `dtype`) -> whether the leaf takes part."""


class Init(Protocol):
    def __call__(self, params: Tree) -> State: ...


class Update(Protocol):
    def __call__(self, updates: Tree, state: State, params: Tree | None = None) -> tuple[Tree, State]: ...


class GradientTransformation(NamedTuple):
    """A stage of an optimizer, without state of its own (optax's `GradientTransformation`).

    `init(params)` is the first state; `update(updates, state, params=None)` is `(new updates, new state)`.
    """

    init: Init
    update: Update


class EmptyState(NamedTuple):
    """The state of a stage that remembers nothing."""


def stateless(update: Callable[[Tree, Tree | None], Tree]) -> GradientTransformation:
    """The stage whose new updates are `update(updates, params)` (optax's `stateless`)."""
    return GradientTransformation(
        lambda params: EmptyState(),
        lambda updates, state, params=None: (update(updates, params), state),
    )


def identity() -> GradientTransformation:
    """The stage that hands updates on as they came."""
    return stateless(lambda updates, params: updates)


def chain(*transforms: GradientTransformation) -> GradientTransformation:
    """`transforms` one after the other; the state is the tuple of their states.

    Raises:
        FzeroError: in `update`, for a state with another number of parts.
    """

    def init(params: Tree) -> State:
        return tuple(transform.init(params) for transform in transforms)

    def update(updates: Tree, state: State, params: Tree | None = None) -> tuple[Tree, State]:
        if len(state) != len(transforms):
            raise FzeroError(
                "chain",
                f"the state has {len(state)} parts, the chain {len(transforms)}",
                "give the state that this optimizer's init or update returned",
            )
        states = []
        for transform, part in zip(transforms, state):
            updates, part = transform.update(updates, part, params)
            states.append(part)
        return updates, tuple(states)

    return GradientTransformation(init, update)


def apply_updates(params: Tree, updates: Tree) -> Tree:
    """`params + updates`, each leaf in its parameter's dtype (the sum is rounded once, as in optax).

    Raises:
        FzeroError: naming the leaf in which the trees differ.
    """
    treedef, (weights, steps) = columns(params, updates)
    if not weights:
        return params
    return tree.unflatten(treedef, cast(torch._foreach_add(weights, steps), weights))


def columns(first: Tree, *rest: Tree) -> tuple[TreeDef, list[list[Any]]]:
    """`(treedef, one list of leaves a tree)`, for list operations.

    Raises:
        FzeroError: naming the first leaf of `rest` whose path or shape is not as in `first`.
    """
    leaves, treedef = tree.flatten(first)
    lists = [leaves]
    for other in rest:
        others, other_def = tree.flatten(other)
        if other_def != treedef:
            raise tree.mismatch(treedef, other_def)
        for i, (leaf, given) in enumerate(zip(leaves, others)):
            if tuple(leaf.shape) != tuple(given.shape):
                problem = f"shape {tuple(given.shape)} given, {tuple(leaf.shape)} expected"
                raise FzeroError(tree.paths(first)[i], problem, "give a leaf of the parameter's shape")
        lists.append(others)
    return treedef, lists


def cast(values: Sequence[Any], likes: Sequence[Any]) -> list[Any]:
    """Each value in the dtype of its like; one that has it already is the same object."""
    return [value if value.dtype == like.dtype else value.to(like.dtype) for value, like in zip(values, likes)]


def zeros(params: Tree) -> Tree:
    """Zeros as `params`, sharded as they are.

    Raises:
        FzeroError: naming a leaf whose dtype is not a floating one.
    """
    return tree.map_with_path(_zeros, params)


def _zeros(path: str, leaf: Any) -> Any:
    if not leaf.dtype.is_floating_point:
        raise FzeroError(
            path,
            f"dtype is {leaf.dtype}, an optimizer needs a floating one",
            "set such leaves aside with fzero.tree.split",
        )
    return torch.zeros_like(leaf)


def step_count(params: Tree) -> Tensor:
    """0, a 0-d int32 where the first leaf lives: held whole by every rank of its mesh."""
    leaves = tree.leaves(params)
    return leaves[0].new_zeros((), dtype=torch.int32) if leaves else torch.zeros((), dtype=torch.int32)
