"""Outline: a program as the choices of a budget see it: one line of nodes, in which the nodes of one turn stand in the
place of a loop."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from fzero.passes.order import find_origins
from fzero.program.arguments import bucket_of, operand_of
from fzero.program.operation import Node, nbytes
from fzero.program.ops.loops import Loop
from fzero.program.program import Program
from fzero.program.records import body_of, leaves_of, starts
from fzero.program.timeline import COMPUTE, Cost, simulate_timeline

LEAST_WEIGHT = 0.05
"""What a second costs at least, also where it is hidden: rates are guesses, and a machine hides less than they say."""
SLOWER = 1.1
"""By how much a lane is slowed down to see what a second of it costs the step."""


class Weights(NamedTuple):
    """The seconds by which a step grows with a second of compute, and with a second of communication: 0 to 1."""

    compute: float
    wire: float


class LinePlace(NamedTuple):
    """A node in the line, the bytes that are alive while it runs, and the loops around it, the outermost first."""

    node: Node
    nbytes: int
    loops: tuple[Node, ...] = ()


Line = Sequence[LinePlace]


class GatheredUse(NamedTuple):
    """A buffer of gathered leaves in the line: its start, its first and its last use. `names` are the buckets that it
    holds, one for each turn."""

    names: tuple[str, ...]
    leaves: tuple[int, ...]
    dtype: torch.dtype
    start: int
    first: int
    stop: int
    nbytes: int


class Outline:
    """The outline of a program: its `costs` and `timeline`, its `line` and the `index` of each node there, the `uses`
    of gathered buffers, and what a second of each lane costs (`weights`)."""

    def __init__(self, program: Program) -> None:
        self.program, self.costs = program, program.costs()
        self.timeline = simulate_timeline(program, self.costs)
        self.line: Line = list(_flatten(program))
        self.index = {place.node: i for i, place in enumerate(self.line)}
        self.uses = list(_find_uses(program, self.index))
        self.weights = self._weigh()

    def _weigh(self) -> Weights:
        """What a second of each lane costs the program, of which one is hidden behind the other."""
        before, costs = self.timeline, self.costs
        busy = before.compute, sum(transfer.seconds for transfer in before.transfers)
        slow = (
            simulate_timeline(self.program, {node: each(cost) for node, cost in costs.items()})
            for each in (_slow_compute, _slow_wire)
        )
        more = (after.seconds - before.seconds for after in slow)
        grown = (delta / (seconds * (SLOWER - 1)) if seconds else 0.0 for delta, seconds in zip(more, busy))
        return Weights(*(max(weight, LEAST_WEIGHT) for weight in grown))


def _slow_compute(cost: Cost) -> Cost:
    return cost._replace(seconds=SLOWER * cost.seconds) if cost.lane == COMPUTE else cost


def _slow_wire(cost: Cost) -> Cost:
    return cost._replace(comms=tuple((comm, SLOWER * seconds) for comm, seconds in cost.comms))


def _flatten(program: Program, top: int | None = None, loops: tuple[Node, ...] = ()) -> Iterator[LinePlace]:
    """The line of a program within some loops. `top` is the peak of the line, by default that of the program."""
    memory = program.memory()
    more = 0 if top is None else top - memory.peak
    for node, alive in zip(program.graph.nodes, memory.during):
        body = body_of(node)
        if body is None:
            yield LinePlace(node, alive + more, loops)
        else:
            yield from _flatten(body, alive + more, (*loops, node))


def _find_uses(program: Program, index: Mapping[Node, int], loop: Loop | None = None) -> Iterator[GatheredUse]:
    """The gathered buffers of a program, which is the body of a loop or is not, and of its loops. Rows of what a loop
    goes through are left out: only leaves that all turns share, and the layer of each turn, can stay gathered."""
    origin = find_origins(program.graph, "gathered")
    first: dict[Node, int] = {}
    last: dict[Node, int] = {}
    for node, start in origin.items():
        users = [index[user] for user in node.users if user in index and user not in origin]
        first[start] = min([first.get(start, len(index)), *users])
        last[start] = max([last.get(start, 0), index[node], *users])
    rows = set(program.placeholders[: len(loop.carry) + len(loop.xs)]) if loop else set()
    layers = loop.layers if loop else {}
    for node in program.graph.nodes:
        body = body_of(node)
        if body is not None:
            inner = Loop(*node.args)
            names = {name: [x for row in rows for x in layers.get(row, [row])] for name, rows in inner.layers.items()}
            yield from _find_uses(body, index, inner._replace(layers={**layers, **names}))
        elif starts(node) == "gathered" and rows.isdisjoint(operand_of(node)):
            names_of, value = layers.get(bucket_of(node), [bucket_of(node)]), node.meta["val"]
            places = index[node], min(first[node], last[node]), last[node]
            yield GatheredUse(tuple(names_of), tuple(leaves_of(node)), value.dtype, *places, nbytes(value))
