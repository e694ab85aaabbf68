"""Choices: what a program could do otherwise, with the bytes that this keeps alive and the seconds that it saves."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction

from fzero.budget.frontier import Choice, Lifetime, Option
from fzero.budget.outline import GatheredUse, Line, Outline
from fzero.budget.saved import Segment
from fzero.program.program import Program
from fzero.program.records import comm_of, starts, turns_of
from fzero.values.regions import get_mark


def list_bucket_choices(outline: Outline) -> Iterator[tuple[Choice, frozenset[str]]]:
    """The buckets that a program gathers again, where it is faster to gather each once and keep it until its last use.

    A bucket that turns of a loop use is gathered in front of the loop then, where nothing hides that.
    """
    program, line, weights = outline.program, outline.line, outline.weights
    uses: dict[str, list[GatheredUse]] = {}
    for use in outline.uses:
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


def _close(names: set[str], uses: Mapping[str, Sequence[GatheredUse]]) -> set[str]:
    """These buckets, and all that loops gather in their place in other turns."""
    while more := {other for name in names for use in uses[name] for other in use.names} - names:
        names = names | more
    return names


def _describe_bucket(program: Program, uses: Sequence[GatheredUse], seconds: float) -> Choice:
    """The choice between gathering again, and keeping every leaf from the first to the last use of the bucket.

    What awaits its first use stays as it is: where a bucket is kept, another one is gathered early in its room.
    """
    held = {(name, leaf, use.dtype) for use in uses for name in use.names for leaf in use.leaves}
    nbytes = sum(program.layouts[name].leaves[leaf].numel * dtype.itemsize for name, leaf, dtype in held)
    start, stop = min(use.first for use in uses), max(use.stop for use in uses)
    kept = [Lifetime(start, stop + 1, nbytes)]
    kept += [Lifetime(use.first, use.stop + 1, -use.nbytes) for use in uses]
    options = Option(seconds, ()), Option(0.0, tuple(kept))
    return Choice(uses[0].names[0], options)


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


def list_segment_choices(segments: Sequence[Segment], outline: Outline) -> Iterator[tuple[Choice, Segment]]:
    """The segments of the trace, which may compute values again between their last and their first use."""
    line = outline.line
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
                outline.weights.compute * level.seconds + level.exposed,
                tuple(Lifetime(start, stop, -int(part * level.freed)) for start, stop, part in places),
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
