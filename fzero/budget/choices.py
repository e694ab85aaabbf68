"""Choices: what a program could do otherwise, with the bytes that this keeps alive and the seconds that it saves.

A program is seen as one line of nodes, in which the nodes of one turn stand in the place of a loop.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple

import torch

from fzero.budget.frontier import Choice, Option, Span
from fzero.budget.saved import Segment
from fzero.passes.order import find_origins
from fzero.program.comm import comm_of
from fzero.program.operation import Node, nbytes
from fzero.program.ops.loops import Loop
from fzero.program.program import Program
from fzero.program.records import body_of, starts, turns_of
from fzero.values.regions import get_mark

LEAST_WEIGHT = 0.05
"""What a second costs at least, also where it is hidden: rates are guesses, and a machine hides less than they say."""
SLOWER = 1.1
"""By how much a lane is slowed down to see what a second of it costs the step."""


class Weights(NamedTuple):
    """The seconds by which a step grows with a second of compute, and with a second of communication: 0 to 1."""

    compute: float
    wire: float


class Place(NamedTuple):
    """A node in the line, the bytes that are alive while it runs, and the loops around it, the outermost first."""

    node: Node
    nbytes: int
    loops: tuple[Node, ...] = ()


Line = Sequence[Place]


class Use(NamedTuple):
    """A buffer of gathered leaves in the line: from its start to its last use. `names` are the buckets that it holds,
    one for each turn."""

    names: tuple[str, ...]
    leaves: tuple[int, ...]
    dtype: torch.dtype
    start: int
    stop: int
    nbytes: int


def flatten(program: Program, top: int | None = None, loops: tuple[Node, ...] = ()) -> Iterator[Place]:
    """The line of a program within some loops. `top` is the peak of the line, by default that of the program."""
    memory = program.memory()
    more = 0 if top is None else top - memory.peak
    for node, alive in zip(program.graph.nodes, memory.during):
        body = body_of(node)
        if body is None:
            yield Place(node, alive + more, loops)
        else:
            yield from flatten(body, alive + more, (*loops, node))


def weigh(program: Program) -> Weights:
    """What a second of each lane costs a program, of which one is hidden behind the other."""
    rates, before = program.rates, program.timeline()
    slow = (
        rates._replace(flops=rates.flops / SLOWER, memory=rates.memory / SLOWER, launch=rates.launch * SLOWER),
        rates._replace(wire=rates.wire / SLOWER, latency=rates.latency * SLOWER),
    )
    busy = before.compute, sum(transfer.seconds for transfer in before.transfers)
    more = (program.timeline(each).seconds - before.seconds for each in slow)
    grown = (delta / (seconds * (SLOWER - 1)) if seconds else 0.0 for delta, seconds in zip(more, busy))
    return Weights(*(max(weight, LEAST_WEIGHT) for weight in grown))


def list_bucket_choices(program: Program, line: Line, weights: Weights) -> Iterator[tuple[Choice, frozenset[str]]]:
    """The buckets that a program gathers again, where it is faster to gather each once and keep it until its last use.

    A bucket that turns of a loop use is gathered in front of the loop then, where nothing hides that.
    """
    index = {place.node: i for i, place in enumerate(line)}
    uses: dict[str, list[Use]] = {}
    for use in find_uses(program, index):
        for name in use.names:
            uses.setdefault(name, []).append(use)
    gathers = _count_seconds(program, line)
    done = set[str]()
    for first in uses:
        if first in done:
            continue
        names = sorted(_close({first}, uses))  # sums of seconds round alike on all ranks
        done.update(names)
        own = list(dict.fromkeys(use for name in names for use in uses[name]))
        once, again = (sum(column) for column in zip(*(gathers[name] for name in names)))
        exposed = (1 - weights.wire) * once if any(line[use.start].loops for use in own) else 0.0
        seconds = weights.wire * again - exposed
        if seconds > 0:
            yield _describe_bucket(program, own, seconds), frozenset(names)


def _close(names: set[str], uses: Mapping[str, Sequence[Use]]) -> set[str]:
    """These buckets, and all that loops gather in their place in other turns."""
    while more := {other for name in names for use in uses[name] for other in use.names} - names:
        names = names | more
    return names


def _describe_bucket(program: Program, uses: Sequence[Use], seconds: float) -> Choice:
    """The choice between gathering again, and keeping every leaf from the first to the last use of the bucket."""
    held = {(name, leaf, use.dtype) for use in uses for name in use.names for leaf in use.leaves}
    nbytes = sum(program.layouts[name].leaves[leaf].numel * dtype.itemsize for name, leaf, dtype in held)
    start, stop = min(use.start for use in uses), max(use.stop for use in uses)
    kept = [Span(start, stop + 1, nbytes)]
    kept += [Span(use.start, use.stop + 1, -use.nbytes) for use in uses]
    options = Option(seconds, ()), Option(0.0, tuple(kept))
    return Choice(uses[0].names[0], options)


def find_uses(program: Program, index: Mapping[Node, int], loop: Loop | None = None) -> Iterator[Use]:
    """The gathered buffers of a program, which is the body of a loop or is not, and of its loops. Rows of what a loop
    goes through are left out: only leaves that all turns share, and the layer of each turn, can stay gathered."""
    origin = find_origins(program.graph, "gathered")
    last: dict[Node, int] = {}
    for node, start in origin.items():
        ends = [index[user] for user in node.users if user in index]
        last[start] = max([last.get(start, 0), index[node], *ends])
    rows = set(program.placeholders[: len(loop.carry) + len(loop.xs)]) if loop else set()
    layers = loop.layers if loop else {}
    for node in program.graph.nodes:
        body = body_of(node)
        if body is not None:
            inner = Loop(*node.args)
            names = {name: [x for row in rows for x in layers.get(row, [row])] for name, rows in inner.layers.items()}
            yield from find_uses(body, index, inner._replace(layers={**layers, **names}))
        elif starts(node) == "gathered" and rows.isdisjoint(node.args[0]):
            names_of, value = layers.get(node.args[1], [node.args[1]]), node.meta["val"]
            yield Use(tuple(names_of), tuple(node.args[2]), value.dtype, index[node], last[node], nbytes(value))


def _count_seconds(program: Program, line: Line) -> dict[str, tuple[float, float]]:
    """Bucket -> the seconds of the collectives that gather it: of the first of each, and of the others."""
    gathers = (place.node for place in line if starts(place.node) == "gathered")
    named = {comm.op for node in gathers for comm in comm_of(program, node)}
    counts = Counter(comm for comm in program.comm() if comm.op in named)
    seconds: dict[str, tuple[float, float]] = {}
    for comm, count in counts.items():
        each = program.rates.communicate(comm, program.mesh)
        once, again = seconds.get(comm.bucket or "", (0.0, 0.0))
        seconds[comm.bucket or ""] = once + each, again + (count - 1) * each
    return seconds


def list_segment_choices(segments: Sequence[Segment], line: Line, weights: Weights) -> Iterator[tuple[Choice, Segment]]:
    """The segments of the trace, which may compute values again between their last and their first use."""
    at: dict[int, int] = {}
    last: dict[int, int] = {}
    for i, place in enumerate(line):
        number = get_mark(place.node).number
        if number is not None:
            at.setdefault(number, i)
            last[number] = i
    for n, segment in enumerate(segments):
        ends = [at[number] for number in segment.members if number in at]
        begins = [last[number] for number in segment.users if number in last]
        if not ends or not begins or max(ends) + 1 >= min(begins):
            continue
        places = _find_spans(line, max(ends), min(begins))
        options = [
            Option(
                weights.compute * level.seconds + level.exposed,
                tuple(Span(start, stop, -int(part * level.freed)) for start, stop, part in places),
            )
            for level in reversed(segment.levels)
        ]
        yield Choice(f"segment {n}", (*options, Option(0.0, ()))), segment


def _find_spans(line: Line, made: int, used: int) -> list[tuple[int, int, Fraction]]:
    """`(start, stop, part)`: where which part of the values that are made at one place and used at another are alive.

    Values that each turn of a loop makes, and each turn of another loop uses, are alive between the loops. In the last
    turn that makes some, and in the first one that uses some, all but those of the turn are.
    """
    spans = [(made + 1, used, Fraction(1))]
    shared = set(line[made].loops) & set(line[used].loops)
    making, using = ([loop for loop in line[at].loops if loop not in shared] for at in (made, used))
    others = 1 - Fraction(1, math.prod(turns_of(loop) for loop in making))
    if making and using:
        first = next(i for i, place in enumerate(line) if making[0] in place.loops)
        last = next(i for i in range(len(line) - 1, -1, -1) if using[0] in line[i].loops)
        spans += [(first, made + 1, others), (used, last + 1, others)]
    return spans
