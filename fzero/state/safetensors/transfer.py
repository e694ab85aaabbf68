"""Transfer: memory to and from a place in a file, in full and without a copy on the way."""

from __future__ import annotations

import ctypes
import os

from torch import Tensor


def memory(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, valid while it lives. Without numpy, which has no bfloat16 either."""
    nbytes = tensor.numel() * tensor.itemsize
    return memoryview((ctypes.c_char * nbytes).from_address(tensor.data_ptr())).cast("B") if nbytes else memoryview(b"")


def read_into(fd: int, buffer: memoryview, offset: int) -> int:
    """Fill `buffer` from byte `offset` of a file on. Returns the bytes read, fewer only where the file ends."""
    done = 0
    while done < len(buffer):
        count = os.preadv(fd, [buffer[done:]], offset + done)
        if count == 0:
            break
        done += count
    return done


def write_from(fd: int, data: memoryview, offset: int) -> None:
    """Write `data` at byte `offset` of a file.

    Raises:
        OSError: when not all of it can be written.
    """
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], offset + done)
