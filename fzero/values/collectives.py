"""Collectives over a named mesh axis: differentiable functions of trees. Outside `shard` the mesh has one rank.

An axis is a name, or a tuple of names: then one collective acts over the ranks along all of these, numbered row by row.

    collective                            along its axis            transpose
    psum, pmean                           different -> same         themselves
    pmax, pmin                            different -> same         equal shares to the ranks that hold the extreme
    all_gather(x, axis, dim)              different -> same         psum_scatter
    psum_scatter(x, axis, dim)            different -> different    all_gather
    all_to_all(x, axis, split, concat)    different -> different    all_to_all(x, axis, concat, split)
    ppermute(x, axis, perm)               different -> different    ppermute, targets to sources
    axis_index(axis)                      -> different              none

A derivative needs no reduction of the user's: the gradient of a leaf is the mean over all ranks (docs/axes.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from fzero.values.moves import MEAN, Cut, Extreme, move, reduce_linear
from fzero.values.quantized import read_quantized_leaves

Axis = str | tuple[str, ...]


@check_arguments
def psum(x: tree.Tree, axis: Axis) -> tree.Tree:
    """The sum of each leaf over the ranks along a mesh axis, the same on every rank. The identity outside `shard`.

    Ranks hold [1, 2] and [10, 20]: both get [11, 22].

    Raises:
        FzeroError: for an axis that the mesh does not have.
    """
    return _reduce(x, "sum", axis)


@check_arguments
def pmean(x: tree.Tree, axis: Axis) -> tree.Tree:
    """The mean of each leaf over the ranks along a mesh axis, the same on every rank. The identity outside `shard`.

    Ranks hold [1, 2] and [3, 6]: both get [2, 4].

    Raises:
        FzeroError: for an axis that the mesh does not have.
    """
    return _reduce(x, "avg", axis)


@check_arguments
def pmax(x: tree.Tree, axis: Axis) -> tree.Tree:
    """The elementwise maximum of each leaf over the ranks along a mesh axis, the same on every rank.

    The identity outside `shard`.

    Ranks hold [1, 9] and [3, 6]: both get [3, 9].

    Raises:
        FzeroError: for an axis that the mesh does not have.
    """
    return _reduce(x, "max", axis)


@check_arguments
def pmin(x: tree.Tree, axis: Axis) -> tree.Tree:
    """The elementwise minimum of each leaf over the ranks along a mesh axis, as `pmax`."""
    return _reduce(x, "min", axis)


@check_arguments
def all_gather(x: tree.Tree, axis: Axis, dim: int = 0) -> tree.Tree:
    """Each leaf of all ranks along a mesh axis, joined along `dim` in rank order, the same on every rank.

    The identity outside `shard`.

    Ranks hold [1, 2] and [3, 4]: both get [1, 2, 3, 4].

    Raises:
        FzeroError: for an axis that the mesh does not have, or a dim that a leaf does not have.
    """

    def gather(leaf: Tensor, on: MovePerformer, name: str, world: int) -> Tensor:
        at = _dim(leaf, dim, "dim")
        rows = apply(record(ops.gather_rows), leaf.movedim(at, 0), name, world, on=on)
        return rows.movedim(0, at)

    return _map("all_gather", x, axis, gather)


@check_arguments
def psum_scatter(x: tree.Tree, axis: Axis, dim: int = 0) -> tree.Tree:
    """This rank's block along `dim` of the sum of each leaf over the ranks along a mesh axis, which has a block for
    each rank. The identity outside `shard`.

    Ranks hold [1, 2] and [10, 20]: they get [11] and [22].

    Raises:
        FzeroError: for an axis that the mesh does not have; for a dim that does not divide by its ranks.
    """

    def scatter(leaf: Tensor, on: MovePerformer, name: str, world: int) -> Tensor:
        at = _dim(leaf, dim, "dim")
        _check_dtype(leaf, "sum", "psum_scatter")
        _check_divides("psum_scatter", leaf, at, name, world)
        rows = apply(record(ops.psum_scatter_rows), leaf.movedim(at, 0), name, world, on=on)
        return rows.movedim(0, at)

    return _map("psum_scatter", x, axis, scatter)


@check_arguments
def all_to_all(x: tree.Tree, axis: Axis, split: int, concat: int) -> tree.Tree:
    """Cut each leaf along dim `split` into a block for each rank along a mesh axis, and join along dim `concat` the
    blocks that other ranks have cut for this one, in rank order. The identity outside `shard`.

    Two ranks with [s, h] each, of different rows: `split=1, concat=0` gives [2 s, h / 2], all rows and some columns.

    Raises:
        FzeroError: for an axis that the mesh does not have; for a dim that does not divide by its ranks.
    """

    def exchange(leaf: Tensor, on: MovePerformer, name: str, world: int) -> Tensor:
        cut, joined = _dim(leaf, split, "split"), _dim(leaf, concat, "concat")
        _check_divides("all_to_all", leaf, cut, name, world)
        blocks = leaf.unflatten(cut, (world, leaf.shape[cut] // world)).movedim(cut, 0)
        received = apply(record(ops.all_to_all_rows), blocks, name, world, on=on)
        return received.movedim(0, joined).flatten(joined, joined + 1)

    return _map("all_to_all", x, axis, exchange)


@check_arguments
def ppermute(x: tree.Tree, axis: Axis, perm: Sequence[tuple[int, int]]) -> tree.Tree:
    """Send each leaf from rank to rank along a mesh axis: `perm` lists pairs of a source and a target, positions along
    the axis. A rank that no pair sends to gets zeros. Outside `shard` a rank is alone, at position 0.

    Raises:
        FzeroError: for an axis that the mesh does not have; for a position that is not along it, or that is twice a
            source, or twice a target.
    """
    pairs = [(int(source), int(target)) for source, target in perm]
    if any(len(set(column)) < len(pairs) for column in zip(*pairs)):
        raise FzeroError("perm", f"{pairs} has a source or a target twice", "let each rank send and receive once")
    flat = [position for pair in pairs for position in pair]

    def permute(leaf: Tensor, on: MovePerformer, name: str, world: int) -> Tensor:
        if any(not 0 <= position < world for position in flat):
            raise FzeroError("perm", f"{pairs} names others than the {world} ranks along {name!r}", "name these")
        return apply(record(ops.ppermute_rows), leaf, name, world, flat, on=on)

    if current_performer() is None:
        return x if (0, 0) in pairs else tree.map(torch.zeros_like, x)
    return _map("ppermute", x, axis, permute)


def _map(
    name: str, x: tree.Tree, axis: Axis, collective: Callable[[Tensor, MovePerformer, str, int], Tensor]
) -> tree.Tree:
    on = current_performer()
    if on is None:
        return x
    axes = _name(on, axis)

    def of_leaf(leaf: Any) -> Tensor:
        leaf = _take_part(leaf, on, axes)
        if is_sharded(leaf):
            problem = "is state, which is the same on all ranks"
            raise FzeroError(leaf.path, f"{name} over {axes!r}: it {problem}", "compute with it first")
        if name in _OF_DIFFERENT:
            _check_differs(name, leaf, on, axes)
        return collective(leaf, on, axes, on.mesh.size(axes))

    return tree.map(of_leaf, read_quantized_leaves(x))


_OF_DIFFERENT = frozenset({"psum", "all_gather", "psum_scatter"})


def _check_differs(name: str, x: Tensor, on: MovePerformer, axis: str) -> None:
    """Refuse a value that is the same along a model axis: its sum would be the value times the ranks."""
    same = on.find_same(x).intersection(on.mesh.split(axis))
    if same:
        problem = f"the value {list(x.shape)} is the same on all ranks along the model axis {min(same)!r}"
        raise FzeroError(name, problem, "leave the collective out, or compute a part of the value on each rank first")


def _take_part(leaf: Any, on: MovePerformer, axis: str) -> Any:
    """A leaf; of one that is split over one of the axes this rank's part, which differs along them."""
    is_part = is_sharded(leaf) and not set(leaf.form.layout.split_axes).isdisjoint(on.mesh.split(axis))
    return leaf.full_tensor() if is_part else leaf


