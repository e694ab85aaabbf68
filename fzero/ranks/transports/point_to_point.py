"""Point to point: the transport of gloo, by messages. gloo's own collectives copy and sum more than needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor

from fzero.layout import buffers
from fzero.layout.wires import Wire
from fzero.ranks.members import TAG, Attempt
from fzero.ranks.transports.pending import Pending, Splits
from fzero.ranks.transports.reduction import OPS, PIECE, average_, pack_operand, reduce, unpack_result

Messages = Mapping[int, Sequence[Tensor]]
"""For each peer, the tensors to send or to receive, in order, each contiguous."""
LARGE = 1 << 20
"""All-reduces of more bytes, all ranks together, go through gloo, which then moves less than a gather of all values."""


class PointToPoint:
    """Each rank sends each other rank its parts, which arrive in place. Each rank sums in rank order.

    Large all-reduces are gloo's, in an order of its own. It would round float16 and bfloat16 at each rank: they travel
    as float32.
    """

    def __init__(self, group: dist.ProcessGroup, timeout: timedelta) -> None:
        self.group, self.rank, self.world = group, dist.get_rank(group), dist.get_world_size(group)
        self.timeout, self.large = timeout, LARGE // self.world
        self.peers = [(self.rank + step) % self.world for step in range(1, self.world)]

    def all_gather(self, block: Tensor, attempt: Attempt, into: Tensor | None = None) -> Pending:
        full = block.new_empty(self.world * block.numel()) if into is None else into
        blocks = full.chunk(self.world) if block.numel() else [full] * self.world
        received = {peer: [blocks[peer]] for peer in self.peers}
        waits = self._exchange({peer: [block] for peer in self.peers}, received, attempt)
        if into is None:
            blocks[self.rank].copy_(block)
        return Pending(attempt, waits, lambda: full)

    def reduce_scatter(self, fulls: Sequence[Tensor], wire: Wire, attempt: Attempt) -> Pending:
        flats = [buffers.flatten(full) for full in fulls]
        mine = buffers.parts_of(flats, wire, self.rank)
        theirs = {peer: buffers.new_block(wire, self.rank, flats[0]) for peer in self.peers}
        sent = {peer: buffers.parts_of(flats, wire, peer) for peer in self.peers}
        received = {peer: buffers.slots_of(block, wire, self.rank) for peer, block in theirs.items()}
        waits = self._exchange(sent, received, attempt)
        return Pending(attempt, waits, lambda: self._mean(theirs, received, mine))

    def all_to_all(self, blocks: Tensor, attempt: Attempt, splits: Splits) -> Pending:
        blocks = buffers.flatten(blocks)
        out = blocks.new_empty(sum(splits.taken))
        given, taken = blocks.split(list(splits.given)), out.split(list(splits.taken))
        waits = self._exchange({p: [given[p]] for p in self.peers}, {p: [taken[p]] for p in self.peers}, attempt)
        taken[self.rank].copy_(given[self.rank])
        return Pending(attempt, waits, lambda: out)

    def all_reduce(self, x: Tensor, op: str, attempt: Attempt) -> Pending:
        shape, dtype = x.shape, x.dtype
        if x.nbytes <= self.large:
            gather = self.all_gather(buffers.flatten(x), attempt)

            def add_up() -> Tensor:
                full = gather.wait()
                self.settle()  # the caller may change `x` now
                return reduce(full.view(self.world, shape.numel()).unbind(), op).view(shape)

            return Pending(attempt, [], add_up)
        total = pack_operand(x, op)
        with attempt:
            work: Any = dist.all_reduce(total, OPS["sum" if op == "avg" else op], group=self.group, async_op=True)
        waits: list[Callable[[], Any]] = [partial(work.wait, self.timeout)]
        if op == "avg":
            waits.append(partial(total.div_, self.world))
        return Pending(attempt, waits, partial(unpack_result, total, op, dtype))

    def settle(self) -> None:
        pass

    def _mean(self, theirs: Mapping[int, Tensor], received: Messages, mine: Sequence[Tensor]) -> Tensor:
        """The mean in rank order, taken piece by piece in the buffer of the first peer: no further memory is needed.

        The order within the first two ranks does not change bits, because a + b == b + a.
        """
        first = min(self.peers)
        others = [mine if rank == self.rank else received[rank] for rank in range(self.world) if rank != first]
        step = PIECE // theirs[first].element_size()
        for parts in zip(received[first], *others):
            for piece, *rest in zip(*(part.split(step) for part in parts)):
                average_(piece, rest, self.world)
        return theirs[first]

    def _exchange(self, sent: Messages, received: Messages, attempt: Attempt) -> list[Callable[[], Any]]:
        """Start to send each peer its tensors and to receive the peer's. The returned functions wait for that.

        Empty tensors do not travel.
        """
        with attempt:
            works: list[Any] = [
                dist.irecv(tensor, group=self.group, tag=TAG, group_src=peer)
                for peer in self.peers
                for tensor in received[peer]
                if tensor.numel()
            ]
            works += [
                dist.isend(tensor, group=self.group, tag=TAG, group_dst=peer)
                for peer in self.peers
                for tensor in sent[peer]
                if tensor.numel()
            ]
        return [partial(work.wait, self.timeout) for work in works]
