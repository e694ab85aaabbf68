"""Process memory: read the memory of another process on this host, by Linux's `process_vm_readv`.

Both processes must have the same user, and the kernel must let processes of one user read each other (with Yama:
`ptrace_scope` 0).
"""

from __future__ import annotations

import ctypes
import errno
import os
from typing import Any

from fzero.ranks.failure import RefusedError

_libc: Any = ctypes.CDLL(None, use_errno=True)


class EndedError(RuntimeError):
    """The process has ended."""


class _Vector(ctypes.Structure):
    """`struct iovec`."""

    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


def read(process: int, source: int, target: int, nbytes: int) -> None:
    """Copy bytes from the address `source` in another process to the address `target` in this process.

    Raises:
        RuntimeError: when the bytes cannot be read; `RefusedError` when this process may not read them; `EndedError`
            when the process is gone.
    """
    done = 0  # one call may copy less than it is asked for
    while done < nbytes:
        here, there = _Vector(target + done, nbytes - done), _Vector(source + done, nbytes - done)
        count = _libc.process_vm_readv(process, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
        if count <= 0:
            code = ctypes.get_errno()
            kind = {errno.ESRCH: EndedError, errno.EPERM: RefusedError}.get(code, RuntimeError)
            raise kind(f"{nbytes} bytes of process {process} cannot be read: {os.strerror(code)}")
        done += count
