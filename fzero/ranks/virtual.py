"""Virtual: all ranks of a `VirtualMesh` in one process, for values outside of a step.

A `Sharded` on virtual ranks holds the slices of all ranks, one after the other: the flattened value itself. So a move
between a sharded and a whole value only changes the shape, and a sum over ranks is there already.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fzero.base.errors import FzeroError
from fzero.base.mesh import VirtualMesh
from fzero.files import load
from fzero.files.memory import new_buffer
from fzero.layout.layout import Layout
from fzero.ranks.calls import EagerCall
from fzero.ranks.exchanges import Exchange, begin
from fzero.ranks.members import Members
from fzero.ranks.ranks import Ranks
from fzero.ranks.transports import Alone, Pending


class Virtual(Ranks):
    """All ranks of a mesh in one process. Made by `virtual`."""

    def __init__(self, mesh: VirtualMesh) -> None:
        super().__init__(mesh, range(mesh.size()), Members())

    def along(self, axis: str) -> int:
        return 0

    def broadcast(self, x: Tensor, rank: int, layout: Layout) -> None:
        pass

    def run(self, call: EagerCall) -> Any:
        """The result of a call on the values of all ranks together.

        Raises:
            FzeroError: for an operation that communicates, and whose record does not say what it does to such values.
        """
        for layout in call.layouts:
            if layout.splits > 1:
                problem = f"is split over {layout.split_axis!r}, and one process has all parts"
                way_out = "use it in a step, or whole, by fzero.unpartition"
                raise FzeroError(layout.leaves[0].path, f"{call.operation.name}: it {problem}", way_out)
        of_all = call.operation.of_all
        if of_all is None:
            return super().run(call)
        return of_all(*call.map_tensors(load), **call.kwargs)

    def begin(self, exchange: Exchange) -> Pending:
        if self.mesh.size() > 1:
            problem = f"communicates outside of a step, where one process has all ranks of {self.mesh}"
            raise FzeroError(exchange.what, problem, "give of_all=, what it does to the values of all ranks")
        return begin(exchange, Alone(), self.members.begin(exchange.what))

    def gather_pieces(self, pieces: Sequence[Tensor], what: str, where: str) -> Tensor:
        whole = new_buffer(sum(piece.numel() for piece in pieces), torch.uint8, pieces[0].device)
        torch._foreach_copy_(list(whole.split([piece.numel() for piece in pieces])), list(pieces))
        return whole


@cache
def virtual(mesh: VirtualMesh) -> Virtual:
    """The one `Virtual` of a mesh shape."""
    return Virtual(mesh) if mesh.state is None else virtual(VirtualMesh(**mesh.sizes)).lay_state(mesh.state)


class _Everywhere(VirtualMesh):
    """The mesh of one rank, which is alone along every axis that it is asked for."""

    def size(self, axis: str | None = None) -> int:
        return 1


ALONE = Virtual(_Everywhere(fsdp=1))
"""A process without a mesh, or outside of a step: collectives over any axis see one rank."""
