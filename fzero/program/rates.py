"""Rates: how fast a machine computes and communicates. They turn work and bytes into seconds."""

from __future__ import annotations

from typing import Any, NamedTuple

from fzero.base.errors import FzeroError
from fzero.base.mesh import VirtualMesh
from fzero.program.comm import Comm
from fzero.program.work import Work
from fzero.ranks.exchanges import AllReduce


class Rates(NamedTuple):
    """The speed of one rank, and the seconds that each operation and each collective costs besides."""

    flops: float  # of matrix products, a second
    memory: float  # bytes read or written a second
    wire: float  # bytes that a rank sends, while it receives as many, a second: "bus bandwidth" in nccl-tests
    launch: float  # seconds an operation
    latency: float  # seconds a collective
    link: float = 2.5e10  # bytes a second between the device and the host, in each direction
    host: float = 5e10  # bytes read or written a second by an operation on the host
    disk: float = 3e9  # bytes read or written a second, of files
    attention: float | None = None  # flops of fused attention, a second; None: as those of matrix products
    axes: tuple[tuple[str, float], ...] = ()  # mesh axis and its `wire`, for axes whose wire is another one

    def compute(self, work: Work) -> float:
        """Seconds of an operation, which arithmetic or memory bounds: the roofline model (Williams, Waterman and
        Patterson 2009). An operation without work, such as a view, takes no time."""
        if not any(work):
            return 0.0
        arithmetic = (work.flops - work.attention) / self.flops + work.attention / (self.attention or self.flops)
        return self.launch + max(arithmetic, work.nbytes / self.memory)

    def compute_on_host(self, work: Work) -> float:
        """Seconds of an operation on the host: updates of state, which memory bounds."""
        return work.nbytes / self.host

    def copy(self, nbytes: int) -> float:
        """Seconds of a copy between the device and the host."""
        return nbytes / self.link

    def copy_to_disk(self, nbytes: int) -> float:
        """Seconds of a copy between the host and a disk, either way."""
        return nbytes / self.disk

    def wire_along(self, axis: str, mesh: VirtualMesh) -> float:
        """The `wire` along an axis; over several axes together, which `axes` does not have, that of the slowest."""
        known = dict(self.axes)
        return known.get(axis) or min(known.get(each, self.wire) for each in mesh.split(axis))

    def communicate(self, comm: Comm, mesh: VirtualMesh) -> float:
        """Seconds of a collective that has the wire to itself. On one rank it takes no time."""
        if mesh.size(comm.axis) == 1:
            return 0.0
        wire = self.wire_along(comm.axis, mesh) if self.axes else self.wire
        return self.latency + bus_bytes(comm, mesh) / wire


def read_rates(where: str, given: Any) -> Rates:
    """Rates of plain data, such as `Rates._asdict()` through JSON.

    Raises:
        FzeroError: for a name that is no rate, for one that is missing, and as `check_rates`.
    """
    try:
        axes = tuple((str(axis), wire) for axis, wire in given.get("axes", ()))
        rates = Rates(**{**given, "axes": axes})
    except (TypeError, ValueError, AttributeError) as error:
        raise FzeroError(where, f"is no rates: {error}", f"give {', '.join(Rates._fields)}") from error
    check_rates(where, rates)
    return rates


def check_rates(where: str, rates: Rates) -> None:
    """Refuse rates that are no positive numbers; `launch` and `latency` may be 0."""
    named = {**rates._asdict(), **{f"axes {axis!r}": wire for axis, wire in rates.axes}}
    del named["axes"]
    if rates.attention is None:
        del named["attention"]
    for name, value in named.items():
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not (value > 0 or (value == 0 and name in ("launch", "latency"))):
            raise FzeroError(where, f"has {name} {value!r}", "give a positive number")


def bus_bytes(comm: Comm, mesh: VirtualMesh) -> float:
    """Bytes that each of N ranks sends: (N - 1) / N of the buffer, twice that for an all-reduce, and for a ppermute its
    own part.

    This is the convention of nccl-tests (doc/PERFORMANCE.md). Rings and direct exchanges both send as much.
    """
    size = mesh.size(comm.axis)
    if comm.op == "ppermute":
        return comm.nbytes / size if size > 1 else 0.0
    return comm.nbytes * (size - 1) / size * (2 if comm.op == AllReduce.name else 1)


GUESSES = {
    "cpu": Rates(flops=1e11, memory=1e10, wire=1.5e9, launch=5e-6, latency=1e-4, link=1e10, host=1e10),
    "cuda": Rates(flops=4e14, memory=2e12, wire=5e10, launch=5e-6, latency=3e-5, link=2.5e10, host=5e10),
}
"""Rates by type of device, to plan with before anyone has measured.

Guesses: one CPU core with AVX-512 in fp32, and gloo within one machine; a GPU of Hopper's generation in bf16, with one
400 Gb/s port, half of what its PCIe slot can do, and a share of a server's memory channels. They err towards fast
compute and slow communication, so that collectives start too early and not too late.
"""


def guess_rates(device_type: str) -> Rates:
    """The guess for a type of device; the guess for "cuda" where there is none."""
    return GUESSES.get(device_type, GUESSES["cuda"])
