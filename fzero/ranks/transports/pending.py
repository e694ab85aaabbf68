"""Pending: a collective that has been started. Transport: what performs the collectives of one process group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from fzero.layout.wires import Wire
from fzero.ranks.members import Attempt


class Pending:
    """A collective that has been started. `wait()` calls each of `waits`, and then returns the result of `finish()`.

    Tensors that the collective sends may not change before its transport has settled (`Transport.settle`).

    Raises:
        FzeroError: when a rank does not take part, naming it.
    """

    __slots__ = ("attempt", "finish", "waits")

    def __init__(self, attempt: Attempt, waits: list[Callable[[], Any]], finish: Callable[[], Tensor]) -> None:
        self.attempt, self.waits, self.finish = attempt, waits, finish

    def wait(self) -> Tensor:
        """Wait for the collective and return its result. Call once: the buffers are dropped."""
        with self.attempt:
            for wait in self.waits:
                wait()
        result, self.waits, self.finish = self.finish(), [], _refuse
        return result


def _refuse() -> Tensor:
    raise RuntimeError("this collective was waited for already")


class Splits(NamedTuple):
    """The elements that a rank gives to each rank, and that it takes from each rank, in rank order."""

    given: Sequence[int]
    taken: Sequence[int]

    @classmethod
    def equal(cls, numel: int, world: int) -> Splits:
        """Equal parts of `numel` elements, both ways."""
        return cls([numel // world] * world, [numel // world] * world)


class Transport(Protocol):
    """The collectives of one process group of `world` ranks. `rank` counts within the group. N ranks, S elements.

    Sums and means of float16 and bfloat16 are taken in float32 and rounded once. All ranks get the same bits.
    """

    rank: int
    world: int

    def all_gather(self, block: Tensor, attempt: Attempt, into: Tensor | None = None) -> Pending:
        """Start to gather [S] of each rank into [N * S], in rank order.

        The result is a new tensor, or `into`, of which `block` is this rank's part already.
        """

    def reduce_scatter(self, fulls: Sequence[Tensor], wire: Wire, attempt: Attempt) -> Pending:
        """Start to scatter the leaves of a wire, given in full, to [S]: this rank's block of their mean over ranks."""

    def all_to_all(self, blocks: Tensor, attempt: Attempt, splits: Splits) -> Pending:
        """Start to exchange blocks: flat blocks of each rank, block r for rank r -> flat blocks, block r from rank r.

        `splits` has their sizes.
        """

    def all_reduce(self, x: Tensor, op: str, attempt: Attempt) -> Pending:
        """Start to take the "sum", "avg", "max" or "min" of `x` over ranks, elementwise, in a new tensor."""

    def settle(self) -> None:
        """Wait until no rank reads this rank's memory any more for collectives that this rank has waited for.

        Call before memory that was sent is overwritten or freed.
        """


class Alone:
    """A process group of one rank, which sends nothing: the rank gets what it gives (`fzero.ranks.exchanges.begin`)."""

    rank, world = 0, 1

    def settle(self) -> None:
        """Nobody else reads this rank's memory."""
