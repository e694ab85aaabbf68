"""Progress: what the logger says while a trace takes long."""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import perf_counter

PATIENCE = 2.0
"""Seconds that a trace takes before the logger says how far it is."""
_log = logging.getLogger("fzero")


class Progress:
    """Counts the operations of a trace. After `PATIENCE` seconds, and whenever twice as many have gone by, the logger
    "fzero" says at level info how many there were, and which line of the user runs."""

    def __init__(self, name: str, clock: Callable[[], float] = perf_counter) -> None:
        self._name, self._clock, self._count = name, clock, 0
        self._start, self._next = clock(), PATIENCE

    def count(self, line: str) -> None:
        """Count one more operation, of this line."""
        self._count += 1
        seconds = self._clock() - self._start
        if seconds >= self._next:
            self._next = 2 * seconds
            _log.info("%s: %.0f s of tracing, %d operations, now at %s", self._name, seconds, self._count, line)
