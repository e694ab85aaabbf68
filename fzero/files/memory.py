"""Memory: the bytes of a tensor, and the aligned blocks through which bytes go between files and tensors."""

from __future__ import annotations

import ctypes
import mmap

import torch
from torch import Tensor

from fzero.base.errors import FzeroError

CPU = torch.device("cpu")
BLOCK_NBYTES = 1 << 20
BUFFER_NBYTES = 1 << 18
"""Buffers of so many bytes have pages of their own."""


def memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor. The view is valid while the tensor lives."""
    nbytes = tensor.numel() * tensor.itemsize
    # Not `tensor.numpy()`: numpy is optional, and has no bfloat16. ctypes refuses an array of no bytes.
    return memoryview((ctypes.c_char * nbytes).from_address(tensor.data_ptr())).cast("B") if nbytes else memoryview(b"")


def new_buffer(numel: int, dtype: torch.dtype, device: torch.device = CPU) -> Tensor:
    """[numel] elements without values. On the host, many are in pages of their own: the pages go back to the system
    with the tensor.

    Memory of `torch.empty` stays with the process where a small object is put into it meanwhile: a birth on a disk that
    allocated a chunk for each leaf so ended with all leaves in memory.
    """
    nbytes = numel * dtype.itemsize
    if nbytes < BUFFER_NBYTES or device.type != "cpu":
        return torch.empty(numel, dtype=dtype, device=device)
    return torch.frombuffer(_map_pages(nbytes), dtype=dtype, count=numel)


def allocate_pinned_memory(numel: int, dtype: torch.dtype, where: str, *, is_asked: bool = True) -> Tensor:
    """[numel] elements of the host without values, in pinned memory.

    Raises:
        FzeroError: naming `where`, for memory that cannot be pinned. `is_asked` says whether a user asked for it.
    """
    try:
        return torch.empty(numel, dtype=dtype, device="cpu", pin_memory=True)
    except RuntimeError as error:
        problem = f"{numel * dtype.itemsize} bytes of the host cannot be pinned: {error}"
        way_out = "raise the limit of locked memory (ulimit -l)" + (", or give pin=False" if is_asked else "")
        raise FzeroError(where, problem, way_out) from error


def _map_pages(nbytes: int) -> mmap.mmap:
    """New memory on a border of pages. No file lies behind it, and a child process gets a copy."""
    try:
        return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"the host cannot allocate {nbytes} bytes: {error.strerror}") from error


class Blocks:
    """Neighbouring blocks of 1 MiB, on a border of pages, which files that are read past the page cache ask for.

    `copy_out` and `copy_in` copy to and from the memory at an address, and let other threads run meanwhile.
    """

    def __init__(self, count: int) -> None:
        self.nbytes = count * BLOCK_NBYTES
        memory = _map_pages(self.nbytes)
        self.view = memoryview(memory)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(memory))

    def copy_out(self, start: int, address: int, nbytes: int) -> None:
        """Copy bytes of the blocks, from `start` on, to an address."""
        ctypes.memmove(address, self._address + start, nbytes)

    def copy_in(self, start: int, address: int, nbytes: int) -> None:
        """Copy bytes from an address over those of the blocks, from `start` on."""
        ctypes.memmove(self._address + start, address, nbytes)
