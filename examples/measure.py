"""What a few steps really cost a rank: its peak tensor bytes, and the bytes that went over the loopback interface.

Neither the resident set nor the profiler's events tell the tensor bytes of a CPU process. What does is the allocator
itself: bytes of the state that is known to be held, plus the growth of the bytes in use (`mallinfo2` of glibc, sampled
by a thread) while steps run. On a GPU torch's own allocator counts.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from fzero import Sharded

PERIOD = 0.0002
"""Seconds between two samples."""


class Cost(NamedTuple):
    """Bytes; None where this platform cannot tell."""

    peak: int | None  # most bytes of tensors that this process held at a time, the state included
    sent: int | None  # bytes that all processes of this machine sent over its loopback interface


def measure(run: Callable[[], object], state: Any, device: torch.device) -> Cost:
    """The cost of `run`, which takes steady steps on `state`: any nesting of tensors that live throughout.

    The sampling thread slows it down: time something else.
    """
    held, before = nbytes(state), loopback()
    grown, after = growth(run, device), loopback()
    peak = None if grown is None else held + grown
    sent = None if before is None or after is None else after - before
    return Cost(peak, sent if device.type == "cpu" else None)


def nbytes(state: Any) -> int:
    """Bytes of the storages under all tensors of a tree (under the slices of its sharded leaves), each counted once."""
    held = (leaf.local if isinstance(leaf, Sharded) else leaf for leaf in tree_leaves(state))
    storages = [leaf.untyped_storage() for leaf in held if isinstance(leaf, Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def growth(run: Callable[[], object], device: torch.device) -> int | None:
    """How far the bytes handed out by the allocator of `device` rise above their start while `run` runs."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        start = torch.cuda.memory_allocated(device)
        run()
        return torch.cuda.max_memory_allocated(device) - start
    in_use = malloc_in_use()
    if in_use is None:
        run()
        return None
    return _sampled_growth(run, in_use)


def _sampled_growth(run: Callable[[], object], in_use: Callable[[], int]) -> int:
    start, stop = in_use(), Event()

    def most() -> int:
        peak = start
        while not stop.wait(PERIOD):
            peak = max(peak, in_use())
        return peak

    with ThreadPoolExecutor(1) as pool:
        peak = pool.submit(most)
        try:
            run()
        finally:
            stop.set()
    return peak.result() - start


def malloc_in_use() -> Callable[[], int] | None:
    """A function that returns malloc's bytes in use, mapped blocks included; None without glibc 2.33 or later."""
    mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo2 is None:
        return None
    mallinfo2.restype = _Mallinfo

    def in_use() -> int:
        info = mallinfo2()
        return info.uordblks + info.hblkhd

    return in_use


class _Mallinfo(ctypes.Structure):
    """`struct mallinfo2`: `uordblks` and `hblkhd` are bytes in use, in arenas and in mapped blocks."""

    _fields_ = [
        *[(name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd")],
        *[(name, ctypes.c_size_t) for name in ("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")],
    ]


def loopback() -> int | None:
    """Bytes sent over the loopback interface since the machine started; None where Linux does not say."""
    path = Path("/proc/net/dev")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((int(line.split()[9]) for line in lines if line.strip().startswith("lo:")), None)
