"""Performer: who performs operations on values, and what a performer reads of an operation's record."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from fzero.base.mesh import VirtualMesh

T = TypeVar("T")
Record = Any
"""An `Operation` of `fzero.program`, which lives above."""


class MovePerformer:
    """Performs operations on one mesh. Every `Sharded` has one, its attribute `on`. There are three classes, of which
    the last two are `Ranks` (`fzero/ranks/ranks.py`):

    * `Tracer` (`fzero/tracing/trace.py`) writes each operation into the graph of a program, and performs nothing.
    * `Live` (`fzero/ranks/live.py`) is one rank of a `DeviceMesh`, and communicates at once.
    * `Virtual` (`fzero/ranks/virtual.py`) is all ranks of a `VirtualMesh` in one process, so every slice is present.
    """

    mesh: VirtualMesh
    is_tracing = False  # whether operations are written into a program instead of performed
    writes = 0  # how many functions have written into slices
    rank: int | None = None
    """This rank's position along the mesh's shard axis; None for all ranks together."""

    def perform(self, operation: Record, *args: Any, **kwargs: Any) -> Any:
        """The result of an operation. The arguments are those of a node, but for a `Layout` in the place of its name.
        Outside of a trace the result is new memory."""
        raise NotImplementedError

    def along(self, axis: str) -> int:
        """This rank's position along an axis, or along several axes together; 0 in a trace, and for all ranks
        together."""
        return 0

    def specify(self, what: str, details: Sequence[str]) -> Self:
        """What performs operations for `what`, such as "sum of layers.0.w". Live ranks compare that and the lines
        `details` before they communicate. In a trace, and on virtual ranks, this performer itself."""
        return self

    def count_agreements(self) -> int:
        """How many agreements the ranks have come to: the same number on all of them. 0 in a trace, and on virtual
        ranks."""
        return 0

    def varies(self, x: Tensor) -> bool:
        """Whether the plain tensor `x` may differ between ranks. Only a trace knows: elsewhere, no."""
        return False

    def find_same(self, x: Tensor) -> frozenset[str]:
        """The model axes along which the plain tensor `x` is known to be the same. Only a trace knows."""
        return frozenset()

    def find_differing(self, x: Tensor) -> frozenset[str]:
        """The model axes along which the plain tensor `x` is known to differ. Only a trace knows."""
        return frozenset()

    def may_write(self, x: Tensor) -> bool:
        """Whether a function may write into the slice `x`: inside of a step, where no argument has that memory, and
        where the step has no view of the gathered value, which would not see the write."""
        return False

    def note_result(self, x: Tensor, full: Tensor, result: Any) -> None:
        """Note what a function returned for `full`, which was gathered from the slice `x`: maybe a view."""

    def note_write(self) -> None:
        """Count a write into a slice: what was gathered before is out of date."""

    def note_reduce_dtype(self, path: str, dtype: torch.dtype) -> None:
        """Note that a step averages the gradients of the leaf at `path` in a dtype. Outside of a trace, nothing."""

    def do_together(self, do: Callable[[], T], call: str) -> T:
        """`do()`, which writes slices to a disk. All ranks are in the same `call`.

        Raises:
            FzeroError: on all ranks, where `do` fails on any. A rank that is alone raises what `do` raises.
        """
        return do()


_current: ContextVar[MovePerformer | None] = ContextVar("fzero_move_performer", default=None)


@contextmanager
def bind_axes(on: MovePerformer | None) -> Iterator[None]:
    """Inside this context `on` performs collectives over named axes. Outside they see one rank."""
    token = _current.set(on)
    try:
        yield
    finally:
        _current.reset(token)


def current_performer() -> MovePerformer | None:
    """What performs collectives over named axes here: inside of a step its tracer, None outside."""
    return _current.get()
