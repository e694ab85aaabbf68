"""Transfer: bytes between memory and a place in a file, complete and without a copy on the way."""

from __future__ import annotations

import ctypes
import os

from torch import Tensor


def memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor. The view is valid while the tensor lives."""
    nbytes = tensor.numel() * tensor.itemsize
    # Not `tensor.numpy()`: numpy is optional, and has no bfloat16. ctypes refuses an array of no bytes.
    return memoryview((ctypes.c_char * nbytes).from_address(tensor.data_ptr())).cast("B") if nbytes else memoryview(b"")


def read_into(fd: int, buffer: memoryview, offset: int) -> int:
    """Fill `buffer` from byte `offset` of a file on. Returns the bytes read: fewer than asked for only at the file's
    end."""
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
        OSError: when not all of `data` can be written.
    """
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], offset + done)
