"""Collectives of users over a mesh axis by name, or over several axes together, along dim 0. N ranks along the axis.

gather_rows         any -> uniform    [n, ...] of each rank -> [N n, ...] in rank order
psum_scatter_rows   any -> per-rank   [N n, ...] of each rank -> [n, ...], this rank's block of the sum
all_to_all_rows     any -> per-rank   [N n, ...], block r for rank r -> [N n, ...], block r from rank r
ppermute_rows       any -> per-rank   the tensor of the rank that sends to this one; zeros where none does
ragged_rows         any -> per-rank   [rows, ...], `given[r]` of them for rank r -> [bound, ...], `taken[r]` from rank r

The transpose of the first is the second, of an exchange the exchange back. The result of the first is the same along
the axis, those of the others differ.

`ragged_rows` knows its sizes when it runs. Rows behind those that are given or taken are zeros, and rows behind `bound`
are cut off. So its transpose is itself with the sizes swapped, whatever they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fzero.program.comm import Comm
from fzero.program.kinds import Kind
from fzero.program.linear import apply
from fzero.program.operation import NO_WORK, Node
from fzero.program.ops.reductions import check_axis
from fzero.program.records import record, register_for_tracing
from fzero.program.refusals import refuse_node
from fzero.ranks.exchanges import AllGather, AllToAll, Rank, Steps
from fzero.ranks.transports.reduction import reduce

if TYPE_CHECKING:
    from fzero.program.inference import Walk
    from fzero.program.program import Program


def _check(program: Program, node: Node) -> None:
    _, axis, world = node.args[:3]
    check_axis(program, node, axis)
    if program.mesh.size(axis) != world:
        raise refuse_node(program, node, f"has {world} ranks along {axis!r}", f"there are {program.mesh.size(axis)}")


def _axes(walk: Walk, node: Node) -> frozenset[str]:
    return frozenset(walk.program.mesh.split(node.args[1]))


def _same_kind(walk: Walk, node: Node) -> Kind:
    walk.expect_full(node, node.args[0])
    return walk.of(node.args[0]) - _axes(walk, node)


def _different_kind(walk: Walk, node: Node) -> Kind:
    walk.expect_full(node, node.args[0])
    return walk.of(node.args[0]) | _axes(walk, node)


def _moves(op: str, count: Callable[[Node], int]) -> Callable[[Program, Node], Iterator[Comm]]:
    """The rule `moves` of one collective `op`, whose full buffer has `count(node)` elements."""

    def moves(program: Program, node: Node) -> Iterator[Comm]:
        value = node.meta["val"]
        yield Comm(op, node.args[1], None, value.dtype, count(node) * value.element_size())

    return moves


def _describe(op: str, count: Callable[[Node], int]) -> dict[str, Any]:
    return {
        "check": _check,
        "moves": _moves(op, count),
        "work": lambda node: NO_WORK,
        "label": lambda program, node: f"{op} {node.args[1]}",
    }


def _gather(program: Program, node: Node, rank: Rank) -> Callable[..., Steps]:
    def run(x: Tensor, axis: str, world: int) -> Steps:
        full = yield AllGather(f"{AllGather.name} over {axis}", axis, x.reshape(-1))
        return full.view(world * x.shape[0], *x.shape[1:])

    return run


def _psum_scatter(program: Program, node: Node, rank: Rank) -> Callable[..., Steps]:
    def run(x: Tensor, axis: str, world: int) -> Steps:
        blocks = yield AllToAll(f"psum_scatter over {axis}", axis, x.reshape(-1))
        return reduce(blocks.view(world, x.shape[0] // world, *x.shape[1:]).unbind(), "sum")

    return run


def _all_to_all(program: Program, node: Node, rank: Rank) -> Callable[..., Steps]:
    def run(x: Tensor, axis: str, world: int) -> Steps:
        return (yield AllToAll(f"{AllToAll.name} over {axis}", axis, x.reshape(-1))).view(x.shape)

    return run


def _permute(program: Program, node: Node, rank: Rank) -> Callable[..., Steps]:
    def run(x: Tensor, axis: str, world: int, perm: Sequence[int]) -> Steps:
        me, numel = rank.along(axis), x.numel()
        given, taken = ([0] * world for _ in range(2))
        for source, target in _pairs(perm):
            given[target] += numel * (source == me)
            taken[source] += numel * (target == me)
        sent = x.reshape(-1) if any(given) else x.new_empty(0)
        received = yield AllToAll(f"ppermute over {axis}", axis, sent, (given, taken))
        return received.view(x.shape) if any(taken) else torch.zeros_like(x, memory_format=torch.contiguous_format)

    return run


def _exchange_rows(program: Program, node: Node, rank: Rank) -> Callable[..., Steps]:
    def run(x: Tensor, axis: str, world: int, given: Tensor, taken: Tensor, bound: int, rows: int) -> Steps:
        row, sizes = math.prod(x.shape[1:]), (given.tolist(), taken.tolist())  # on a GPU this waits for the sizes
        sent = resize(x, sum(sizes[0])).reshape(-1)
        splits = [row * size for size in sizes[0]], [row * size for size in sizes[1]]
        received = yield AllToAll(f"ragged_all_to_all over {axis}", axis, sent, splits)
        return resize(received.view(sum(sizes[1]), *x.shape[1:]), bound)

    return run


def resize(x: Tensor, rows: int) -> Tensor:
    """The first rows of a tensor, and zeros where it has fewer."""
    missing = rows - x.shape[0]
    return torch.cat([x, x.new_zeros((missing, *x.shape[1:]))]) if missing > 0 else x[:rows]


def _kind_of_rows(walk: Walk, node: Node) -> Kind:
    for sizes in node.args[3:5]:
        walk.expect_full(node, sizes)
    return _different_kind(walk, node).union(*map(walk.of, node.args[3:5]))


def _pairs(perm: Sequence[int]) -> list[tuple[int, int]]:
    """`[0, 1, 1, 0] -> [(0, 1), (1, 0)]`: sources and targets."""
    return list(zip(perm[::2], perm[1::2]))


def _inverse(perm: Sequence[int]) -> list[int]:
    return [position for source, target in _pairs(perm) for position in (target, source)]


def _count_of_all(node: Node) -> int:
    return int(node.args[2]) * math.prod(node.meta["val"].shape)


def _count_rows(node: Node) -> int:
    """A rank sends at most the rows that it has, and takes at most the bound: on average the fewer of both."""
    return min(node.args[5:7]) * math.prod(node.meta["val"].shape[1:])


gather_rows: Any = register_for_tracing(
    "gather_rows(Tensor x, str axis, int world) -> Tensor",
    lambda x, axis, world: x.new_empty((world * x.shape[0], *x.shape[1:])),
    kind=_same_kind,
    perform=_gather,
    transpose=lambda cotangent, axis, world: apply(record(psum_scatter_rows), cotangent, axis, world),
    **_describe(AllGather.name, lambda node: math.prod(node.meta["val"].shape)),
)
psum_scatter_rows: Any = register_for_tracing(
    "psum_scatter_rows(Tensor x, str axis, int world) -> Tensor",
    lambda x, axis, world: x.new_empty((x.shape[0] // world, *x.shape[1:])),
    kind=_different_kind,
    perform=_psum_scatter,
    transpose=lambda cotangent, axis, world: apply(record(gather_rows), cotangent, axis, world),
    **_describe("psum_scatter", _count_of_all),
)
all_to_all_rows: Any = register_for_tracing(
    "all_to_all_rows(Tensor x, str axis, int world) -> Tensor",
    lambda x, axis, world: x.new_empty(x.shape),
    kind=_different_kind,
    perform=_all_to_all,
    transpose=lambda cotangent, axis, world: apply(record(all_to_all_rows), cotangent, axis, world),
    **_describe(AllToAll.name, lambda node: math.prod(node.meta["val"].shape)),
)
ppermute_rows: Any = register_for_tracing(
    "ppermute_rows(Tensor x, str axis, int world, int[] perm) -> Tensor",
    lambda x, axis, world, perm: x.new_empty(x.shape),
    kind=_different_kind,
    perform=_permute,
    transpose=lambda cotangent, axis, world, perm: apply(record(ppermute_rows), cotangent, axis, world, _inverse(perm)),
    **_describe("ppermute", _count_of_all),
)
ragged_rows: Any = register_for_tracing(
    "ragged_rows(Tensor x, str axis, int world, Tensor given, Tensor taken, SymInt bound, SymInt rows) -> Tensor",
    lambda x, axis, world, given, taken, bound, rows: x.new_empty((bound, *x.shape[1:])),
    kind=_kind_of_rows,
    perform=_exchange_rows,
    transpose=lambda cotangent, axis, world, given, taken, bound, rows: apply(
        record(ragged_rows), cotangent, axis, world, taken, given, rows, bound
    ),
    **_describe("ragged_all_to_all", _count_rows),
)
