"""Memory: the bytes of a tensor, and the aligned blocks through which bytes go between files and tensors."""

from __future__ import annotations

import ctypes
import mmap

from torch import Tensor

BLOCK_NBYTES = 1 << 20


def memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor. The view is valid while the tensor lives."""
    nbytes = tensor.numel() * tensor.itemsize
    # Not `tensor.numpy()`: numpy is optional, and has no bfloat16. ctypes refuses an array of no bytes.
    return memoryview((ctypes.c_char * nbytes).from_address(tensor.data_ptr())).cast("B") if nbytes else memoryview(b"")


class Blocks:
    """Neighbouring blocks of 1 MiB, on a border of pages, which files that are read past the page cache ask for.

    `copy_out` and `copy_in` copy to and from the memory at an address, and let other threads run meanwhile.
    """

    def __init__(self, count: int) -> None:
        self.nbytes = count * BLOCK_NBYTES
        memory = mmap.mmap(-1, self.nbytes)  # anonymous: no file lies behind it
        self.view = memoryview(memory)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(memory))

    def copy_out(self, start: int, address: int, nbytes: int) -> None:
        """Copy bytes of the blocks, from `start` on, to an address."""
        ctypes.memmove(address, self._address + start, nbytes)

    def copy_in(self, start: int, address: int, nbytes: int) -> None:
        """Copy bytes from an address over those of the blocks, from `start` on."""
        ctypes.memmove(self._address + start, address, nbytes)
