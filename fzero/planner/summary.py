"""Summary: what a traced step takes, in numbers."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from fzero.base.errors import FzeroError
from fzero.base.mesh import VirtualMesh
from fzero.program.flops import count_flops
from fzero.program.hardware import Hardware
from fzero.program.operation import nbytes
from fzero.program.program import Program

SHARED = ("tp", "ep", "sp", "pp")
"""The axes along which ranks share examples."""


class Traced(NamedTuple):
    """The program of a step, the parameters of its model, and the tokens of all ranks in a step."""

    program: Program
    parameters: int
    tokens: int


class Forecast(NamedTuple):
    """What a step takes on the rank that takes most. Bytes, seconds, and flops of all matrix products on one rank,
    those that are computed again among them; `moved` has the bytes of the buffers of collectives by mesh axis,
    `state` the bytes of parameters and optimizer state that a rank holds between steps, and `host` those on the host
    at its peak. `tokens` are those of all ranks in a step, `busy` the seconds of compute, and `largest` what is
    alive at the peak."""

    parameters: int
    ranks: int
    nodes: int
    state: int
    peak: int
    largest: list[tuple[str, int]]
    moved: dict[str, int]
    seconds: float
    busy: float
    flops: int
    tokens: int
    remarks: tuple[str, ...]
    host: int = 0

    @property
    def tokens_a_second(self) -> float:
        """Of one rank."""
        return self.tokens / self.seconds / self.ranks

    def utilization(self, hardware: Hardware) -> float:
        """The part of the device's dense flops in use. What is computed again counts, as in HFU."""
        return self.flops / self.seconds / hardware.flops


def summarize(traced: Traced) -> Forecast:
    """What a step takes.

    Raises:
        FzeroError: for a step that takes no time.
    """
    program, parameters, tokens = traced
    timeline, moved = program.timeline(), Counter[str]()
    if timeline.seconds == 0:
        raise FzeroError(program.name, "computes and moves nothing", "give a step that trains")
    for entry in program.comm():
        if program.mesh.size(entry.axis) > 1:
            moved[entry.axis] += entry.nbytes
    held, memory = zip(program.arguments, program.placeholders), program.memory()
    return Forecast(
        parameters=parameters,
        ranks=program.mesh.size(),
        nodes=len(program.graph.nodes),
        state=sum(nbytes(node.meta["val"]) for given, node in held if given.bucket is not None),
        peak=memory.peak,
        largest=[(value.what.partition(" (")[0], value.nbytes) for value in program.largest()],
        moved=dict(moved),
        seconds=timeline.seconds,
        busy=timeline.compute,
        flops=sum(count_flops(program).values()),
        tokens=tokens,
        remarks=program.remarks,
        host=memory.host,
    )


def count_sharing(mesh: VirtualMesh) -> int:
    """How many ranks share examples."""
    shared = [axis for axis in mesh.names if axis in SHARED]
    return mesh.size(mesh.join(shared)) if shared else 1


def count_groups(mesh: VirtualMesh) -> int:
    """How many groups of ranks there are that share examples."""
    return mesh.size() // count_sharing(mesh)
