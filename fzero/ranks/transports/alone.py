"""Alone: the transport of a process group of one rank."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fzero.layout import buffers
from fzero.layout.layout import Wire
from fzero.ranks.members import Attempt
from fzero.ranks.transports.pending import Pending, Splits


class Alone:
    """One rank: every collective is the identity."""

    rank, world = 0, 1

    def all_gather(self, block: Tensor, attempt: Attempt, into: Tensor | None = None) -> Pending:
        return Pending(attempt, [], lambda: block)

    def reduce_scatter(self, fulls: Sequence[Tensor], wire: Wire, attempt: Attempt) -> Pending:
        block = buffers.blocks_of(fulls, wire)
        return Pending(attempt, [], lambda: block)

    def all_to_all(self, blocks: Tensor, attempt: Attempt, splits: Splits) -> Pending:
        return Pending(attempt, [], blocks.clone)

    def all_reduce(self, x: Tensor, op: str, attempt: Attempt) -> Tensor:
        return x.clone()

    def settle(self) -> None:
        pass
