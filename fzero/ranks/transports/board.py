"""Board: each rank of a host says what other ranks may read of its memory, and what it has read of theirs.

A rank's table lies in the rank's own memory. Other ranks read the table as they read tensors, so no message is sent.
Exchanges are numbered from 1, in the order in which ranks start them, which is the same on all ranks. Each exchange has
a slot of the table, with three entries:

    posted      the number of the exchange, written once `where` is right
    where       the address of an array that says what tensors the rank sends (`describe`)
    done        the number of the exchange, written once the rank has read what all others send
"""

from __future__ import annotations

import ctypes
import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from threading import Lock
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from fzero.ranks.objects import gather_objects
from fzero.ranks.processes import Process, this_process
from fzero.ranks.transports.process_memory import EndedError, read

SLOTS = 4096
"""How many exchanges may be under way at once."""
WORD = 16  # random bytes at the head of a table, by which ranks try whether they can read each other
FAILED, POSTED, WHERE, DONE = 2, 3, 3 + SLOTS, 3 + 2 * SLOTS  # indices of a table's columns, behind the word
PAUSE, LONGEST = 10e-6, 500e-6
"""Seconds that a rank sleeps before it looks at a table again: PAUSE more each time, at most LONGEST."""

_Table = ctypes.c_int64 * (DONE + SLOTS)


class Owner(NamedTuple):
    """A rank, as it tells others where its table lies, with the word that others find at the table's address."""

    process: Process
    table: int  # the address of the table
    word: bytes
    has_spare_cores: bool  # as the rank sees its host


class Board:
    """The tables of all ranks of a gloo group, as one rank sees them. Waits for a rank no longer than `timeout`."""

    def __init__(self, table: Any, ranks: Sequence[Owner], timeout: timedelta) -> None:
        self._table, self._timeout = table, timeout.total_seconds()
        self._ranks = [(each.process.number, each.table) for each in ranks]
        self._lock = Lock()
        # decided by all ranks: a rank that reads on a thread waits for others in the order in which exchanges started
        self.reads_on_thread = all(each.has_spare_cores for each in ranks)

    def post(self, number: int, words: Any) -> None:
        """Post what this rank sends: `words` are those of `describe`, which must outlive the exchange."""
        slot = number % SLOTS
        with self._lock:  # a lock orders the two writes on processors that may reorder them; no thread waits for it
            self._table[WHERE + slot] = ctypes.addressof(words)
        with self._lock:
            self._table[POSTED + slot] = number

    def read_addresses(self, rank: int, number: int, words: Any) -> list[int]:
        """Wait until `rank` has posted the exchange, and read the addresses of its tensors: as many tensors, of as many
        bytes, as in the `words` of this rank.

        Raises:
            RuntimeError: when the rank sends other tensors.
        """
        self._wait_for(rank, POSTED, number)
        found = type(words)()
        where, sizes = self._entry(rank, WHERE + number % SLOTS), 1 + words[0]
        read(self._ranks[rank][0], where, ctypes.addressof(found), ctypes.sizeof(found))
        if found[:sizes] != words[:sizes]:
            problem = f"sends {found[0]} tensors of {found[1:sizes]} bytes, not {words[0]} of {words[1:sizes]}"
            raise RuntimeError(f"rank {rank} of the group {problem}")
        return found[sizes:]

    def read(self, rank: int, address: int, target: int, nbytes: int) -> None:
        """Copy bytes from an address in the memory of `rank` to the address `target` in this process."""
        read(self._ranks[rank][0], address, target, nbytes)

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
        """Wait until `rank` has written an exchange's number, or a later one, to a column of its table."""
        deadline, pause, entry = time.monotonic() + self._timeout, 0.0, column + number % SLOTS
        while self._entry(rank, entry) < number:
            if self._entry(rank, FAILED):
                if self._entry(rank, entry) >= number:  # written since this rank looked, before the other failed
                    return
                raise RuntimeError(f"rank {rank} of the group has given up")
            if time.monotonic() > deadline:
                raise RuntimeError(f"rank {rank} of the group did not come within {self._timeout:g} s")
            time.sleep(pause)
            pause = min(pause + PAUSE, LONGEST)

    def _entry(self, rank: int, index: int) -> int:
        (process, table), found = self._ranks[rank], ctypes.c_int64()
        read(process, table + index * 8, ctypes.addressof(found), 8)
        return found.value


def describe(sent: Sequence[Tensor]) -> Any:
    """What a rank posts, as int64: how many tensors are sent, the bytes of each, the address of each."""
    words = [len(sent), *[x.nbytes for x in sent], *[x.data_ptr() for x in sent]]
    return (ctypes.c_int64 * len(words))(*words)


def share_board(group: dist.ProcessGroup, timeout: timedelta, has_spare_cores: bool) -> Board | None:
    """Make the board of a gloo group, or None unless all ranks can read each other's memory. All ranks call."""
    table, word = _Table(), secrets.token_bytes(WORD)
    ctypes.memmove(table, word, WORD)
    ranks = gather_objects(Owner(this_process(), ctypes.addressof(table), word, has_spare_cores), group)
    mine = ranks[dist.get_rank(group)].process
    can_read = gather_objects(all(other.process.place == mine.place and _is_readable(other) for other in ranks), group)
    return Board(table, ranks, timeout) if all(can_read) else None


def _is_readable(other: Owner) -> bool:
    """Whether this process can read the memory of another one."""
    found = ctypes.create_string_buffer(WORD)
    with suppress(RuntimeError, AttributeError):  # a refusal, or a system without the call
        read(other.process.number, other.table, ctypes.addressof(found), WORD)
    return found.raw == other.word
