"""Same host: the transport of CPU ranks that can read each other's memory.

A rank says where what it sends lies, each other reads its own part of that straight into place, or into the sum, and
says when it has. Nothing is copied on the way, and no message is sent.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fzero.base.errors import FzeroError
from fzero.layout import buffers
from fzero.layout.layout import Wire
from fzero.ranks.members import Begun, Members
from fzero.ranks.transports.board import SLOTS, Board
from fzero.ranks.transports.pending import Pending
from fzero.ranks.transports.point_to_point import PointToPoint
from fzero.ranks.transports.reduction import JOINS, divide_
from fzero.ranks.transports.worker import Worker

PIECE = 512 << 10
"""Bytes that are summed at a time: they stay in a core's cache."""
LARGE = 1 << 20
"""Bytes of a tensor from which on gloo's all-reduce moves less than each rank reading it from each other."""

Fetch = Callable[[Mapping[int, list[int]]], None]
"""Reads from each peer, given the addresses of what it sends."""


class _Exchange(NamedTuple):
    """What this rank sends, as `number` of its board, while others may read it."""

    number: int
    begun: Begun
    sent: Sequence[Tensor]
    addresses: Any


class SameHost(PointToPoint):
    """As `PointToPoint`, gathers and means with the same bits; other reductions in rank order too, up to `LARGE`.

    Where there are cores to spare a thread reads, in the order in which collectives were started; else `wait` does.
    """

    def __init__(self, group: dist.ProcessGroup, members: Members, board: Board) -> None:
        super().__init__(group, members.timeout)
        self.board = board
        members.at_failure.append(board.fail)
        self._reader = Worker("fzero reads other ranks' memory") if _are_cores_spare(self.world) else None
        self._number = 0
        self._open: dict[int, _Exchange] = {}  # what others may read still, in order
        self._last: _Exchange | None = None  # an all-gather that this rank is done with, and others may not be

    def all_gather(self, block: Tensor, begun: Begun, into: Tensor | None = None) -> Pending:
        block, made = buffers.flat(block), list[Tensor]()

        def fetch(there: Mapping[int, list[int]]) -> None:
            if into is None:
                full = block.new_empty(self.world, block.numel())  # not before: until then it would lie idle
                full[self.rank].copy_(block)
            else:
                full = into.view(self.world, block.numel())
            for peer, (address,) in there.items():
                self.board.read(peer, address, full[peer].data_ptr(), block.nbytes)
            made.append(full.view(-1))

        gather = self._gather if into is None else self._finish  # or the exchange would keep the result alive
        task = partial(gather, self._posted([block], begun), fetch)
        return Pending(begun, [self._started(task)], made.pop)

    def reduce_scatter(self, fulls: Sequence[Tensor], wire: Wire, begun: Begun) -> Pending:
        flats, made = [buffers.flat(full) for full in fulls], list[Tensor]()

        def fetch(there: Mapping[int, list[int]]) -> None:
            out = buffers.room(wire, self.rank, flats[0])
            self._average(out, flats, wire, there)
            made.append(out)

        task = partial(self._finish, self._posted(flats, begun), fetch)
        return Pending(begun, [self._started(task)], made.pop)

    def all_reduce(self, x: Tensor, op: str, begun: Begun) -> Tensor:
        if x.nbytes > LARGE:
            return super().all_reduce(x, op, begun)
        flat = buffers.flat(x)
        values = [flat if rank == self.rank else torch.empty_like(flat) for rank in range(self.world)]

        def fetch(there: Mapping[int, list[int]]) -> None:
            for peer, (address,) in there.items():
                self.board.read(peer, address, values[peer].data_ptr(), flat.nbytes)

        task = partial(self._finish, self._posted([flat], begun), fetch)
        Pending(begun, [self._started(task)], lambda: flat).wait()
        total = reduce(JOINS[op], values)
        return (divide_(total, self.world) if op == "avg" else total).view(x.shape)

    def settle(self) -> None:
        last, self._last = self._last, None
        if last is not None:
            with last.begun:
                self._settle(last)

    def _average(self, out: Tensor, flats: Sequence[Tensor], wire: Wire, there: Mapping[int, list[int]]) -> None:
        """Fill this rank's block with the mean, piece by piece."""
        step, size = PIECE // out.element_size(), out.element_size()
        beside = out.new_empty(min(step, out.numel())) if self.world > 2 else out
        for i, (part, slot) in enumerate(zip(wire.parts(self.rank), buffers.slots(out, wire, self.rank))):
            for start in range(0, len(part), step):
                here, at = slot[start : start + step], part.start + start
                self._sum(here, flats[i][at:][: here.numel()], {p: x[i] + at * size for p, x in there.items()}, beside)

    def _sum(self, out: Tensor, mine: Tensor, there: Mapping[int, int], beside: Tensor) -> None:
        """The mean of one piece in rank order, in `out`: the sum of the first two ranks is the same either way."""
        first = min(self.peers)
        self.board.read(first, there[first], out.data_ptr(), out.nbytes)
        for rank in range(self.world):
            if rank == self.rank:
                out.add_(mine)
            elif rank != first:
                theirs = beside[: out.numel()]
                self.board.read(rank, there[rank], theirs.data_ptr(), out.nbytes)
                out.add_(theirs)
        divide_(out, self.world)

    def _posted(self, sent: Sequence[Tensor], begun: Begun) -> _Exchange:
        """Say where these tensors lie."""
        self._number += 1
        oldest = min([*self._open], default=self._number)
        if self._number - oldest >= SLOTS:
            problem = f"{SLOTS} collectives were started since {self._open[oldest].begun.what}, which goes on"
            raise FzeroError(begun.what, problem, "wait for some of them before others start")
        addresses = (ctypes.c_int64 * len(sent))(*[tensor.data_ptr() for tensor in sent])
        exchange = self._open[self._number] = _Exchange(self._number, begun, sent, addresses)
        self.board.post(self._number, addresses)
        return exchange

    def _started(self, task: Callable[[], None]) -> Callable[[], Any]:
        return task if self._reader is None else self._reader.start(task)

    def _gather(self, exchange: _Exchange, fetch: Fetch) -> None:
        """Fetch, and leave it to the next wait to see that others have too: they may be a little behind."""
        if self._reader is not None:
            return self._finish(exchange, fetch)
        self.settle()
        self._fetch(exchange, fetch)
        self._last = exchange

    def _finish(self, exchange: _Exchange, fetch: Fetch) -> None:
        """Fetch, and wait until others have too."""
        if self._reader is None:
            self.settle()
        self._fetch(exchange, fetch)
        self._settle(exchange)

    def _fetch(self, exchange: _Exchange, fetch: Fetch) -> None:
        """Read what peers send, once they have said where it is, and say so."""
        count = len(exchange.sent)
        fetch({peer: self.board.addresses(peer, exchange.number, count) for peer in self.peers})
        self.board.done(exchange.number)

    def _settle(self, exchange: _Exchange) -> None:
        for peer in self.peers:
            self.board.until_done(peer, exchange.number)
        del self._open[exchange.number]


def _are_cores_spare(world: int) -> bool:
    """Whether so many ranks on this host leave cores that none of their threads is on."""
    return len(os.sched_getaffinity(0)) > world * torch.get_num_threads()
