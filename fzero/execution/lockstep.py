"""Lockstep: a program for every rank of its mesh at once, node by node, collectives computed across the ranks."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from fzero.base.errors import FzeroError
from fzero.base.mesh import VirtualMesh
from fzero.base.randomness import draw, fold, step_seed
from fzero.layout import buffers
from fzero.layout.layout import Layout, wire
from fzero.optim.kernels import fused_adamw_
from fzero.program import ops
from fzero.program.costs import last_uses
from fzero.program.ops import Node
from fzero.program.program import Program
from fzero.ranks.transports.reduction import JOINS

Values = list[Any]  # one a rank
Watch = Callable[[Node, list[dict[Node, Any]]], None]


class Seat(NamedTuple):
    """One rank of a mesh: its position along each axis, and its number among all, row by row."""

    mesh: VirtualMesh
    position: tuple[int, ...]
    number: int

    def along(self, axis: str) -> int:
        """This rank's position along an axis."""
        return self.position[self.mesh.names.index(axis)]

    @property
    def rank(self) -> int:
        """This rank's position along the axis that state is partitioned over."""
        return self.along(self.mesh.shard_axis)


def seats(mesh: VirtualMesh) -> list[Seat]:
    """The ranks of a mesh in order of their numbers."""
    positions = itertools.product(*(range(mesh.size(axis)) for axis in mesh.names))
    return [Seat(mesh, position, number) for number, position in enumerate(positions)]


@torch.no_grad()
def run(program: Program, arguments: Sequence[Sequence[Tensor]], watch: Watch | None = None) -> list[Values]:
    """The tensors that each rank's program returns, given each rank's arguments, which are written to where they are
    donated. `watch(node, values of each rank)` is called after each node, before values die. A program that draws
    advances torch's default CPU generator by one draw.

    Raises:
        FzeroError: where a node writes to memory that a collective is sending.
    """
    alive: list[dict[Node, Any]] = [dict(zip(program.placeholders, tensors, strict=True)) for tensors in arguments]
    dying = last_uses(program.graph)
    with step_seed() if program.draws else nullcontext() as seed:
        ranks = _Ranks(program, seed)
        for node in program.graph.nodes:
            _step(node, program, ranks, alive)
            if watch is not None:
                watch(node, alive)
            for dead, values in itertools.product(dying.get(node, ()), alive):
                del values[dead]
    return [list(fx.map_arg(program.output.args[0], values.__getitem__)) for values in alive]


def _step(node: Node, program: Program, ranks: _Ranks, alive: list[dict[Node, Any]]) -> None:
    """Note what a node gives on each rank."""
    if node.op == "get_attr":
        results = [program.constants[node.target] for _ in alive]
    elif node.op == "call_function":
        results = ranks.call(node, [fx.map_arg((node.args, node.kwargs), values.__getitem__) for values in alive])
    else:
        return
    for values, result in zip(alive, results, strict=True):
        values[node] = result


class _Pending(NamedTuple):
    """A started communication: its result, and what it reads, which nothing may write to until it is done."""

    result: Tensor
    sent: Sequence[Tensor]
    versions: list[int]


_EXCHANGES = {ops.gather, ops.scatter, ops.all_reduce, ops.all_gather, ops.reduce_scatter, ops.all_reduce_list}


