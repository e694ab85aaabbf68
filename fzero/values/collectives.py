"""Collectives over a named mesh axis: differentiable functions of trees. Outside `shard` they are the identity."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fzero.base import tree
from fzero.base.arguments import check_arguments
from fzero.base.devices import parse_device
from fzero.base.errors import FzeroError
from fzero.program import ops
from fzero.program.linear import apply
from fzero.program.records import record
from fzero.ranks.performer import MovePerformer, current_performer
from fzero.values.functions import is_sharded
from fzero.values.moves import MEAN, Extreme, move
from fzero.values.quantized import read_quantized_leaves


@check_arguments
def psum(x: tree.Tree, axis: str) -> tree.Tree:
    """The sum of each leaf over the ranks along a mesh axis, the same on every rank. The identity outside `shard`.

    Ranks hold [1, 2] and [10, 20]: both get [11, 22].

    Raises:
        FzeroError: for an axis that the mesh does not have.
    """
    return _reduce(x, "sum", axis)


@check_arguments
def pmean(x: tree.Tree, axis: str) -> tree.Tree:
    """The mean of each leaf over the ranks along a mesh axis, the same on every rank. The identity outside `shard`.

    Ranks hold [1, 2] and [3, 6]: both get [2, 4].

    Raises:
        FzeroError: for an axis that the mesh does not have.
    """
    return _reduce(x, "avg", axis)


@check_arguments
def pmax(x: tree.Tree, axis: str) -> tree.Tree:
    """The elementwise maximum of each leaf over the ranks along a mesh axis, the same on every rank.

    The identity outside `shard`.

    Ranks hold [1, 9] and [3, 6]: both get [3, 9].

    Raises:
        FzeroError: for an axis that the mesh does not have.
    """
    return _reduce(x, "max", axis)


def is_in_step() -> bool:
    """Whether a sharded step is traced or performed: the collectives here reduce over its ranks."""
    return current_performer() is not None


def mean_over_data(x: Tensor) -> Tensor:
    """The mean of a value over all ranks, the same on every rank. The identity outside `shard`."""
    on = current_performer()
    if on is None or is_sharded(x):  # which is its own mean
        return x
    _check_dtype(x, "avg")
    return move(MEAN, x, on, "")


def count_ranks() -> int:
    """How many ranks `mean_over_data` takes the mean over; 1 outside `shard`."""
    on = current_performer()
    return 1 if on is None else on.mesh.size()


@check_arguments
def axis_index(axis: str, device: torch.device | str = "cpu") -> Tensor:
    """This rank's position along a mesh axis, a 0-d int64 tensor; 0 outside `shard`.

    Raises:
        FzeroError: for an axis that the mesh does not have.
    """
    on = current_performer()
    device = parse_device(device)
    if on is None:
        return torch.zeros((), dtype=torch.int64, device=device)
    on.mesh.size(axis)  # raises for an axis that the mesh does not have
    return on.perform(record(ops.axis_index), axis, device)


def _reduce(x: tree.Tree, op: str, axis: str) -> tree.Tree:
    on = current_performer()
    if on is None:
        return x
    on.mesh.size(axis)  # raises for an axis that the mesh does not have
    return tree.map(lambda leaf: _reduce_leaf(leaf, on, op, axis), read_quantized_leaves(x))


def _reduce_leaf(leaf: Any, on: MovePerformer, op: str, axis: str) -> Tensor:
    """A leaf, reduced over the ranks along an axis. All ranks hold the same `Sharded`, which is its own mean."""
    if is_sharded(leaf):
        return leaf * on.mesh.size(axis) if op == "sum" else leaf
    if op == "max":
        return Extreme.apply(leaf, on, axis)
    _check_dtype(leaf, op)
    return apply(record(ops.all_reduce), leaf, op, axis)


def _check_dtype(x: Tensor, op: str) -> None:
    """Refuse the mean of integers and the sum of bools, which have another dtype than the operand."""
    if x.dtype == torch.bool or (op == "avg" and not (x.is_floating_point() or x.is_complex())):
        name, to = ("pmean", "a floating dtype") if op == "avg" else ("psum", "torch.int64")
        problem = f"the result cannot have the dtype of the operand, {x.dtype}"
        raise FzeroError(name, problem, f"cast the operand to {to}")
