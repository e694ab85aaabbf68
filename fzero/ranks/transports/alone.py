"""Alone: the transport of one rank."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fzero.layout import buffers
from fzero.layout.layout import Wire
from fzero.ranks.members import Begun
from fzero.ranks.transports.pending import Pending


class Alone:
    """One rank: every collective is the identity."""

    rank, world = 0, 1

    def all_gather(self, block: Tensor, begun: Begun, into: Tensor | None = None) -> Pending:
        return Pending(begun, [], lambda: block)

    def reduce_scatter(self, fulls: Sequence[Tensor], wire: Wire, begun: Begun) -> Pending:
        block = buffers.blocks_of(fulls, wire)
        return Pending(begun, [], lambda: block)

    def all_to_all(self, blocks: Tensor, begun: Begun) -> Pending:
        return Pending(begun, [], blocks.clone)

    def all_reduce(self, x: Tensor, op: str, begun: Begun) -> Tensor:
        return x.clone()

    def settle(self) -> None:
        pass
