"""Turns: ranks of several launches on one machine go one after the other, as no process group could let them.

The launcher keeps a store; each rank of each launch has a `Turns` of it. Whoever waits for the others sleeps.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta

import torch.distributed as dist

HOST = "127.0.0.1"
PATIENCE = timedelta(hours=6)
"""Longer than any run: the launcher ends ranks that wait for one that failed."""


def store() -> dist.TCPStore:
    """The launcher's end. `store().port` is where the others find it."""
    return dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)


class Turns:
    """A rank's end: `begin(0)`, `end(0)`, `begin(1)`, ... of all launches, in this order. Rank 0 speaks for all."""

    def __init__(self, port: int) -> None:
        self._store = dist.TCPStore(HOST, port, is_master=False, timeout=PATIENCE)

    def ready(self, here: Iterable[str], everyone: Iterable[str]) -> None:
        """Say who is ready here, and wait until everyone is."""
        dist.barrier()
        self._say(*(f"{name} is ready" for name in here))
        self._store.wait([f"{name} is ready" for name in everyone])

    def begin(self, turn: int) -> None:
        """Wait for a turn, and for the other ranks of this launch."""
        if turn:
            self._store.wait([f"end of {turn - 1}"])
        dist.barrier()

    def end(self, turn: int) -> None:
        """The turn is over once every rank of this launch says so."""
        dist.barrier()
        self._say(f"end of {turn}")

    def _say(self, *words: str) -> None:
        if dist.get_rank() == 0:
            for word in words:
                self._store.set(word, "")
