"""Pending: a collective that was started, and what performs collectives on one process group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from fzero.layout.layout import Wire
from fzero.ranks.members import Begun


class Pending:
    """A started collective: `wait()` returns its result, when `waits` have returned, as `finish()` makes it.

    What it sends may not change before its transport has settled.

    Raises:
        FzeroError: when a rank does not take part, naming it.
    """

    __slots__ = ("begun", "finish", "waits")

    def __init__(self, begun: Begun, waits: list[Callable[[], Any]], finish: Callable[[], Tensor]) -> None:
        self.begun, self.waits, self.finish = begun, waits, finish

    def wait(self) -> Tensor:
        """The result. Call it once: it lets go of the buffers."""
        with self.begun:
            for wait in self.waits:
                wait()
        result, self.waits, self.finish = self.finish(), [], _spent
        return result


def _spent() -> Tensor:
    raise RuntimeError("this collective was waited for already")


class Transport(Protocol):
    """The collectives of one process group. `rank` counts within it."""

    rank: int
    world: int

    def all_gather(self, block: Tensor, begun: Begun, into: Tensor | None = None) -> Pending:
        """[S] of each rank -> [N * S], in rank order: a new tensor, or `into`, in which `block` is its own place."""

    def reduce_scatter(self, fulls: Sequence[Tensor], wire: Wire, begun: Begun) -> Pending:
        """The leaves of a wire, whole -> [S]: this rank's block of their mean over ranks."""

    def all_to_all(self, blocks: Tensor, begun: Begun) -> Pending:
        """[N * S] of each rank, block r for rank r -> [N * S], block r from rank r: a new tensor."""

    def all_reduce(self, x: Tensor, op: str, begun: Begun) -> Tensor:
        """A new tensor: "sum", "avg", "max" or "min" over ranks."""

    def settle(self) -> None:
        """Return when no other rank needs any more what this one sent in collectives that it waited for."""
