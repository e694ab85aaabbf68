"""Board: each rank of a host says what other ranks may read of its memory, and what it has read of theirs.

A rank's table lies in the rank's own memory. Other ranks read the table as they read tensors, so no message is sent.
Exchanges are numbered from 1, in the order in which ranks start them, which is the same on all ranks. Each exchange has
a slot of the table, with three entries:

    posted      the number of the exchange, written once `where` is right
    where       the address of an array with the addresses of the tensors that the rank sends
    done        the number of the exchange, written once the rank has read what all others send
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

from fzero.ranks.transports.process_memory import EndedError, read

SLOTS = 4096
"""How many exchanges may be under way at once."""
WORD = 16  # random bytes at the head of a table, by which ranks try whether they can read each other
FAILED, POSTED, WHERE, DONE = 2, 3, 3 + SLOTS, 3 + 2 * SLOTS  # indices of a table's columns, behind the word
PAUSE, LONGEST = 10e-6, 500e-6
"""Seconds that a rank sleeps before it looks at a table again: PAUSE more each time, at most LONGEST."""

_Table = ctypes.c_int64 * (DONE + SLOTS)


class Process(NamedTuple):
    """A rank's process, as the rank describes it to others, with the word that others find at its table's address."""

    place: tuple[str, ...]  # equal for processes that see the same process ids
    process: int  # the process id
    table: int  # the address of the table
    word: bytes


class Board:
    """The tables of all ranks of a gloo group, as one rank sees them. Waits for a rank no longer than `timeout`."""

    def __init__(self, table: Any, ranks: Sequence[Process], timeout: timedelta) -> None:
        self._table, self._ranks, self._timeout = table, ranks, timeout.total_seconds()
        self._lock = Lock()

    def post(self, number: int, addresses: Any) -> None:
        """Post the addresses of the tensors that this rank sends: an array of int64 that must outlive the exchange."""
        slot = number % SLOTS
        with self._lock:  # a lock orders the two writes on processors that may reorder them; no thread waits for it
            self._table[WHERE + slot] = ctypes.addressof(addresses)
        with self._lock:
            self._table[POSTED + slot] = number

    def read_addresses(self, rank: int, number: int, count: int) -> list[int]:
        """Wait until `rank` has posted the exchange, and read the `count` addresses that it posted."""
        self._wait_for(rank, POSTED, number)
        found = (ctypes.c_int64 * count)()
        where = self._entry(rank, WHERE + number % SLOTS)
        read(self._ranks[rank].process, where, ctypes.addressof(found), ctypes.sizeof(found))
        return list(found)

    def read(self, rank: int, address: int, target: int, nbytes: int) -> None:
        """Copy bytes from an address in the memory of `rank` to the address `target` in this process."""
        read(self._ranks[rank].process, address, target, nbytes)

    def post_done(self, number: int) -> None:
        """Post that this rank has read what it needs of the exchange."""
        with self._lock:
            self._table[DONE + number % SLOTS] = number

    def wait_until_done(self, rank: int, number: int) -> None:
        """Wait until `rank` has read what it needs of the exchange, or has ended and so reads nothing more."""
        with suppress(EndedError):
            self._wait_for(rank, DONE, number)

    def fail(self) -> None:
        """Post that this rank has given up, so that no rank waits for it any more."""
        self._table[FAILED] = 1

    def _wait_for(self, rank: int, column: int, number: int) -> None:
        """Wait until `rank` has written an exchange\'s number, or a later one, to a column of its table."""
        deadline, pause = time.monotonic() + self._timeout, 0.0
        while self._entry(rank, column + number % SLOTS) < number:
            if self._entry(rank, FAILED):
                raise RuntimeError(f"rank {rank} of the group has given up")
            if time.monotonic() > deadline:
                raise RuntimeError(f"rank {rank} of the group did not come within {self._timeout:g} s")
            time.sleep(pause)
            pause = min(pause + PAUSE, LONGEST)

    def _entry(self, rank: int, index: int) -> int:
        there, found = self._ranks[rank], ctypes.c_int64()
        read(there.process, there.table + index * 8, ctypes.addressof(found), 8)
        return found.value


def share_board(group: dist.ProcessGroup, timeout: timedelta) -> Board | None:
    """Make the board of a gloo group, or None unless all ranks can read each other's memory. All ranks call."""
    table, word = _Table(), secrets.token_bytes(WORD)
    ctypes.memmove(table, word, WORD)
    ranks = _exchange(group, Process(_place(), os.getpid(), ctypes.addressof(table), word))
    mine = ranks[dist.get_rank(group)]
    can_read = _exchange(group, all(other.place == mine.place and _is_readable(other) for other in ranks))
    return Board(table, ranks, timeout) if all(can_read) else None


def _exchange(group: dist.ProcessGroup, word: Any) -> list[Any]:
    """The word that each rank gives."""
    words = [None] * dist.get_world_size(group)
    dist.all_gather_object(words, word, group=group)
    return words


def _place() -> tuple[str, ...]:
    """The boot of this host and the namespace of its process ids. Unequal to any other place if they are not known."""
    with suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip(), os.readlink("/proc/self/ns/pid")
    return (secrets.token_hex(WORD),)


def _is_readable(other: Process) -> bool:
    """Whether this process can read the memory of another one."""
    found = ctypes.create_string_buffer(WORD)
    with suppress(RuntimeError, AttributeError):  # a refusal, or a system without the call
        read(other.process, other.table, ctypes.addressof(found), WORD)
    return found.raw == other.word
