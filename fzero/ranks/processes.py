"""Processes: which ranks' processes have ended, as far as this host can tell.

A killed rank's sockets stay open while a child that the rank has forked holds them, and then no connection fails.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from contextlib import suppress
from typing import NamedTuple

UNIQUE = 16  # random bytes in place of what a system does not tell


class Process(NamedTuple):
    """A rank's process, as the rank describes it to others."""

    place: tuple[str, ...]  # equal for processes that see the same process ids
    number: int  # the process id
    start: str  # when the process started: process ids are used again


def this_process() -> Process:
    """The process of this rank."""
    start = ""
    with suppress(OSError):  # a system without /proc has no place either
        start, _ = _read_status(os.getpid())
    return Process(_place(), os.getpid(), start)


def has_ended(process: Process) -> bool:
    """Whether a process of this place has ended, or is about to. False for a process of another place."""
    if process.place != _place():
        return False
    try:
        start, nbytes = _read_status(process.number)
    except OSError:
        return True
    return start != process.start or nbytes == 0


def name_process() -> str:
    """A word without spaces, dots and slashes for this process, which `find_end` of another process understands."""
    place, number, start = this_process()
    return f"{_hash_place(place)}-{number}-{start}"


def find_end(name: str) -> bool | None:
    """Whether the process with this name has ended. None for a process of another place, and for any other word."""
    place, _, rest = name.partition("-")
    number, _, start = rest.partition("-")
    here = _place()
    if place != _hash_place(here) or not number.isdecimal() or not start:
        return None
    return has_ended(Process(here, int(number), start))


def _hash_place(place: tuple[str, ...]) -> str:
    return hashlib.sha256(" ".join(place).encode()).hexdigest()[:16]


def _place() -> tuple[str, ...]:
    """The boot of this host and the namespace of its process ids. Unequal to any other place if they are not known."""
    with suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        if os.readlink("/proc/self") == str(os.getpid()):  # or /proc counts processes as another namespace does
            return file.read().strip(), os.readlink("/proc/self/ns/pid")
    return (secrets.token_hex(UNIQUE),)


def _read_status(number: int) -> tuple[str, int]:
    """The start time of a process, and the bytes of its address space. A process that ends frees its memory first, and
    is without any until its parent has noticed."""
    with open(f"/proc/{number}/stat") as file:
        fields = file.read().rpartition(")")[2].split()  # behind its name, which may have spaces
    return fields[19], int(fields[20])