class _Ranks:
    """All ranks of a program's mesh. Methods are named as `ops`.

    An exchange takes, as its first argument, what each rank gives; the rest is the same on all of them, and it returns
    a result a rank. Every other method is one rank's. Memory is shared where it is on a live mesh: what one rank
    gathers alone is a view of its slices. Means are taken in the order of ranks, as `transport` takes them.
    """

    def __init__(self, program: Program, seed: int | None) -> None:
        self.layouts, self.mesh, self.seed = program.layouts, program.mesh, seed
        self.seats = seats(program.mesh)
        self.rows = {axis: _rows(self.seats, self.mesh, axis) for axis in self.mesh.names}

    def call(self, node: Node, calls: list[tuple[tuple[Any, ...], dict[str, Any]]]) -> Values:
        """What a node gives on each rank, called with each rank's arguments."""
        if node.target in _EXCHANGES:
            perform, (given, how) = getattr(self, node.target.__name__.partition(".")[0]), calls[0]
            return perform([args[0] for args, _ in calls], *given[1:], **how)
        if node.target in ops.FAKES:
            perform = getattr(self, node.target.__name__.partition(".")[0])
            return [perform(seat, *args, **kwargs) for seat, (args, kwargs) in zip(self.seats, calls)]
        return [node.target(*args, **kwargs) for args, kwargs in calls]

    def _layout(self, bucket: str) -> Layout:
        return self.layouts[bucket]

    def gather(self, slices: list[Tensor], bucket: str, leaf: int, shape: Sequence[int]) -> Values:
        return _copies(self._joined(self.mesh.shard_axis, slices, lambda row: torch.cat(row).view(shape)))

    def scatter(self, fulls: list[Tensor], bucket: str, leaf: int, numel: int) -> Values:
        means = self._means([full.reshape(-1) for full in fulls])
        return [self.take(seat, mean, bucket, leaf, numel).clone() for seat, mean in zip(self.seats, means)]

    def all_reduce(self, values: list[Tensor], op: str, axis: str) -> Values:
        return _copies(self._joined(axis, values, lambda row: _reduced(row, op)))

    def all_reduce_list(self, values: list[Sequence[Tensor]], op: str, axis: str) -> Values:
        columns = [self.all_reduce(list(column), op, axis) for column in zip(*values)]
        return [list(row) for row in zip(*columns)]

    def all_gather(
        self,
        slices: list[Sequence[Tensor]],
        bucket: str,
        leaves: Sequence[int],
        numel: int,
        *,
        dtype: torch.dtype | None = None,
    ) -> Values:
        along = wire(self._layout(bucket), tuple(leaves))
        ranks = [(given, along, seat.rank) for given, seat in zip(slices, self.seats)]
        blocks = [buffers.block_of(*of, dtype) for of in ranks]
        copied = [dtype is not None or buffers.view_of(*of) is None for of in ranks]
        if self._layout(bucket).world > 1:
            blocks = _copies(self._joined(self.mesh.shard_axis, blocks, torch.cat))
        return [_started(block, [] if copy else given) for block, given, copy in zip(blocks, slices, copied)]

    def reduce_scatter(self, fulls: list[Sequence[Tensor]], bucket: str, leaves: Sequence[int], numel: int) -> Values:
        blocks = [buffers.blocks_of(given, wire(self._layout(bucket), tuple(leaves))) for given in fulls]
        if self.mesh.size() == 1:
            return [_started(block, [block]) for block in blocks]
        world = self._layout(bucket).world
        means = [mean.view(world, numel)[seat.rank].clone() for seat, mean in zip(self.seats, self._means(blocks))]
        return [_started(mean, [buffers.flatten(full) for full in given]) for mean, given in zip(means, fulls)]

    def wait(self, seat: Seat, pending: _Pending) -> Tensor:
        if [x._version for x in pending.sent] != pending.versions:
            raise FzeroError(
                f"rank {seat.number}", "memory that a collective is sending was written to", "mend the last pass"
            )
        return pending.result

    def whole(
        self, seat: Seat, buffer: Tensor, bucket: str, leaves: Sequence[int], position: int, shape: Sequence[int]
    ) -> Tensor:
        return buffers.join_leaf(buffer, wire(self._layout(bucket), tuple(leaves)), position, shape)

    def part(self, seat: Seat, block: Tensor, bucket: str, leaves: Sequence[int], position: int, numel: int) -> Tensor:
        return buffers.slice_of(block, wire(self._layout(bucket), tuple(leaves)), seat.rank, position)

    def take(self, seat: Seat, full: Tensor, bucket: str, leaf: int, numel: int) -> Tensor:
        part = self._layout(bucket).part(leaf, seat.rank)
        return full.reshape(-1)[part.start : part.stop]

    def beside(self, seat: Seat, x: Tensor) -> Tensor:
        return x.clone()

    def spread(self, seat: Seat, x: Tensor, like: Tensor) -> Tensor:
        return x.expand(like.shape).clone()

    def axis_index(self, seat: Seat, axis: str, device: torch.device) -> Tensor:
        return torch.tensor(seat.along(axis), device=device)

    def draw(self, seat: Seat, number: int, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        assert self.seed is not None  # a program with a draw has a seed
        return draw(fold(self.seed, seat.number, number), target, *args, **kwargs)

    def adamw(self, seat: Seat, *args: Any) -> tuple[list[Tensor], ...]:
        params, mu, nu = ([x.clone() for x in args[column]] for column in (0, 2, 3))
        fused_adamw_(params, args[1], mu, nu, *args[4:])
        return params, mu, nu

    def adamw_(self, seat: Seat, *args: Any) -> None:
        fused_adamw_(*args)

    def _joined(self, axis: str, values: list[Tensor], join: Callable[[list[Tensor]], Tensor]) -> Values:
        """What the ranks along an axis join to, for each rank; theirs together."""
        results: Values = [None] * len(values)
        for row in self.rows[axis]:
            joined = join([values[number] for number in row])
            for number in row:
                results[number] = joined
        return results

    def _means(self, values: list[Tensor]) -> list[Tensor]:
        """The mean over all ranks, for each rank: along the shard axis first, then along the others."""
        first = self.mesh.shard_axis
        for axis in (first, *(name for name in self.mesh.names if name != first)):
            if self.mesh.size(axis) > 1:
                values = self._joined(axis, values, lambda row: _reduced(row, "avg"))
        return values


def _rows(ranks: list[Seat], mesh: VirtualMesh, axis: str) -> list[list[int]]:
    """The numbers of the ranks that communicate along an axis: those whose other positions are equal."""
    along = mesh.names.index(axis)
    rows: dict[tuple[int, ...], list[int]] = {}
    for seat in ranks:
        rows.setdefault((*seat.position[:along], *seat.position[along + 1 :]), []).append(seat.number)
    return list(rows.values())


def _copies(values: list[Tensor]) -> Values:
    return [value.clone() for value in values]


def _started(result: Tensor, sent: Sequence[Tensor]) -> _Pending:
    return _Pending(result, sent, [x._version for x in sent])


def _reduced(values: Sequence[Tensor], op: str) -> Tensor:
    """The values of all ranks to one, in rank order."""
    join = JOINS[op]
    total = functools.reduce(join, values)
    return total / len(values) if op == "avg" else total
