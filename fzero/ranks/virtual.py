"""Virtual: all ranks of a `VirtualMesh` at once, in one process, for values that stand outside a step.

A `Sharded` there holds every rank's slice, one behind the other: the flattened value itself. So moves between sharded
and whole are views, and what ranks would add up is there already.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from fzero.base.mesh import VirtualMesh
from fzero.layout.layout import Layout


class Virtual:
    """Every rank of a mesh. A `MovePerformer` of `moves`. Made by `virtual`."""

    rank = None  # none in particular
    device = None  # where the tensors are that it is given
    is_tracing = False

    def __init__(self, mesh: VirtualMesh) -> None:
        self.mesh = mesh

    def gather(self, x: Tensor, layout: Layout, leaf: int) -> Tensor:
        return x.view(layout.leaves[leaf].shape)

    def scatter(self, x: Tensor, layout: Layout, leaf: int) -> Tensor:
        return x.reshape(-1)

    def take(self, x: Tensor, layout: Layout, leaf: int) -> Tensor:
        return x.reshape(-1)

    def beside(self, x: Tensor) -> Tensor:
        return x.clone()

    def spread(self, x: Tensor, like: Tensor) -> Tensor:
        return x.expand(like.shape).clone()

    def all_reduce(self, x: Tensor, op: str, axis: str) -> Tensor:
        return x.clone()

    def axis_index(self, axis: str, device: torch.device) -> Tensor:
        return torch.zeros((), dtype=torch.int64, device=device)


@cache
def virtual(mesh: VirtualMesh) -> Virtual:
    """The one `Virtual` of a mesh shape."""
    return Virtual(mesh)
