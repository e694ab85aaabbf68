"""Performer: who performs the moves of a value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from fzero.base.mesh import VirtualMesh
from fzero.layout.layout import Layout
from fzero.layout.owners import Places
from fzero.optim.newton_schulz import Blocks, NewtonSchulz

T = TypeVar("T")


class MovePerformer(Protocol):
    """Performs moves on one mesh. Every `Sharded` has one, its attribute `on`. Three classes implement the protocol, of
    which the last two are `Ranks` (`fzero/ranks/ranks.py`):

    * `Tracer` (`fzero/tracing/trace.py`) writes each move into the graph of a program, and performs nothing.
    * `Live` (`fzero/ranks/live.py`) is one rank of a `DeviceMesh`, and communicates at once.
    * `Virtual` (`fzero/ranks/virtual.py`) is all ranks of a `VirtualMesh` in one process, so every slice is present.
    """

    mesh: VirtualMesh
    is_tracing: bool  # whether moves are written into a program instead of performed
    writes: int  # how many functions have written into slices

    @property
    def rank(self) -> int | None:
        """This rank's position along the mesh's shard axis; None for all ranks together."""

    def specify(self, what: str, details: Sequence[str]) -> MovePerformer:
        """What performs moves for `what`, such as "sum of layers.0.w". Live ranks compare that and the lines `details`
        before each of its moves. In a trace, and on virtual ranks, this performer itself."""

    def count_agreements(self) -> int:
        """How many agreements the ranks have come to: the same number on all of them. 0 in a trace, and on virtual
        ranks."""

    def varies(self, x: Tensor) -> bool:
        """Whether the plain tensor `x` may differ between ranks. Only a trace knows: elsewhere, no."""

    def may_write(self, x: Tensor) -> bool:
        """Whether a function may write into the slice `x`: inside of a step, where no argument has that memory, and
        where the step has no view of the gathered value, which would not see the write."""

    def note_result(self, x: Tensor, full: Tensor, result: Any) -> None:
        """Note what a function returned for `full`, which was gathered from the slice `x`: maybe a view."""

    def note_write(self) -> None:
        """Count a write into a slice: what was gathered before is out of date."""

    def note_reduce_dtype(self, path: str, dtype: torch.dtype) -> None:
        """Note that a step averages the gradients of the leaf at `path` in a dtype. Outside of a trace, nothing."""

    def gather(self, x: Tensor, layout: Layout, leaf: int) -> Tensor:
        """The full leaf, in its shape, from the 1-d slices `x` of all ranks. New memory, outside of a trace."""

    def scatter(self, x: Tensor, layout: Layout, leaf: int) -> Tensor:
        """This rank's slice, 1-d, of the mean of `x` over all ranks."""

    def take(self, x: Tensor, layout: Layout, leaf: int) -> Tensor:
        """This rank's slice, 1-d, of `x`. No communication. New memory, outside of a trace."""

    def beside(self, x: Tensor) -> Tensor:
        """`x` itself: a 0-d value about to be an operand beside a slice."""

    def spread(self, x: Tensor, like: Tensor) -> Tensor:
        """`x`, 0-d, repeated over the shape of the slice `like`."""

    def all_reduce(self, x: Tensor, op: str, axis: str, leaf: str = "") -> Tensor:
        """The reduction `op` ("sum", "avg", "max" or "min") of `x` over the ranks along `axis`.

        `leaf` is the path of the leaf whose gradient `x` is; empty for any other value.
        """

    def axis_index(self, axis: str, device: torch.device) -> Tensor:
        """This rank's position along `axis`, a 0-d int64."""

    def orthogonalize(self, slices: list[Tensor], places: Places, blocks: Blocks, how: NewtonSchulz) -> list[Tensor]:
        """This rank's slices of the leaves at `places`, orthogonalized as `optim.newton_schulz` says."""

    def do_together(self, do: Callable[[], T], call: str) -> T:
        """`do()`, which writes slices to a disk. All ranks are in the same `call`.

        Raises:
            FzeroError: on all ranks, where `do` fails on any. A rank that is alone raises what `do` raises.
        """
