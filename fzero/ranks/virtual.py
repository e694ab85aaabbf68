"""Virtual: all ranks of a `VirtualMesh` in one process, for values outside of a step.

A `Sharded` on virtual ranks holds the slices of all ranks, one after the other: the flattened value itself. So a move
between a sharded and a whole value only changes the shape, and a sum over ranks is there already.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from fzero.base.mesh import VirtualMesh
from fzero.layout.layout import Layout
from fzero.layout.owners import Places
from fzero.optim.newton_schulz import Blocks, NewtonSchulz, orthogonalize

T = TypeVar("T")


class Virtual:
    """All ranks of a mesh in one process. A `MovePerformer`. Made by `virtual`."""

    rank = None  # all of them
    device = None  # that of the given tensors
    is_tracing = False
    writes = 0

    def __init__(self, mesh: VirtualMesh) -> None:
        self.mesh = mesh

    def specify(self, what: str, details: Sequence[str]) -> Virtual:
        return self

    def count_agreements(self) -> int:
        return 0

    def varies(self, x: Tensor) -> bool:
        return False

    def may_write(self, x: Tensor) -> bool:
        return False

    def note_result(self, x: Tensor, full: Tensor, result: Any) -> None:
        pass

    def note_write(self) -> None:
        raise NotImplementedError  # nothing may write

    def note_reduce_dtype(self, path: str, dtype: torch.dtype) -> None:
        pass

    def gather(self, x: Tensor, layout: Layout, leaf: int) -> Tensor:
        return x.clone().view(layout.leaves[leaf].shape)

    def scatter(self, x: Tensor, layout: Layout, leaf: int) -> Tensor:
        return x.reshape(-1)

    def take(self, x: Tensor, layout: Layout, leaf: int) -> Tensor:
        return x.reshape(-1).clone()

    def beside(self, x: Tensor) -> Tensor:
        return x.clone()

    def spread(self, x: Tensor, like: Tensor) -> Tensor:
        return x.expand(like.shape).clone()

    def all_reduce(self, x: Tensor, op: str, axis: str, leaf: str = "") -> Tensor:
        return x.clone()

    def axis_index(self, axis: str, device: torch.device) -> Tensor:
        return torch.zeros((), dtype=torch.int64, device=device)

    def orthogonalize(self, slices: list[Tensor], places: Places, blocks: Blocks, how: NewtonSchulz) -> list[Tensor]:
        fulls = [x.view(layout.leaves[leaf].shape) for x, (layout, leaf) in zip(slices, places)]
        return [full.view(x.shape) for full, x in zip(orthogonalize(fulls, blocks, how), slices)]

    def do_together(self, do: Callable[[], T], call: str) -> T:
        return do()


@cache
def virtual(mesh: VirtualMesh) -> Virtual:
    """The one `Virtual` of a mesh shape."""
    return Virtual(mesh)
