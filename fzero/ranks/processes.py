"""Processes: which ranks' processes have ended, as far as this host can tell.

A killed rank's sockets stay open while a child that the rank has forked holds them, and then no connection fails.
"""

from __future__ import annotations

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
        _, start = _read_status(os.getpid())
    return Process(_place(), os.getpid(), start)


def has_ended(process: Process) -> bool:
    """Whether a process of this place has ended, or is a zombie. False for a process of another place."""
    if process.place != _place():
        return False
    try:
        state, start = _read_status(process.number)
    except OSError:
        return True
    return state in "ZX" or start != process.start


def _place() -> tuple[str, ...]:
    """The boot of this host and the namespace of its process ids. Unequal to any other place if they are not known."""
    with suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip(), os.readlink("/proc/self/ns/pid")
    return (secrets.token_hex(UNIQUE),)


def _read_status(number: int) -> tuple[str, str]:
    """State and start time of a process. A name in parentheses, which may have spaces, precedes them."""
    with open(f"/proc/{number}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return fields[0], fields[19]
