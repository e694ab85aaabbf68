"""Native: the transport of NCCL, and of every backend whose own collectives are the fastest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor

from fzero.base.dtypes import accumulator
from fzero.layout import buffers
from fzero.layout.wires import Wire
from fzero.ranks.members import Attempt
from fzero.ranks.transports.pending import Pending, Splits
from fzero.ranks.transports.reduction import OPS, pack_operand, unpack_result


class Native:
    """torch's collectives on whole buffers.

    * Shards are aligned, as NCCL wants them, and the backend takes the average itself.
    * A block that has to be packed for a gather is packed in its place of the result.
    * NCCL rounds a sum at each rank that it passes: bfloat16 ones of 512 ranks would average to 0.5. So float16 and
      bfloat16 are reduced as float32, in twice the bytes, and rounded once.
    * A partial wire is scattered without its padding: NCCL reduces each rank's parts to that rank, all in one group.
    * Scatters and all-reduces have a process group of their own, a twin of `group`; otherwise they would wait for
      gathers that have begun before.
    """

    def __init__(self, group: dist.ProcessGroup, scatters: dist.ProcessGroup) -> None:
        self.group, self.rank, self.world = group, dist.get_rank(group), dist.get_world_size(group)
        self.scatters = scatters

    def all_gather(self, block: Tensor, attempt: Attempt, into: Tensor | None = None) -> Pending:
        full = block.new_empty(self.world * block.numel()) if into is None else into
        with attempt:
            work = dist.all_gather_into_tensor(full, block, group=self.group, async_op=True)
        return Pending(attempt, [work.wait], lambda: full)

    def reduce_scatter(self, fulls: Sequence[Tensor], wire: Wire, attempt: Attempt) -> Pending:
        start: Callable[..., Any]
        dtype = fulls[0].dtype
        if wire.is_complete:
            blocks = buffers.blocks_of(fulls, wire).to(accumulator(dtype))
            out = blocks.new_empty(wire.stride)
            start = partial(dist.reduce_scatter_tensor, out, blocks)
        else:
            parts = [part.to(accumulator(dtype)) for part in buffers.flat_parts(fulls, wire)]
            out = buffers.new_block(wire, self.rank, parts[0])
            start = partial(dist.reduce_scatter, out[: parts[self.rank].numel()], parts)
        with attempt:
            work = start(op=dist.ReduceOp.AVG, group=self.scatters, async_op=True)
        return Pending(attempt, [work.wait], lambda: out.to(dtype))

    def all_to_all(self, blocks: Tensor, attempt: Attempt, splits: Splits) -> Pending:
        blocks = buffers.flatten(blocks)
        out = blocks.new_empty(sum(splits.taken))
        taken, given = list(splits.taken), list(splits.given)
        with attempt:
            work = dist.all_to_all_single(out, blocks, taken, given, group=self.scatters, async_op=True)
        return Pending(attempt, [work.wait], lambda: out)

    def all_reduce(self, x: Tensor, op: str, attempt: Attempt) -> Pending:
        total, dtype = pack_operand(x, op), x.dtype
        with attempt:
            work: Any = dist.all_reduce(total, OPS[op], group=self.scatters, async_op=True)
        return Pending(attempt, [work.wait], lambda: unpack_result(total, op, dtype))

    def settle(self) -> None:
        pass
