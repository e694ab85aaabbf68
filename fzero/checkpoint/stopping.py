"""Stopping: a signal asks any rank of a run to end, and all ranks hear of it at the same step."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Sequence
from types import FrameType
from typing import Any, NoReturn, Self

from fzero.base.errors import FzeroError
from fzero.ranks.live import find_ranks

BY_SIGNAL = 128
"""A shell's exit status for a process that a signal ended is so much more than the signal's number."""


class Stop:
    """Hears signals that ask the run to end, within a `with` block on the main thread.

        with Stop(mesh) as stop:
            for batch in loader:
                state, loss = step(state, batch)
                if stop.is_asked():  # on all ranks, whichever of them the signal came to
                    save(path, state)
                    stop.leave()

    A signal interrupts nothing: a step or a save goes on to its end. A second signal changes nothing.
    """

    def __init__(self, mesh: Any, signals: Sequence[int] = (signal.SIGTERM,)) -> None:
        self._on, self._signals = find_ranks(mesh), signals
        self._heard = 0  # the signal that came to this rank
        self._agreed = 0  # the signal that all ranks know of
        self._before: dict[int, Any] = {}  # the handlers that were there

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            raise FzeroError("Stop", "is used on a thread, where Python hears no signals", "use it on the main thread")
        for number in self._signals:
            try:
                self._before[number] = signal.signal(number, self._hear)
            except (OSError, ValueError) as error:
                self.__exit__()
                problem = f"has {number!r}, which cannot be heard: {error}"
                raise FzeroError("signals", problem, "give numbers such as signal.SIGTERM") from error
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler or signal.SIG_DFL)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self._heard = number

    def is_asked(self) -> bool:
        """Whether a signal has come to any rank. Collective: one all-reduce of 24 bytes on the host."""
        self._agreed = self._on.find_largest(self._heard, "whether to stop")
        return self._agreed != 0

    def leave(self) -> NoReturn:
        """Exit with the status of a process that the signal ended, 143 for SIGTERM. So torchrun starts ranks again."""
        sys.exit(BY_SIGNAL + self._agreed)
