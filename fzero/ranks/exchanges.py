"""Exchanges: what an operation asks other ranks for, as data.

One description serves both ways to run a program. A rank of a live mesh starts an exchange on the transport of its
axis; for virtual ranks `join` computes what all ranks along the axis get, from what each of them gives, in rank order.

An operation that communicates is a generator: it yields an exchange, and is sent the result.

    def run(x):
        total = yield AllReduce("all_reduce over fsdp", "fsdp", x, "sum")
        return total / 2
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from fzero.base.errors import FzeroError
from fzero.layout import buffers
from fzero.layout.wires import Wire
from fzero.ranks.link import Link
from fzero.ranks.members import Attempt
from fzero.ranks.transports import Alone, Pending, Splits, Transport
from fzero.ranks.transports.reduction import reduce


class Rank(Protocol):
    """One rank of a mesh, for the operations that it performs: of a live mesh, or a virtual one."""

    @property
    def rank(self) -> int:
        """The rank's position along the shard axis."""

    @property
    def number(self) -> int:
        """The rank's number among all ranks of the mesh, row by row."""

    @property
    def link(self) -> Link:
        """The way between the memory of the rank's device and that of the host."""

    def along(self, axis: str) -> int:
        """The rank's position along an axis."""


class Exchange(Protocol):
    """What one rank gives to the ranks along a mesh axis."""

    @property
    def name(self) -> str:
        """The name of the collective, as programs list it."""

    @property
    def what(self) -> str:
        """What it is in errors: "all_gather of layers.0"."""

    @property
    def axis(self) -> str:
        """The mesh axis."""

    @property
    def sent(self) -> Sequence[Tensor]:
        """What other ranks read, and nothing may write to until the exchange was waited for."""

    def start(self, transport: Transport, attempt: Attempt) -> Pending:
        """Start it on one rank of a live mesh."""

    def join(self, row: Sequence[Any]) -> list[Tensor]:
        """What each rank of a row gets, of the exchanges that all of them ask for."""

    def measure(self, world: int) -> tuple[Tensor, int]:
        """A tensor of its dtype, and the elements of the parts of all ranks together."""


Steps = Generator[Exchange, Tensor, Any]
"""An operation that communicates, as one rank runs it."""


@dataclass(frozen=True, slots=True)
class AllGather:
    """[S] of each rank -> [N * S] in rank order. `into`, where given, is the result, with `block` in its own place;
    `slices` are what lies in a block that is sent from where it lies."""

    what: str
    axis: str
    block: Tensor
    into: Tensor | None = None
    slices: Sequence[Tensor] = ()
    name = "all_gather"

    @property
    def sent(self) -> Sequence[Tensor]:
        return self.slices

    def start(self, transport: Transport, attempt: Attempt) -> Pending:
        return transport.all_gather(self.block, attempt, self.into)

    def measure(self, world: int) -> tuple[Tensor, int]:
        return self.block, world * self.block.numel()

    def join(self, row: Sequence[AllGather]) -> list[Tensor]:
        if len(row) == 1:
            return [self.block]
        full = torch.cat([each.block for each in row])
        return [full.clone() for _ in row]


@dataclass(frozen=True, slots=True)
class ReduceScatter:
    """The leaves of a wire in full -> [S] this rank's block of their mean over the ranks."""

    what: str
    axis: str
    fulls: Sequence[Tensor]
    wire: Wire
    name = "reduce_scatter"

    @property
    def sent(self) -> Sequence[Tensor]:
        return [buffers.flatten(full) for full in self.fulls]

    def start(self, transport: Transport, attempt: Attempt) -> Pending:
        return transport.reduce_scatter(self.fulls, self.wire, attempt)

    def measure(self, world: int) -> tuple[Tensor, int]:
        return self.fulls[0], self.wire.sent

    def join(self, row: Sequence[ReduceScatter]) -> list[Tensor]:
        blocks = [buffers.blocks_of(each.fulls, self.wire) for each in row]
        if len(row) == 1:
            return blocks
        return [block.clone() for block in reduce(blocks, "avg").view(len(row), self.wire.stride)]


@dataclass(frozen=True, slots=True)
class AllReduce:
    """One tensor of each rank -> "sum", "avg", "max" or "min" over the ranks, a new tensor."""

    what: str
    axis: str
    value: Tensor
    op: str
    name = "all_reduce"

    @property
    def sent(self) -> Sequence[Tensor]:
        return [self.value]

    def start(self, transport: Transport, attempt: Attempt) -> Pending:
        return transport.all_reduce(self.value, self.op, attempt)

    def measure(self, world: int) -> tuple[Tensor, int]:
        return self.value, self.value.numel()

    def join(self, row: Sequence[AllReduce]) -> list[Tensor]:
        if len(row) == 1:
            return [self.value.clone()]
        total = reduce([each.value for each in row], self.op)
        return [total.clone() for _ in row]


