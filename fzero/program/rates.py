"""Rates: how fast a machine computes and communicates, to turn work and bytes into seconds."""

from __future__ import annotations

from typing import NamedTuple

from fzero.base.mesh import VirtualMesh
from fzero.program.comm import Comm
from fzero.program.work import Work


class Rates(NamedTuple):
    """What one rank does in a second, and what each operation and each collective costs besides."""

    flops: float  # of matrix products, a second
    memory: float  # bytes read or written a second
    wire: float  # bytes that a rank sends, while it receives as many, a second: "bus bandwidth" in nccl-tests
    launch: float  # seconds an operation
    latency: float  # seconds a collective

    def compute(self, work: Work) -> float:
        """Seconds of an operation: it is bound by arithmetic or by memory, as in the roofline model (Williams,
        Waterman and Patterson 2009). What does no work takes none."""
        return self.launch + max(work.flops / self.flops, work.nbytes / self.memory) if any(work) else 0.0

    def communicate(self, comm: Comm, mesh: VirtualMesh) -> float:
        """Seconds of a collective that has the wire to itself: none on one rank."""
        sent = bus_bytes(comm, mesh)
        return self.latency + sent / self.wire if mesh.size(comm.axis) > 1 else 0.0


def bus_bytes(comm: Comm, mesh: VirtualMesh) -> float:
    """Bytes that each rank sends: the buffer but for its own part of N, twice for an all-reduce.

    The convention of nccl-tests, doc/PERFORMANCE.md; ring and direct exchanges move as much.
    """
    size = mesh.size(comm.axis)
    return comm.nbytes * (size - 1) / size * (2 if comm.op == "all_reduce" else 1)


GUESSES = {
    "cpu": Rates(flops=1e11, memory=1e10, wire=1.5e9, launch=5e-6, latency=1e-4),
    "cuda": Rates(flops=4e14, memory=2e12, wire=5e10, launch=5e-6, latency=3e-5),
}
"""Rates by type of device, to plan with where nothing was measured. Guesses: one CPU core with AVX-512 in fp32 and
gloo within one machine; a GPU of Hopper's generation in bf16 with one 400 Gb/s port. Rather fast at computing and slow
at communicating, so that what is scheduled by them starts too early and not too late."""


def guess_rates(device_type: str) -> Rates:
    """The guess for a type of device, that for "cuda" where there is none."""
    return GUESSES.get(device_type, GUESSES["cuda"])
