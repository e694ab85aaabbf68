"""Virtual: all ranks of a `VirtualMesh` in one process, for values outside of a step.

A `Sharded` on virtual ranks holds the slices of all ranks, one after the other: the flattened value itself. So a move
between a sharded and a whole value only changes the shape, and a sum over ranks is there already.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from fzero.base.mesh import VirtualMesh
from fzero.files.memory import new_buffer
from fzero.layout.layout import Layout
from fzero.layout.owners import Places
from fzero.optim.newton_schulz import Blocks, NewtonSchulz, orthogonalize
from fzero.ranks.members import Members
from fzero.ranks.ranks import Ranks


class Virtual(Ranks):
    """All ranks of a mesh in one process. Made by `virtual`."""

    def __init__(self, mesh: VirtualMesh) -> None:
        super().__init__(mesh, range(mesh.size()), Members())

    def along(self, axis: str) -> int:
        return 0

    def broadcast(self, x: Tensor, rank: int, layout: Layout) -> None:
        pass

    def gather(self, x: Tensor, layout: Layout, leaf: int) -> Tensor:
        return x.clone().view(layout.leaves[leaf].shape)

    gather_agreed = gather

    def gather_pieces(self, pieces: Sequence[Tensor], what: str, where: str) -> Tensor:
        whole = new_buffer(sum(piece.numel() for piece in pieces), torch.uint8, pieces[0].device)
        torch._foreach_copy_(list(whole.split([piece.numel() for piece in pieces])), list(pieces))
        return whole

    def scatter(self, x: Tensor, layout: Layout, leaf: int) -> Tensor:
        return x.reshape(-1)

    def spread(self, x: Tensor, like: Tensor) -> Tensor:
        return x.expand(like.shape).clone()

    def all_reduce(self, x: Tensor, op: str, axis: str, leaf: str = "") -> Tensor:
        return x.clone()

    def orthogonalize(self, slices: list[Tensor], places: Places, blocks: Blocks, how: NewtonSchulz) -> list[Tensor]:
        fulls = [x.view(layout.leaves[leaf].shape) for x, (layout, leaf) in zip(slices, places)]
        return [full.view(x.shape) for full, x in zip(orthogonalize(fulls, blocks, how), slices)]


@cache
def virtual(mesh: VirtualMesh) -> Virtual:
    """The one `Virtual` of a mesh shape."""
    return Virtual(mesh)


ALONE = Virtual(VirtualMesh(fsdp=1))
"""A process without a mesh."""