def _name(on: MovePerformer, axis: Axis) -> str:
    """The name of an axis, or of several together. Raises for an axis that the mesh does not have."""
    return on.mesh.join((axis,) if isinstance(axis, str) else axis)


def _dim(x: Tensor, dim: int, name: str) -> int:
    if not -x.ndim <= dim < x.ndim:
        raise FzeroError(name, f"is {dim}, of a tensor {list(x.shape)}", "name a dim of the tensor")
    return dim % x.ndim


def _check_divides(name: str, x: Tensor, dim: int, axis: str, world: int) -> None:
    if x.shape[dim] % world:
        problem = f"cuts dim {dim} of {list(x.shape)} into {world} blocks, one for each rank along {axis!r}"
        raise FzeroError(name, f"{problem}, and {x.shape[dim]} does not divide by {world}", "pad it to a multiple")


def is_same_along(x: Tensor, axis: Axis) -> bool:
    """Whether a tensor of a step is known to be the same on all ranks along a model axis, or along each of several."""
    on = current_performer()
    return on is not None and on.find_same(x).issuperset(on.mesh.split(_name(on, axis)))


def is_in_step() -> bool:
    """Whether a sharded step is traced or performed: the collectives here reduce over its ranks."""
    return current_performer() is not None


def mean_over_data(x: Tensor) -> Tensor:
    """The mean of a value over all ranks, the same on every rank. The identity outside `shard`."""
    on = current_performer()
    if on is None or is_sharded(x):  # which is its own mean
        return x
    _check_dtype(x, "avg")
    return move(MEAN, x, on, Cut())