@dataclass(frozen=True, slots=True)
class AllToAll:
    """[N * S] of each rank, block r for rank r -> [N * S], block r from rank r.

    Where blocks differ in size, `splits` lists the elements that this rank gives to each rank, and those that it takes
    from each rank.
    """

    what: str
    axis: str
    blocks: Tensor
    splits: tuple[Sequence[int], Sequence[int]] | None = None
    name = "all_to_all"

    @property
    def sent(self) -> Sequence[Tensor]:
        return [self.blocks]

    def start(self, transport: Transport, attempt: Attempt) -> Pending:
        return transport.all_to_all(self.blocks, attempt, self.split(transport.world))

    def measure(self, world: int) -> tuple[Tensor, int]:
        return self.blocks, self.blocks.numel()

    def join(self, row: Sequence[AllToAll]) -> list[Tensor]:
        rows = [each.blocks.reshape(-1).split(list(each.split(len(row)).given)) for each in row]
        return [torch.cat([given[rank] for given in rows]) for rank in range(len(row))]

    def split(self, world: int) -> Splits:
        """The splits among so many ranks."""
        numel = self.blocks.numel()
        if self.splits is None and numel % world:
            problem = f"exchanges {numel} elements, which do not divide by {world} ranks"
            raise FzeroError(self.what, problem, "pad to blocks of equal size, one for each rank, or give their sizes")
        splits = Splits.equal(numel, world) if self.splits is None else Splits(*self.splits)
        if (len(splits.given), len(splits.taken), sum(splits.given)) != (world, world, numel):
            given, taken = list(splits.given), list(splits.taken)
            problem = f"exchanges {numel} elements over {world} ranks: gives {given}, takes {taken}"
            raise FzeroError(self.what, problem, "give a size for each rank, which add up to the elements")
        return splits


def gather_leaves(
    slices: Sequence[Tensor], along: Wire, rank: int, axis: str, dtype: torch.dtype | None = None
) -> Steps:
    """This rank's slices of the leaves of a wire, cast to a `dtype` that is given -> their buffer [N * S]."""
    what = f"{AllGather.name} of {along.layout.bucket}"
    block = None if dtype else buffers.view_of(slices, along, rank)
    if block is not None:
        return (yield AllGather(what, axis, block, slices=slices))
    full = slices[0].new_empty(along.numel, dtype=dtype)  # slices are packed, or cast, where they lie in the result
    mine = buffers.fill_block(full[rank * along.stride :][: along.stride], slices, along, rank)
    asked = [AllGather(what, axis, mine, into=full)]
    del slices, block, full, mine  # a generator keeps its local variables alive, this one until the wait
    return (yield asked.pop())


def average_leaves(fulls: Sequence[Tensor], along: Wire, replicas: bool = True, divided: bool = False) -> Steps:
    """The leaves of a wire in full -> this rank's block [S] of their mean over every axis of the mesh that they are not
    split over, or without `replicas` over the shard axis alone; and 1 / n of that where n ranks have parts of a leaf,
    because the objective is a mean over all ranks.

    `divided` leaves are 1 / n of themselves already. For a rank that averages alone the result is the list of its
    leaves, flat, views where possible.
    """
    bucket, mesh = along.layout.bucket, along.layout.mesh
    splits = 1 if divided else along.layout.splits
    if along.layout.is_averaged_alone(replicas):
        flat = [buffers.flatten(full) for full in fulls]
        return flat if splits == 1 else [x / splits for x in flat]
    asked = [ReduceScatter(f"{ReduceScatter.name} of {bucket}", along.layout.shard_axis, fulls, along)]
    del fulls  # a generator keeps its local variables alive, this one until the wait
    block = yield asked.pop()
    axes = [axis for axis in along.layout.replica_axes if mesh.size(axis) > 1] if replicas else ()
    if axes:
        over = mesh.join(axes)
        block = yield AllReduce(f"{AllReduce.name} of {bucket} over {over}", over, block, "avg")
    return block if splits == 1 else block.div_(splits)


def begin(exchange: Exchange, transport: Transport | Alone, attempt: Attempt) -> Pending:
    """Start an exchange on one rank of a live mesh. A rank alone gets what it gives."""
    if isinstance(transport, Alone):
        (result,) = exchange.join([exchange])
        return Pending(attempt, [], lambda: result)
    return exchange.start(transport, attempt)


def complete(steps: Steps, answer: Tensor | None, begin: Callable[[Exchange], Pending]) -> Any:
    """Run an operation to its end on one rank, from its last `answer` on: None before its first exchange. `begin`
    starts an exchange."""
    try:
        while True:
            exchange = next(steps) if answer is None else steps.send(answer)
            answer = begin(exchange).wait()
    except StopIteration as end:
        return end.value
