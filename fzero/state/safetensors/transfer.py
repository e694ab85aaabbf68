"""Transfer: bytes between memory and a place in a file, complete and without a copy on the way."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from fzero.files import OnDisk
from fzero.files.memory import memory_of, new_buffer
from fzero.state.fill import chunk_numel
from fzero.state.sources import Source, TensorSource

CAST_NBYTES = 2**20
"""Bytes that are read at a time when the values are cast to another dtype."""
NO_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES)
"""Errors of a filesystem that cannot sync a directory, as some network filesystems."""
SYNC_FILE_RANGE_WRITE = 2
"""A number of Linux."""


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


def read_elements(fd: int, out: Tensor, dtype: torch.dtype, offset: int) -> int:
    """Fill `out`, 1-d, with elements of a dtype that lie in a file from byte `offset` on. They are read straight into
    the memory of `out`; where that is no such memory, `CAST_NBYTES` at a time are read and copied. Returns the bytes
    read: fewer than asked for only at the file's end."""
    if out.dtype == dtype and out.is_contiguous() and out.is_cpu:
        return read_into(fd, memory_of(out), offset)
    step, done = max(1, CAST_NBYTES // dtype.itemsize), 0
    stage = torch.empty(min(step, out.numel()), dtype=dtype, device="cpu")
    for part in out.split(step):
        stored = stage[: part.numel()]
        count = read_into(fd, memory_of(stored), offset + done)
        done += count
        if count < stored.nbytes:
            break
        part.copy_(stored)
    return done


def write_from(fd: int, data: memoryview, offset: int) -> None:
    """Write `data` at byte `offset` of a file.

    Raises:
        OSError: when not all of `data` can be written.
    """
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], offset + done)


def begin_writeback(fd: int) -> None:
    """Let the disk begin to take what was written to a file, and do not wait. Where the system cannot, do nothing."""
    begin = getattr(ctypes.CDLL(None), "sync_file_range", None)  # of Linux. Python's os lacks it
    if begin is not None:
        begin(fd, ctypes.c_int64(0), ctypes.c_int64(0), SYNC_FILE_RANGE_WRITE)  # to the end of the file


def iter_parts(values: Source, chunk: int) -> Iterator[Tensor]:
    """All elements in order, as contiguous CPU tensors of at most `chunk` bytes: views of a tensor that is contiguous
    on the CPU, else copies in one buffer, each valid until the next."""
    numel, step = values.shape.numel(), chunk_numel(chunk, values.dtype)
    if isinstance(values, TensorSource) and _is_plain(values):
        yield from values.tensor.reshape(-1).split(step)
        return
    buffer = new_buffer(min(step, numel), values.dtype)
    for start in range(0, numel, step):
        part = buffer[: min(step, numel - start)]
        values.read(start, part)
        yield part


def _is_plain(values: TensorSource) -> bool:
    """Whether the tensor's memory on the CPU holds its values in order."""
    tensor = values.tensor
    lazy = tensor.is_conj() or tensor.is_neg() or isinstance(tensor, OnDisk)
    return tensor.is_cpu and tensor.is_contiguous() and not lazy and tensor.dtype == values.dtype


def sync_directory(directory: Path) -> None:
    """Put the names of a directory's files on the disk, where the filesystem can.

    Raises:
        OSError: when the disk fails.
    """
    try:
        fd = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        if error.errno not in NO_SYNC:
            raise
