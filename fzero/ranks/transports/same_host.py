"""Same host: the transport of CPU ranks that can read each other's memory.

A rank posts the addresses of the tensors that it sends. Each other rank reads its own part straight into place, or into
a sum, and posts when it is done. Nothing is copied in between, and no message is sent.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fzero.base.errors import FzeroError
from fzero.layout import buffers
from fzero.layout.wires import Wire
from fzero.ranks.members import Attempt, Members
from fzero.ranks.transports.board import SLOTS, Board, describe
from fzero.ranks.transports.pending import Pending
from fzero.ranks.transports.point_to_point import LARGE, PointToPoint
from fzero.ranks.transports.reduction import PIECE, average_
from fzero.ranks.transports.worker import Worker

Fetch = Callable[[Mapping[int, list[int]]], None]
"""A function that reads from each peer, given the addresses of the tensors that the peer sends."""


class _Exchange(NamedTuple):
    """Tensors that this rank sends, posted on its board under `number`, while other ranks may read them."""

    number: int
    attempt: Attempt
    sent: Sequence[Tensor]
    words: Any


class SameHost(PointToPoint):
    """Gathers, means and small all-reduces have the bits of `PointToPoint`. Here an all-reduce is large where a tensor
    has more than `LARGE` bytes, however many ranks there are.

    If all ranks have cores to spare, a thread reads, in the order in which collectives were started. Otherwise `wait`
    reads.
    """

    def __init__(self, group: dist.ProcessGroup, members: Members, board: Board) -> None:
        super().__init__(group, members.timeout)
        self.board, self.large = board, LARGE
        members.at_failure.append(board.fail)
        self._reader = Worker("fzero reads other ranks' memory") if board.reads_on_thread else None
        self._number = 0
        self._open: dict[int, _Exchange] = {}  # tensors that others may still read, in order
        self._last: _Exchange | None = None  # an all-gather that this rank has done, and others may not have

    def all_gather(self, block: Tensor, attempt: Attempt, into: Tensor | None = None) -> Pending:
        block, made = buffers.flatten(block), list[Tensor]()

        def fetch(there: Mapping[int, list[int]]) -> None:
            if into is None:
                full = block.new_empty(self.world, block.numel())  # not earlier: until now the memory would lie idle
                full[self.rank].copy_(block)
            else:
                full = into.view(self.world, block.numel())
            for peer, (address,) in there.items():
                self.board.read(peer, address, full[peer].data_ptr(), block.nbytes)
            made.append(full.view(-1))

        gather = self._gather if into is None else self._finish  # `_gather` would keep `into` alive in `_last`
        task = partial(gather, self._post([block], attempt), fetch)
        return Pending(attempt, [self._start(task)], made.pop)

    def reduce_scatter(self, fulls: Sequence[Tensor], wire: Wire, attempt: Attempt) -> Pending:
        flats, made = [buffers.flatten(full) for full in fulls], list[Tensor]()

        def fetch(there: Mapping[int, list[int]]) -> None:
            out = buffers.new_block(wire, self.rank, flats[0])
            self._average(out, flats, wire, there)
            made.append(out)

        task = partial(self._finish, self._post(flats, attempt), fetch)
        return Pending(attempt, [self._start(task)], made.pop)

    def settle(self) -> None:
        last, self._last = self._last, None
        if last is not None:
            with last.attempt:
                self._settle(last)

    def _average(self, out: Tensor, flats: Sequence[Tensor], wire: Wire, there: Mapping[int, list[int]]) -> None:
        """Fill this rank's block `out` with the mean, piece by piece."""
        step, size = PIECE // out.element_size(), out.element_size()
        beside = out.new_empty(min(step, out.numel())) if self.world > 2 else out  # two ranks need no memory beside
        for i, (part, slot) in enumerate(zip(wire.parts(self.rank), buffers.slots_of(out, wire, self.rank))):
            for start in range(0, len(part), step):
                here, at = slot[start : start + step], part.start + start
                self._sum(here, flats[i][at:][: here.numel()], {p: x[i] + at * size for p, x in there.items()}, beside)

    def _sum(self, out: Tensor, mine: Tensor, there: Mapping[int, int], beside: Tensor) -> None:
        """Write the mean of one piece, in rank order, to `out`. `beside` is memory for a third rank's piece.

        The order within the first two ranks does not change bits, because a + b == b + a.
        """
        first = min(self.peers)

        def others() -> Iterator[Tensor]:
            for rank in range(self.world):
                if rank == self.rank:
                    yield mine
                elif rank != first:
                    self.board.read(rank, there[rank], beside.data_ptr(), out.nbytes)
                    yield beside[: out.numel()]

        self.board.read(first, there[first], out.data_ptr(), out.nbytes)
        average_(out, others(), self.world)

    def _post(self, sent: Sequence[Tensor], attempt: Attempt) -> _Exchange:
        """Post the addresses of these tensors on the board, so that other ranks read them."""
        self._number += 1
        oldest = min([*self._open], default=self._number)
        if self._number - oldest >= SLOTS:
            problem = f"{SLOTS} collectives were started since {self._open[oldest].attempt.what}, which goes on"
            raise FzeroError(attempt.what, problem, "wait for some of them before others start")
        exchange = self._open[self._number] = _Exchange(self._number, attempt, sent, describe(sent))
        self.board.post(self._number, exchange.words)
        return exchange

    def _start(self, task: Callable[[], None]) -> Callable[[], Any]:
        """Start a task on the reader thread and return a function that waits for it; without a thread, the task."""
        return task if self._reader is None else self._reader.start(task)

    def _gather(self, exchange: _Exchange, fetch: Fetch) -> None:
        """Fetch. The next wait sees to it that other ranks have fetched too, for they may be a little behind."""
        if self._reader is not None:
            return self._finish(exchange, fetch)
        self.settle()
        self._fetch(exchange, fetch)
        self._last = exchange

    def _finish(self, exchange: _Exchange, fetch: Fetch) -> None:
        """Fetch, and wait until all other ranks have fetched too."""
        if self._reader is None:
            self.settle()
        self._fetch(exchange, fetch)
        self._settle(exchange)

    def _fetch(self, exchange: _Exchange, fetch: Fetch) -> None:
        """Read what peers send, once they have posted the addresses, and post that this rank is done."""
        there = {peer: self.board.read_addresses(peer, exchange.number, exchange.words) for peer in self.peers}
        fetch(there)
        self.board.post_done(exchange.number)

    def _settle(self, exchange: _Exchange) -> None:
        """Wait until all other ranks have read what this rank sends."""
        for peer in self.peers:
            self.board.wait_until_done(peer, exchange.number)
        del self._open[exchange.number]


def are_cores_spare(world: int) -> bool:
    """Whether this host has more cores than `world` ranks have threads."""
    return len(os.sched_getaffinity(0)) > world * torch.get_num_threads()
