"""Native: the transport of NCCL, and of any backend whose own collectives are best."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from fzero.layout import buffers
from fzero.layout.layout import Wire
from fzero.ranks.members import Begun
from fzero.ranks.transports.pending import Pending
from fzero.ranks.transports.reduction import OPS, extreme, is_extreme


class Native:
    """torch's collectives on whole buffers: shards are aligned, the average is taken on the way, and what is packed to
    be gathered is so in the place that it has in the result.

    Scatters have a process group of their own, a twin of `group`, or they would wait for gathers that began before.
    """

    def __init__(self, group: dist.ProcessGroup, scatters: dist.ProcessGroup) -> None:
        self.group, self.rank, self.world = group, dist.get_rank(group), dist.get_world_size(group)
        self.scatters = scatters

    def all_gather(self, block: Tensor, begun: Begun, into: Tensor | None = None) -> Pending:
        full = block.new_empty(self.world * block.numel()) if into is None else into
        with begun:
            work = dist.all_gather_into_tensor(full, block, group=self.group, async_op=True)
        return Pending(begun, [work.wait], lambda: full)

    def reduce_scatter(self, fulls: Sequence[Tensor], wire: Wire, begun: Begun) -> Pending:
        blocks = buffers.blocks_of(fulls, wire)
        out = blocks.new_empty(wire.stride)
        with begun:
            work = dist.reduce_scatter_tensor(out, blocks, op=dist.ReduceOp.AVG, group=self.scatters, async_op=True)
        return Pending(begun, [work.wait], lambda: out)

    def all_to_all(self, blocks: Tensor, begun: Begun) -> Pending:
        out = torch.empty_like(blocks)
        with begun:
            work = dist.all_to_all_single(out, blocks, group=self.scatters, async_op=True)
        return Pending(begun, [work.wait], lambda: out)

    def all_reduce(self, x: Tensor, op: str, begun: Begun) -> Tensor:
        if is_extreme(x, op):
            return extreme(x, op, partial(self._reduce_, begun=begun))
        result = x.clone(memory_format=torch.contiguous_format)
        self._reduce_(result, op, begun)
        return result

    def settle(self) -> None:
        pass

    def _reduce_(self, x: Tensor, op: str, begun: Begun) -> None:
        with begun:
            dist.all_reduce(x, OPS[op], group=self.group)
