"""Transports: how a collective is performed on one process group, per backend.

`all_gather` and `reduce_scatter` start and return a `Pending`; its `wait()` gives the result, once. Every rank calls
the same ones in the same order. The average is taken in a fixed order of ranks, so it is the same run after run. What
torch does for a collective is done inside of its `Begun`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from fzero.control import Begun


class Pending:
    """A started collective: `wait()` returns its result, when `waits` have returned, as `finish()` makes it.

    Raises:
        FzeroError: when a rank does not take part, naming it.
    """

    __slots__ = ("begun", "finish", "waits")

    def __init__(self, begun: Begun, waits: list[Callable[[], Any]], finish: Callable[[], Tensor]) -> None:
        self.begun, self.waits, self.finish = begun, waits, finish

    def wait(self) -> Tensor:
        """The result. Call it once: it lets go of the buffers."""
        with self.begun:
            for wait in self.waits:
                wait()
        result, self.waits, self.finish = self.finish(), [], _spent
        return result


def _spent() -> Tensor:
    raise RuntimeError("this collective was waited for already")


class Transport(Protocol):
    """The collectives of one process group. `rank` counts within it."""

    rank: int
    world: int

    def all_gather(self, block: Tensor, begun: Begun) -> Pending:
        """[S] of each rank -> [N * S], in rank order."""

    def reduce_scatter(self, blocks: Tensor, begun: Begun) -> Pending:
        """[N * S] -> [S]: this rank's block of the mean over ranks."""

    def all_reduce(self, x: Tensor, op: str, begun: Begun) -> Tensor:
        """A new tensor: "sum", "avg", "max" or "min" over ranks."""


class Alone:
    """One rank: every collective is the identity."""

    rank, world = 0, 1

    def all_gather(self, block: Tensor, begun: Begun) -> Pending:
        return Pending(begun, [], lambda: block)

    def reduce_scatter(self, blocks: Tensor, begun: Begun) -> Pending:
        return Pending(begun, [], lambda: blocks)

    def all_reduce(self, x: Tensor, op: str, begun: Begun) -> Tensor:
        return x.clone()


class PointToPoint:
    """gloo: every pair of ranks exchanges its blocks straight into place, and each rank sums in rank order."""

    def __init__(self, group: dist.ProcessGroup, timeout: timedelta) -> None:
        self.group, self.rank, self.world = group, dist.get_rank(group), dist.get_world_size(group)
        self.timeout = timeout
        self.peers = [(self.rank + step) % self.world for step in range(1, self.world)]

    def all_gather(self, block: Tensor, begun: Begun) -> Pending:
        full = block.new_empty(self.world * block.numel())
        blocks = full.chunk(self.world) if block.numel() else [full] * self.world
        waits = self._exchange(dict.fromkeys(self.peers, block), dict(enumerate(blocks)), begun)
        blocks[self.rank].copy_(block)
        return Pending(begun, waits, lambda: full)

    def reduce_scatter(self, blocks: Tensor, begun: Begun) -> Pending:
        size = blocks.numel() // self.world
        mine = dict(enumerate(blocks.view(self.world, size).unbind()))
        theirs = {peer: blocks.new_empty(size) for peer in self.peers}
        waits = self._exchange(mine, theirs, begun)
        return Pending(begun, waits, lambda: self._mean({**theirs, self.rank: mine[self.rank]}, theirs))

    def all_reduce(self, x: Tensor, op: str, begun: Begun) -> Tensor:
        if op in ("max", "min") and x.is_floating_point():
            return _extreme(x, op, partial(self._reduce_, begun=begun))
        result = x.clone(memory_format=torch.contiguous_format)
        self._reduce_(result, "sum" if op == "avg" else op, begun)
        return result.div_(self.world) if op == "avg" else result

    def _mean(self, values: dict[int, Tensor], owned: dict[int, Tensor]) -> Tensor:
        """The mean of `values` in rank order, in memory of one that is `owned`: `out` may be any of the first two."""
        out = owned[0] if 0 in owned else owned[1]
        torch.add(values[0], values[1], out=out)
        for rank in range(2, self.world):
            out.add_(values[rank])
        return out.mul_(1 / self.world) if self.world & (self.world - 1) == 0 else out.div_(self.world)

    def _exchange(
        self, sent: Mapping[int, Tensor], received: Mapping[int, Tensor], begun: Begun
    ) -> list[Callable[[], Any]]:
        """Start to send each peer its tensor and to receive another from it: what to call to wait for that."""
        with begun:
            works: list[Any] = [dist.irecv(received[peer], group=self.group, group_src=peer) for peer in self.peers]
            works += [dist.isend(sent[peer], group=self.group, group_dst=peer) for peer in self.peers]
        return [partial(work.wait, self.timeout) for work in works]

    def _reduce_(self, x: Tensor, op: str, begun: Begun) -> None:
        with begun:
            reduced: Any = dist.all_reduce(x, _OPS[op], group=self.group, async_op=True)
            reduced.wait(self.timeout)


class Native:
    """NCCL, and any backend whose own collectives are best: shards are aligned, the average is taken on the way."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.world = group, dist.get_rank(group), dist.get_world_size(group)

    def all_gather(self, block: Tensor, begun: Begun) -> Pending:
        full = block.new_empty(self.world * block.numel())
        with begun:
            work = dist.all_gather_into_tensor(full, block, group=self.group, async_op=True)
        return Pending(begun, [work.wait], lambda: full)

    def reduce_scatter(self, blocks: Tensor, begun: Begun) -> Pending:
        out = blocks.new_empty(blocks.numel() // self.world)
        with begun:
            work = dist.reduce_scatter_tensor(out, blocks, op=dist.ReduceOp.AVG, group=self.group, async_op=True)
        return Pending(begun, [work.wait], lambda: out)

    def all_reduce(self, x: Tensor, op: str, begun: Begun) -> Tensor:
        if op in ("max", "min") and x.is_floating_point():
            return _extreme(x, op, partial(self._reduce_, begun=begun))
        result = x.clone(memory_format=torch.contiguous_format)
        self._reduce_(result, op, begun)
        return result

    def _reduce_(self, x: Tensor, op: str, begun: Begun) -> None:
        with begun:
            dist.all_reduce(x, _OPS[op], group=self.group)


def _extreme(x: Tensor, op: str, reduce_: Callable[[Tensor, str], None]) -> Tensor:
    """The elementwise "max" or "min", nan where a rank has one: backends differ in that, so nans travel beside."""
    sign = 1 if op == "max" else -1
    pair = torch.stack([x.nan_to_num(-sign * math.inf, math.inf, -math.inf), sign * x.isnan().to(x.dtype)])
    reduce_(pair, op)
    return torch.where(pair[1] != 0, math.nan, pair[0])


_OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}


def transport(group: dist.ProcessGroup, device: str, timeout: timedelta) -> Transport:
    """The transport for a process group and the type of device that its tensors are on. With gloo it waits as long as
    `timeout` for a rank, with others as long as they do."""
    if dist.get_world_size(group) == 1:
        return Alone()
    backend = dist.get_backend(group)
    return PointToPoint(group, timeout) if device == "cpu" or backend == "gloo" else Native(group)
