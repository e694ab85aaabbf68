"""Collectives over a named mesh axis: differentiable functions of trees. Outside `shard` they are the identity."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from fzero.base import tree
from fzero.base.arguments import check_arguments
from fzero.base.devices import parse_device
from fzero.ranks.performer import MovePerformer
from fzero.values.functions import is_sharded
from fzero.values.moves import AllReduce, Extreme
from fzero.values.quantized import read_quantized_leaves

_current: ContextVar[MovePerformer | None] = ContextVar("fzero_move_performer", default=None)


@contextmanager
def bind_axes(on: MovePerformer) -> Iterator[None]:
    """Inside this context `on` performs the collectives below on its mesh. Outside they see one rank."""
    token = _current.set(on)
    try:
        yield
    finally:
        _current.reset(token)


@check_arguments
def psum(x: tree.Tree, axis: str) -> tree.Tree:
    """The sum of each leaf over the ranks along a mesh axis, the same on every rank. The identity outside `shard`.

    Ranks hold [1, 2] and [10, 20]: both get [11, 22].

    Raises:
        FzeroError: for an axis that the mesh does not have.
    """
    return _all_reduce(AllReduce, x, "sum", axis)


@check_arguments
def pmean(x: tree.Tree, axis: str) -> tree.Tree:
    """The mean of each leaf over the ranks along a mesh axis, the same on every rank. The identity outside `shard`.

    Ranks hold [1, 2] and [3, 6]: both get [2, 4].

    Raises:
        FzeroError: for an axis that the mesh does not have.
    """
    return _all_reduce(AllReduce, x, "avg", axis)


@check_arguments
def pmax(x: tree.Tree, axis: str) -> tree.Tree:
    """The elementwise maximum of each leaf over the ranks along a mesh axis, the same on every rank.

    The identity outside `shard`.

    Ranks hold [1, 9] and [3, 6]: both get [3, 9].

    Raises:
        FzeroError: for an axis that the mesh does not have.
    """
    return _all_reduce(Extreme, x, "max", axis)


def is_in_step() -> bool:
    """Whether a sharded step is traced or performed: the collectives here reduce over its ranks."""
    return _current.get() is not None


def mean_over_data(x: Tensor) -> Tensor:
    """The mean of a value over all ranks, the same on every rank. The identity outside `shard`."""
    on = _current.get()
    return x if on is None else _reduce_leaf(AllReduce, x, on, "avg", *on.mesh.names)


def count_ranks() -> int:
    """How many ranks `mean_over_data` takes the mean over; 1 outside `shard`."""
    on = _current.get()
    return 1 if on is None else on.mesh.size()


@check_arguments
def axis_index(axis: str, device: torch.device | str = "cpu") -> Tensor:
    """This rank's position along a mesh axis, a 0-d int64 tensor; 0 outside `shard`.

    Raises:
        FzeroError: for an axis that the mesh does not have.
    """
    on = _current.get()
    device = parse_device(device)
    if on is None:
        return torch.zeros((), dtype=torch.int64, device=device)
    on.mesh.size(axis)  # raises for an axis that the mesh does not have
    return on.axis_index(axis, device)


def _all_reduce(move: type[torch.autograd.Function], x: tree.Tree, op: str, axis: str) -> tree.Tree:
    on = _current.get()
    if on is None:
        return x
    on.mesh.size(axis)  # raises for an axis that the mesh does not have
    return tree.map(lambda leaf: _reduce_leaf(move, leaf, on, op, axis), read_quantized_leaves(x))


def _reduce_leaf(move: type[torch.autograd.Function], leaf: Any, on: MovePerformer, op: str, *axes: str) -> Tensor:
    """A leaf, reduced over the ranks along some axes. All ranks hold the same `Sharded`, which is its own mean."""
    if is_sharded(leaf):
        return leaf * math.prod(map(on.mesh.size, axes)) if op == "sum" else leaf
    return move.apply(leaf, on, op, axes)
