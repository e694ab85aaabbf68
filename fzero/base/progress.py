"""Progress: how far long work is, to the callback of a block, and to the logger."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from time import perf_counter
from typing import NamedTuple

PATIENCE = 2.0
"""Seconds that work takes before the logger says how far it is."""
_log = logging.getLogger("fzero")


class WorkProgress(NamedTuple):
    """How far work is. `work` is "tracing", "passes", "compiling", "searching", "planning", "building", "reading" or
    "writing"; `name` is what the work is on, such as the function of a step or a folder; `done` of `total` `units` are
    behind it, where the total is known; `seconds` since it began; `at` is what it does now."""

    work: str
    name: str
    done: int
    total: int | None
    units: str
    seconds: float
    at: str

    def __str__(self) -> str:
        count = f"{self.done:,}" if self.total is None else f"{self.done:,} of {self.total:,}"
        now = f", now at {self.at}" if self.at else ""
        return f"{self.name}: {self.seconds:.0f} s of {self.work}, {count} {self.units}{now}"


class _Watch(NamedTuple):
    callback: Callable[[WorkProgress], object]
    every: float


_watches: ContextVar[tuple[_Watch, ...]] = ContextVar("fzero_progress", default=())


@contextmanager
def watch(callback: Callable[[WorkProgress], object], every: float) -> Iterator[None]:
    """Call `callback` while work of this thread goes on in the block, not within `every` seconds of its last call for
    the same work, and not of work that a callback does."""
    token = _watches.set((*_watches.get(), _Watch(callback, every)))
    try:
        yield
    finally:
        _watches.reset(token)


class Progress:
    """Counts the units of one work. Each watch hears of the first unit behind its seconds, and of the last one where
    the total is known. After `PATIENCE` seconds, and whenever twice as many have gone by, the logger "fzero" says at
    level info how far the work is."""

    def __init__(
        self, work: str, name: str, units: str, total: int | None = None, clock: Callable[[], float] = perf_counter
    ) -> None:
        self._work, self._name, self._units, self._total, self._clock = work, name, units, total, clock
        self._done, self._start, self._next = 0, clock(), PATIENCE
        self._watches = [(watch, watch.every) for watch in _watches.get()]

    def count(self, at: str = "", more: int = 1) -> None:
        """Count units that are done. `at` is the last of them."""
        self._done += more
        seconds, is_last = self._clock() - self._start, self._done == self._total
        is_logged = seconds >= self._next
        if not is_logged and not self._watches:
            return
        step = WorkProgress(self._work, self._name, self._done, self._total, self._units, seconds, at)
        for i, (each, due) in enumerate(self._watches):
            if seconds >= due or is_last:
                token = _watches.set(())  # work that the callback does is not told: the callback would be in itself
                try:
                    each.callback(step)
                finally:
                    _watches.reset(token)
                self._watches[i] = each, self._clock() - self._start + each.every  # also of a callback that is slow
        if is_logged:
            self._next = 2 * seconds
            _log.info("%s", step)
