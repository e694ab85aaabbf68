"""Same host: the transport of CPU ranks that can read each other's memory.

A rank tells the others where what it sends lies, each reads its own part of that straight into place, or into the sum,
and says when it has. Nothing is copied on the way, through a socket least of all.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fzero import buffers
from fzero.control import Begun
from fzero.layout import Wire
from fzero.transports.memory import read
from fzero.transports.pending import Pending
from fzero.transports.point_to_point import PointToPoint
from fzero.transports.reduction import divide_
from fzero.transports.worker import Worker

SMALL = 64 << 10
"""Bytes of a block up to which a message with it is faster than two about it."""
PIECE = 512 << 10
"""Bytes that are summed at a time: they stay in a core's cache."""
WHERE, DONE = 1, 2  # tags of messages: the addresses of what a rank sends, and that it has read what others do

Fetch = Callable[[Mapping[int, list[int]]], None]
"""Reads from each peer, given the addresses of what it sends."""


class _Exchange(NamedTuple):
    """What this rank sends, and the messages about it: under way until all `works` are done."""

    begun: Begun
    sent: Sequence[Tensor]
    theirs: Mapping[int, Tensor]  # peer -> its addresses, once they are there
    heard: Sequence[Any]
    works: list[Any]


class SameHost(PointToPoint):
    """As `PointToPoint`, with the same bits. `processes` are the ids of the ranks' processes.

    Where there are cores to spare a thread reads, in the order in which collectives were started; else `wait` does.
    """

    def __init__(self, group: dist.ProcessGroup, timeout: timedelta, processes: Sequence[int]) -> None:
        super().__init__(group, timeout)
        self.processes = processes
        self._reader = Worker("fzero reads other ranks' memory") if _are_cores_spare(self.world) else None
        self._last: _Exchange | None = None  # an all-gather that this rank is done with, and others may not be

    def all_gather(self, block: Tensor, begun: Begun) -> Pending:
        if block.nbytes <= SMALL:
            return super().all_gather(block, begun)
        block = buffers.flat(block)
        full = block.new_empty(self.world * block.numel())
        blocks = full.chunk(self.world)

        def fetch(there: Mapping[int, list[int]]) -> None:
            blocks[self.rank].copy_(block)
            for peer, (address,) in there.items():
                read(self.processes[peer], address, blocks[peer].data_ptr(), block.nbytes)

        exchange = self._exchanged([block], begun)
        return Pending(begun, [self._started(partial(self._gather, exchange, fetch))], lambda: full)

    def reduce_scatter(self, fulls: Sequence[Tensor], wire: Wire, begun: Begun) -> Pending:
        if wire.stride * fulls[0].element_size() <= SMALL:
            return super().reduce_scatter(fulls, wire, begun)
        flats = [buffers.flat(full) for full in fulls]
        out = buffers.room(wire, self.rank, flats[0])
        fetch = partial(self._average, out, flats, wire)
        exchange = self._exchanged(flats, begun)
        return Pending(begun, [self._started(partial(self._finish, exchange, fetch))], lambda: out)

    def settle(self) -> None:
        last, self._last = self._last, None
        if last is not None:
            with last.begun:
                self._wait(last.works)

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
        read(self.processes[first], there[first], out.data_ptr(), out.nbytes)
        for rank in range(self.world):
            if rank == self.rank:
                out.add_(mine)
            elif rank != first:
                theirs = beside[: out.numel()]
                read(self.processes[rank], there[rank], theirs.data_ptr(), out.nbytes)
                out.add_(theirs)
        divide_(out, self.world)

    def _exchanged(self, sent: Sequence[Tensor], begun: Begun) -> _Exchange:
        """Tell all peers where these tensors lie, and begin to listen where theirs do."""
        mine = torch.tensor([tensor.data_ptr() for tensor in sent])
        theirs = {peer: torch.empty_like(mine) for peer in self.peers}
        with begun:
            heard = [self.group.recv([where], peer, WHERE) for peer, where in theirs.items()]
            told = [self.group.send([mine], peer, WHERE) for peer in self.peers]
        return _Exchange(begun, [*sent, mine], theirs, heard, told)

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
        self._wait(exchange.works)

    def _fetch(self, exchange: _Exchange, fetch: Fetch) -> None:
        """Read what peers send once they have said where it is, and begin to say so."""
        self._wait(exchange.heard)
        fetch({peer: where.tolist() for peer, where in exchange.theirs.items()})
        word = torch.zeros(1)
        exchange.works.extend(self.group.recv([torch.empty(1)], peer, DONE) for peer in self.peers)
        exchange.works.extend(self.group.send([word], peer, DONE) for peer in self.peers)

    def _wait(self, works: Sequence[Any]) -> None:
        for work in works:
            work.wait(self.timeout)


def _are_cores_spare(world: int) -> bool:
    """Whether so many ranks on this host leave cores that none of their threads is on."""
    return len(os.sched_getaffinity(0)) > world * torch.get_num_threads()
