"""Board: where each rank of a host says what others may read of its memory, and what it has read of theirs.

It is a table in a rank's own memory, which the others read as they read everything else: no message is sent. Exchanges
are numbered from 1 in the order in which ranks start them, which is the same on all. Each has a slot of the table:

    posted      the number of the exchange, once `where` is right
    where       the address of the addresses of what the rank sends
    done        the number of the exchange, once the rank has read what all others send
"""

from __future__ import annotations

import ctypes
import os
import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from threading import Lock
from typing import Any, NamedTuple

import torch.distributed as dist

from fzero.ranks.transports.memory import EndedError, read

SLOTS = 4096
"""Exchanges that may be under way at once."""
WORD = 16  # bytes at the head of a table that ranks try to read from each other
FAILED, POSTED, WHERE, DONE = 2, 3, 3 + SLOTS, 3 + 2 * SLOTS  # where things stand in it, behind the word
PAUSE, LONGEST = 10e-6, 500e-6
"""Seconds that a rank sleeps before it looks again, more by the first each time, up to the second."""

_Table = ctypes.c_int64 * (DONE + SLOTS)


class Seen(NamedTuple):
    """A rank's process, as it tells others: where it is, and the word that they should find at its table's address."""

    place: tuple[str, ...]  # what processes have in common whose ids mean the same
    process: int
    table: int
    word: bytes


class Board:
    """The tables of a gloo group's ranks, as one of them sees them. Waits no longer than `timeout`."""

    def __init__(self, table: Any, ranks: Sequence[Seen], timeout: timedelta) -> None:
        self._table, self._ranks, self._timeout = table, ranks, timeout.total_seconds()
        self._lock = Lock()

    def post(self, number: int, addresses: Any) -> None:
        """Say where what this rank sends lies: an array of int64 that lives as long as the exchange."""
        slot = number % SLOTS
        with self._lock:  # of use for the order of writes alone, on processors that have none
            self._table[WHERE + slot] = ctypes.addressof(addresses)
        with self._lock:
            self._table[POSTED + slot] = number

    def addresses(self, rank: int, number: int, count: int) -> list[int]:
        """What `rank` posted, once it has."""
        self._until(rank, POSTED, number)
        found = (ctypes.c_int64 * count)()
        where = self._entry(rank, WHERE + number % SLOTS)
        read(self._ranks[rank].process, where, ctypes.addressof(found), ctypes.sizeof(found))
        return list(found)

    def read(self, rank: int, address: int, target: int, nbytes: int) -> None:
        """Copy bytes of a rank's memory to an address here."""
        read(self._ranks[rank].process, address, target, nbytes)

    def done(self, number: int) -> None:
        """Say that this rank has read what it needs."""
        with self._lock:
            self._table[DONE + number % SLOTS] = number

    def until_done(self, rank: int, number: int) -> None:
        """Return when `rank` has said so, or has ended: then it reads nothing more."""
        with suppress(EndedError):
            self._until(rank, DONE, number)

    def fail(self) -> None:
        """Let no rank wait for this one any more."""
        self._table[FAILED] = 1

    def _until(self, rank: int, column: int, number: int) -> None:
        deadline, pause = time.monotonic() + self._timeout, 0.0
        while self._entry(rank, column + number % SLOTS) < number:
            if self._entry(rank, FAILED):
                raise RuntimeError(f"rank {rank} of the group has given up")
            if time.monotonic() > deadline:
                raise RuntimeError(f"rank {rank} of the group did not come within {self._timeout:g} s")
            time.sleep(pause)
            pause = min(pause + PAUSE, LONGEST)

    def _entry(self, rank: int, index: int) -> int:
        seen, found = self._ranks[rank], ctypes.c_int64()
        read(seen.process, seen.table + index * 8, ctypes.addressof(found), 8)
        return found.value


def common_board(group: dist.ProcessGroup, timeout: timedelta) -> Board | None:
    """The board of a gloo group whose ranks can all read each other's memory, else None. Collective."""
    table, word = _Table(), secrets.token_bytes(WORD)
    ctypes.memmove(table, word, WORD)
    ranks = _told(group, Seen(_place(), os.getpid(), ctypes.addressof(table), word))
    mine = ranks[dist.get_rank(group)]
    can_read = _told(group, all(other.place == mine.place and _is_readable(other) for other in ranks))
    return Board(table, ranks, timeout) if all(can_read) else None


def _told(group: dist.ProcessGroup, word: Any) -> list[Any]:
    """What each rank says."""
    words = [None] * dist.get_world_size(group)
    dist.all_gather_object(words, word, group=group)
    return words


def _place() -> tuple[str, ...]:
    """The boot of a host, and the namespace of its process ids; unlike any other's where they cannot be known."""
    with suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip(), os.readlink("/proc/self/ns/pid")
    return (secrets.token_hex(WORD),)


def _is_readable(other: Seen) -> bool:
    found = ctypes.create_string_buffer(WORD)
    with suppress(RuntimeError, AttributeError):  # a refusal, or a system without the call
        read(other.process, other.table, ctypes.addressof(found), WORD)
    return found.raw == other.word
