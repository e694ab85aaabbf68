"""Point to point: the transport of gloo, whose own collectives copy and sum more than they need to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fzero.layout import buffers
from fzero.layout.layout import Wire
from fzero.ranks.members import Begun
from fzero.ranks.transports.pending import Pending
from fzero.ranks.transports.reduction import OPS, divide_, extreme, is_extreme

Messages = Mapping[int, Sequence[Tensor]]
"""What goes to each peer, or comes from it: tensors in order, each contiguous."""


class PointToPoint:
    """Every pair of ranks exchanges its parts straight into place, and each rank sums in rank order."""

    def __init__(self, group: dist.ProcessGroup, timeout: timedelta) -> None:
        self.group, self.rank, self.world = group, dist.get_rank(group), dist.get_world_size(group)
        self.timeout = timeout
        self.peers = [(self.rank + step) % self.world for step in range(1, self.world)]

    def all_gather(self, block: Tensor, begun: Begun, into: Tensor | None = None) -> Pending:
        full = block.new_empty(self.world * block.numel()) if into is None else into
        blocks = full.chunk(self.world) if block.numel() else [full] * self.world
        received = {peer: [blocks[peer]] for peer in self.peers}
        waits = self._exchange({peer: [block] for peer in self.peers}, received, begun)
        if into is None:
            blocks[self.rank].copy_(block)
        return Pending(begun, waits, lambda: full)

    def reduce_scatter(self, fulls: Sequence[Tensor], wire: Wire, begun: Begun) -> Pending:
        flats = [buffers.flat(full) for full in fulls]
        mine = buffers.parts_of(flats, wire, self.rank)
        theirs = {peer: buffers.room(wire, self.rank, flats[0]) for peer in self.peers}
        sent = {peer: buffers.parts_of(flats, wire, peer) for peer in self.peers}
        received = {peer: buffers.slots(block, wire, self.rank) for peer, block in theirs.items()}
        waits = self._exchange(sent, received, begun)
        return Pending(begun, waits, lambda: self._mean(theirs, received, mine))

    def all_to_all(self, blocks: Tensor, begun: Begun) -> Pending:
        blocks = buffers.flat(blocks)
        out = torch.empty_like(blocks)
        given, taken = blocks.chunk(self.world), out.chunk(self.world)
        waits = self._exchange({p: [given[p]] for p in self.peers}, {p: [taken[p]] for p in self.peers}, begun)
        taken[self.rank].copy_(given[self.rank])
        return Pending(begun, waits, lambda: out)

    def all_reduce(self, x: Tensor, op: str, begun: Begun) -> Tensor:
        if is_extreme(x, op):
            return extreme(x, op, partial(self._reduce_, begun=begun))
        result = x.clone(memory_format=torch.contiguous_format)
        self._reduce_(result, "sum" if op == "avg" else op, begun)
        return result.div_(self.world) if op == "avg" else result

    def settle(self) -> None:
        pass

    def _mean(self, theirs: Mapping[int, Tensor], received: Messages, mine: Sequence[Tensor]) -> Tensor:
        """The mean in rank order, in memory of a peer's: the sum of the first two ranks is the same either way."""
        first = min(self.peers)
        for rank in range(self.world):
            if rank != first:
                torch._foreach_add_(list(received[first]), list(mine if rank == self.rank else received[rank]))
        return divide_(theirs[first], self.world)

    def _exchange(self, sent: Messages, received: Messages, begun: Begun) -> list[Callable[[], Any]]:
        """Start to send each peer its tensors and to receive others from it: what to call to wait for that. Empty ones
        do not travel."""
        with begun:
            works: list[Any] = [
                dist.irecv(tensor, group=self.group, group_src=peer)
                for peer in self.peers
                for tensor in received[peer]
                if tensor.numel()
            ]
            works += [
                dist.isend(tensor, group=self.group, group_dst=peer)
                for peer in self.peers
                for tensor in sent[peer]
                if tensor.numel()
            ]
        return [partial(work.wait, self.timeout) for work in works]

    def _reduce_(self, x: Tensor, op: str, begun: Begun) -> None:
        with begun:
            reduced: Any = dist.all_reduce(x, OPS[op], group=self.group, async_op=True)
            reduced.wait(self.timeout)