def count_ranks() -> int:
    """How many ranks `mean_over_data` takes the mean over; 1 outside `shard`."""
    on = current_performer()
    return 1 if on is None else on.mesh.size()


@check_arguments
def axis_size(axis: Axis) -> int:
    """The number of ranks along a mesh axis; 1 outside `shard`.

    Raises:
        FzeroError: for an axis that the mesh does not have.
    """
    on = current_performer()
    return 1 if on is None else on.mesh.size(_name(on, axis))


@check_arguments
def axis_index(axis: Axis, device: torch.device | str = "cpu") -> Tensor:
    """This rank's position along a mesh axis, a 0-d int64 tensor; 0 outside `shard`.

    Raises:
        FzeroError: for an axis that the mesh does not have.
    """
    on = current_performer()
    device = parse_device(device)
    if on is None:
        return torch.zeros((), dtype=torch.int64, device=device)
    return on.perform(record(ops.axis_index), _name(on, axis), device)


def _reduce(x: tree.Tree, op: str, axis: Axis) -> tree.Tree:
    on = current_performer()
    if on is None:
        return x
    axes = _name(on, axis)
    return tree.map(lambda leaf: _reduce_leaf(leaf, on, op, axes), read_quantized_leaves(x))


def _reduce_leaf(leaf: Any, on: MovePerformer, op: str, axis: str) -> Tensor:
    """A leaf, reduced over the ranks along an axis. All ranks hold the same `Sharded`, which is its own mean."""
    leaf = _take_part(leaf, on, axis)
    if is_sharded(leaf):
        if op == "sum":
            _check_differs("psum", leaf.full_tensor(), on, axis)
        return leaf * on.mesh.size(axis) if op == "sum" else leaf
    if op in ("max", "min"):
        return Extreme.apply(leaf, on, axis, op)
    _check_dtype(leaf, op)
    if op == "sum":
        _check_differs("psum", leaf, on, axis)
    return reduce_linear(leaf, op, axis, on)


def _check_dtype(x: Tensor, op: str, name: str = "psum") -> None:
    """Refuse the mean of integers and the sum of bools, which have another dtype than the operand."""
    if x.dtype == torch.bool or (op == "avg" and not (x.is_floating_point() or x.is_complex())):
        name, to = ("pmean", "a floating dtype") if op == "avg" else (name, "torch.int64")
        problem = f"the result cannot have the dtype of the operand, {x.dtype}"
        raise FzeroError(name, problem, f"cast the operand to {to}")
