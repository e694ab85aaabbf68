"""Prepared programs: the programs that a step has, and what their readings find in the batch of a call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from torch import Tensor

from fzero.program.program import Program
from fzero.program.readings import Found, Reading, read_all
from fzero.tracing.signatures import Signature, SignedCall, describe_change, describe_changes, sign_all
from fzero.tracing.watches import Watch

T = TypeVar("T")
Read = Callable[[Signature, Sequence[Any]], Found | None]
"""From the signature and the leaves of a call to what readings find in its batch; None where they do not fit."""


class TracedCall(NamedTuple):
    """A program as `finish` returned it, its signature, with that of what its readings found, and the values that it
    took from the step's surroundings."""

    signature: Signature
    watches: list[Watch]
    finished: Any
    program: Program | None  # None where no trace of its own made it
    readings: tuple[Reading, ...]
    read: Read

    @property
    def lines(self) -> list[str]:
        """The user's line of each value that readings found."""
        return [reading.where for reading in self.readings for _ in range(reading.count)]


class PreparedCall(NamedTuple, Generic[T]):
    """What `finish` returned for a call, and the further arguments: what its readings found in the call's batch.

    `is_together`: ranks may run the program at other sizes, by one schedule."""

    finished: T
    read: list[Tensor]
    is_together: bool = False


class BatchReader:
    """Reads the batch of a call, once for all programs of the same readings."""

    def __init__(self, call: SignedCall) -> None:
        self.call, (self.signature, self.leaves) = call, call
        self._found: dict[int, Found | None] = {}

    def match(self, known: TracedCall) -> Found | None:
        """What the readings of a program find, where the program is one of this call; else None."""
        if not known.readings:
            return [] if known.signature == self.signature else None
        settings, treedef, leaves = known.signature
        if (settings, treedef, leaves[: len(self.leaves)]) != self.signature:
            return None
        found = self.read(known)
        return None if found is None or sign_all(self.signature, found) != known.signature else found

    def read(self, known: TracedCall) -> Found | None:
        """What the readings of a program find."""
        key = id(known.readings)
        if key not in self._found:
            self._found[key] = known.read(self.signature, self.leaves)
        return self._found[key]


def read_call(readings: Sequence[Reading], signature: Signature, leaves: Sequence[Any]) -> Found | None:
    """What readings of given sizes find; None where one raises: those of another call may."""
    try:
        return read_all(readings, leaves)
    except Exception:
        return None


def explain(cache: list[TracedCall], signature: Any, is_full: bool) -> str:
    """Why none of the programs in `cache` fits arguments of this signature; for a full cache, what keeps changing."""
    for known in cache:
        if known.signature == signature:
            changed = ", ".join(value.changed for value in known.watches if not value.is_unchanged)
            return f"it reads {changed}, which changed since its last trace; give it as an argument"
    read = cache[0].lines
    if is_full:
        return describe_changes([known.signature for known in cache], signature, read)
    count, change = len(cache), describe_change(cache[0].signature, signature, read)
    if not change:
        return f"settings such as autocast differ from the {count} seen"
    return f"its arguments differ from the {count} seen, {change}"
