"""Memory of other processes on this host, read straight into this one's: Linux's `process_vm_readv`.

It needs the same user, and a kernel that lets processes of one user read each other (with Yama: `ptrace_scope` 0).
"""

from __future__ import annotations

import ctypes
import os
import secrets
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch.distributed as dist

_libc: Any = ctypes.CDLL(None, use_errno=True)
WORD = 16  # bytes that ranks try to read from each other


class _Vector(ctypes.Structure):
    """`struct iovec`."""

    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


def read(process: int, source: int, target: int, nbytes: int) -> None:
    """Copy bytes from an address in another process to one in this process.

    Raises:
        RuntimeError: when the process is gone, or the kernel refuses.
    """
    done = 0
    while done < nbytes:
        here, there = _Vector(target + done, nbytes - done), _Vector(source + done, nbytes - done)
        count = _libc.process_vm_readv(process, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
        if count <= 0:
            problem = os.strerror(ctypes.get_errno())
            raise RuntimeError(f"{nbytes} bytes of process {process} cannot be read: {problem}")
        done += count


class _Seen(NamedTuple):
    """A process, as it tells others: where it is, and a word that they should find at an address."""

    place: tuple[str, ...]  # what processes have in common whose ids mean the same
    process: int
    address: int
    word: bytes


def processes(group: dist.ProcessGroup) -> Sequence[int] | None:
    """The process of each rank of a gloo group where each can read all others' memory, else None. Collective."""
    word = secrets.token_bytes(WORD)
    kept = ctypes.create_string_buffer(word, WORD)
    seen = _told(group, _Seen(_place(), os.getpid(), ctypes.addressof(kept), word))
    mine = seen[dist.get_rank(group)]
    are_readable = _told(group, all(other.place == mine.place and _is_readable(other) for other in seen))
    del kept  # everyone has looked
    return [other.process for other in seen] if all(are_readable) else None


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


def _is_readable(other: _Seen) -> bool:
    found = ctypes.create_string_buffer(WORD)
    with suppress(RuntimeError, AttributeError):  # a refusal, or a system without the call
        read(other.process, other.address, ctypes.addressof(found), WORD)
    return found.raw == other.word
