"""Transports: how a collective is performed on one process group, per backend.

`all_gather` and `reduce_scatter` start and return a `Pending`; its `wait()` gives the result, once. Every rank calls
the same ones in the same order. The average is taken in a fixed order of ranks, so it is the same run after run.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class Pending:
    """A started collective: `wait()` returns its result, when `works` are done, as `finish()` makes it."""

    __slots__ = ("finish", "works")

    def __init__(self, works: list[Any], finish: Callable[[], Tensor]) -> None:
        self.works, self.finish = works, finish

    def wait(self) -> Tensor:
        """The result. Call it once: it lets go of the buffers."""
        for work in self.works:
            work.wait()
        result, self.works, self.finish = self.finish(), [], _spent
        return result


def _spent() -> Tensor:
    raise RuntimeError("this collective was waited for already")


class Transport(Protocol):
    """The collectives of one process group. `rank` counts within it."""

    rank: int
    world: int

    def all_gather(self, block: Tensor) -> Pending:
        """[S] of each rank -> [N * S], in rank order."""

    def reduce_scatter(self, blocks: Tensor) -> Pending:
        """[N * S] -> [S]: this rank's block of the mean over ranks."""

    def all_reduce(self, x: Tensor, op: str) -> Tensor:
        """A new tensor: "sum", "avg", "max" or "min" over ranks."""


class Alone:
    """One rank: every collective is the identity."""

    rank, world = 0, 1

    def all_gather(self, block: Tensor) -> Pending:
        return Pending([], lambda: block)

    def reduce_scatter(self, blocks: Tensor) -> Pending:
        return Pending([], lambda: blocks)

    def all_reduce(self, x: Tensor, op: str) -> Tensor:
        return x.clone()


class PointToPoint:
    """gloo: every pair of ranks exchanges its blocks straight into place, and each rank sums in rank order."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.world = group, dist.get_rank(group), dist.get_world_size(group)
        self.peers = [(self.rank + step) % self.world for step in range(1, self.world)]

    def all_gather(self, block: Tensor) -> Pending:
        full = block.new_empty(self.world * block.numel())
        blocks = full.chunk(self.world) if block.numel() else [full] * self.world
        works = [self._receive(blocks[peer], peer) for peer in self.peers]
        works += [self._send(block, peer) for peer in self.peers]
        blocks[self.rank].copy_(block)
        return Pending(works, lambda: full)

    def reduce_scatter(self, blocks: Tensor) -> Pending:
        size = blocks.numel() // self.world
        mine = list(blocks.view(self.world, size).unbind())
        theirs = {peer: blocks.new_empty(size) for peer in self.peers}
        works = [self._receive(theirs[peer], peer) for peer in self.peers]
        works += [self._send(mine[peer], peer) for peer in self.peers]
        return Pending(works, lambda: self._mean({**theirs, self.rank: mine[self.rank]}, theirs))

    def all_reduce(self, x: Tensor, op: str) -> Tensor:
        if op in ("max", "min") and x.is_floating_point():
            return _extreme(x, op, self.group)
        result = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(result, dist.ReduceOp.SUM if op == "avg" else _OPS[op], group=self.group)
        return result.div_(self.world) if op == "avg" else result

    def _mean(self, values: dict[int, Tensor], owned: dict[int, Tensor]) -> Tensor:
        """The mean of `values` in rank order, in memory of one that is `owned`: `out` may be any of the first two."""
        out = owned[0] if 0 in owned else owned[1]
        torch.add(values[0], values[1], out=out)
        for rank in range(2, self.world):
            out.add_(values[rank])
        return out.mul_(1 / self.world) if self.world & (self.world - 1) == 0 else out.div_(self.world)

    def _send(self, block: Tensor, peer: int) -> Any:
        return dist.isend(block, group=self.group, group_dst=peer)

    def _receive(self, block: Tensor, peer: int) -> Any:
        return dist.irecv(block, group=self.group, group_src=peer)


class Native:
    """NCCL, and any backend whose own collectives are best: shards are aligned, the average is taken on the way."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.world = group, dist.get_rank(group), dist.get_world_size(group)

    def all_gather(self, block: Tensor) -> Pending:
        full = block.new_empty(self.world * block.numel())
        work = dist.all_gather_into_tensor(full, block, group=self.group, async_op=True)
        return Pending([work], lambda: full)

    def reduce_scatter(self, blocks: Tensor) -> Pending:
        out = blocks.new_empty(blocks.numel() // self.world)
        work = dist.reduce_scatter_tensor(out, blocks, op=dist.ReduceOp.AVG, group=self.group, async_op=True)
        return Pending([work], lambda: out)

    def all_reduce(self, x: Tensor, op: str) -> Tensor:
        if op in ("max", "min") and x.is_floating_point():
            return _extreme(x, op, self.group)
        result = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(result, _OPS[op], group=self.group)
        return result


def _extreme(x: Tensor, op: str, group: dist.ProcessGroup) -> Tensor:
    """The elementwise "max" or "min", nan where a rank has one: backends differ in that, so nans travel beside."""
    sign = 1 if op == "max" else -1
    pair = torch.stack([x.nan_to_num(-sign * math.inf, math.inf, -math.inf), sign * x.isnan().to(x.dtype)])
    dist.all_reduce(pair, _OPS[op], group=group)
    return torch.where(pair[1] != 0, math.nan, pair[0])


_OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}


def transport(group: dist.ProcessGroup, device: str) -> Transport:
    """The transport for a process group and the type of device that its tensors are on."""
    if dist.get_world_size(group) == 1:
        return Alone()
    backend = dist.get_backend(group)
    return PointToPoint(group) if device == "cpu" or backend == "gloo" else Native(group)
