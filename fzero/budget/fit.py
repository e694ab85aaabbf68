"""Fit: the fastest program of a step whose peak stays under a number of bytes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

from fzero.base.errors import FzeroError
from fzero.budget.choices import flatten, list_bucket_choices, list_segment_choices, weigh
from fzero.budget.frontier import Choice, Point, find_frontier
from fzero.budget.saved import Level, Segment, find_segments, number_nodes
from fzero.passes.run import Pass
from fzero.program.largest import list_largest
from fzero.program.listing import format_size
from fzero.program.operation import nbytes
from fzero.program.program import Program
from fzero.program.records import starts

TRIES = 4
"""How many programs are built, at most, to come near a budget: an estimate of the peak is a few percent off."""
LARGEST_ERROR = 0.1
"""Where an estimate is above a limit by more than this part of it, and fewer collectives may start ahead, no program is
built."""
NAMED = 5
"""How many of the largest values an error names."""
GIB = 1 << 30


class Budget(NamedTuple):
    """The most bytes that are alive at once, and the passes of a choice, by the keywords `keep` and `ahead` of
    `fzero.passes.defaults`."""

    limit: int
    passes: Callable[..., Sequence[Pass]]


class Rewrite(Protocol):
    """Makes the program of a numbered trace, which it may change. The buckets to `keep` stay gathered; `ahead` is the
    `memory` of `prefetch`."""

    def __call__(self, traced: Program, *, keep: Collection[str], ahead: int | None) -> Program: ...


def fit(traced: Program, limit: int, rewrite: Rewrite) -> Program:
    """The fastest program of a trace whose peak, arguments included, is at most `limit` bytes on every rank.

    It chooses from the program that keeps all saved values and gathers every bucket again: which buckets stay gathered,
    and which saved values are computed again. Seconds are those of `program.rates`. Where that does not suffice,
    collectives start less far ahead of their use, or not at all.

    Raises:
        FzeroError: where the least peak is above the limit, with the largest values that are alive there.
    """
    space = Space(traced, rewrite, None)
    program = space.find(limit)
    if program is not None:
        return program
    last = Space(traced, rewrite, 0)
    least = last.find(limit)
    if least is None:
        raise _refuse(last.least(), limit)
    further = (Space(traced, rewrite, ahead).find(limit) for ahead in space.list_ahead())
    return next((program for program in further if program is not None), least)


def _refuse(least: Program, limit: int) -> FzeroError:
    """The error of a limit below the least peak, which is that of the program `least`."""
    peak = least.memory().peak
    values = "; ".join(f"{format_size(value.nbytes)} of {value.what}" for value in list_largest(least, NAMED))
    problem = f"is {format_size(limit)}, and the least peak of {least.name} is {format_size(peak)}"
    way_out = f"give at least {peak} bytes, more ranks, or smaller batches; the largest values there: {values}"
    return FzeroError("memory", problem, way_out)


class _Picked(NamedTuple):
    """What a point says: the buckets to keep, and the level of each segment that computes values again."""

    keep: frozenset[str]
    again: tuple[tuple[Segment, Level], ...]


class Space:
    """The programs of a trace, by what is kept and what is computed again."""

    def __init__(self, traced: Program, rewrite: Rewrite, ahead: int | None) -> None:
        self.traced, self.rewrite, self.ahead = traced, rewrite, ahead
        base = rewrite(number_nodes(traced), keep=(), ahead=ahead)
        line, weights = list(flatten(base)), weigh(base)
        self.buckets = list(list_bucket_choices(base, line, weights))
        self.segments = list(list_segment_choices(find_segments(traced, base.rates), line, weights))
        self.choices: list[Choice] = [choice for choice, _ in (*self.buckets, *self.segments)]
        self.frontier = find_frontier([place.nbytes for place in line], self.choices)
        picks = [0] * len(self.buckets) + [len(choice.options) - 1 for choice, _ in self.segments]
        slower = sum(choice.options[0].seconds for choice, _ in self.buckets)
        self.base, self.start = base, Point(max(place.nbytes for place in line), slower, tuple(picks))
        self.gathered = {nbytes(place.node.meta["val"]) for place in line if starts(place.node) == "gathered"}

    def list_ahead(self) -> list[int]:
        """Limits below the default of what awaits its use: the largest buffer, and two and one of the next size."""
        largest, *others = sorted(self.gathered, reverse=True) or [0]
        return sorted({largest, *(size for other in others[:1] for size in (2 * other, other))}, reverse=True)

    def best(self, limit: int) -> Point | None:
        """The fastest point whose estimated peak is within a limit."""
        within = [point for point in self.frontier if point.peak <= limit]
        return min(within, key=lambda point: point.seconds) if within else None

    def pick(self, point: Point) -> _Picked:
        """What a point says."""
        count = len(self.buckets)
        keep = (names for (_, names), option in zip(self.buckets, point.picks) if option)
        again = [
            (segment, segment.levels[-1 - option])
            for (_, segment), option in zip(self.segments, point.picks[count:])
            if option < len(segment.levels)
        ]
        return _Picked(frozenset().union(*keep), tuple(again))

    def build(self, point: Point) -> Program:
        """The program of a point."""
        keep, again = self.pick(point)
        return self.rewrite(number_nodes(self.traced, again), keep=keep, ahead=self.ahead)

    def least(self) -> Program:
        """The program with the least peak. That is where the estimate is least, or the program that this began with."""
        return min((self.build(self.frontier[0]), self.base), key=lambda program: program.memory().peak)

    def find(self, limit: int) -> Program | None:
        """The fastest program within a limit among those that were built. How far the estimate of one is off says which
        one is built next."""
        least = self.frontier[0]
        if self.ahead != 0 and min(least.peak, self.start.peak) > (1 + LARGEST_ERROR) * limit:
            return None
        built, peaks, bound = {self.start: self.base}, {self.start: self.start.peak}, limit
        found: Point | None = None
        for _ in range(TRIES):
            point = self.best(bound) or least
            if point in built or (found and point.seconds >= found.seconds):
                break
            built[point] = self.build(point)
            peak = peaks[point] = built[point].memory().peak
            bound = limit - (peak - point.peak)
            if peak <= limit:
                found = point
            else:
                bound = min(bound, point.peak - 1)
        if found is None and least not in built:
            built[least] = self.build(least)
            peaks[least] = built[least].memory().peak
        within = [point for point, peak in peaks.items() if peak <= limit]
        if not within:
            return None
        best = min(within, key=lambda point: (point.seconds, point.peak))
        program = built[best]
        return replace(program, remarks=(*program.remarks, *self._explain(best, peaks[best], limit)))

    def _explain(self, point: Point, peak: int, limit: int) -> Iterator[str]:
        """Lines that say what was chosen, and what more bytes would buy."""
        keep, again = self.pick(point)
        yield f"memory: {format_size(peak)} of {format_size(limit)}"
        names, all_names = len(keep), sum(len(names) for _, names in self.buckets)
        if all_names:
            seconds = sum(choice.options[i].seconds for (choice, _), i in zip(self.buckets, point.picks))
            rest = f"gathering the others again costs {_format(seconds)}"
            yield f"  keeps {names} of {all_names} buckets gathered: {rest}"
        if self.segments:
            freed, seconds = (sum(column) for column in zip((0, 0.0), *(level[1:] for _, level in again)))
            where = f"{len(again)} of {len(self.segments)} segments"
            yield f"  computes saved values of {where} again: {format_size(int(freed))} less, {_format(seconds)} more"
        if self.ahead is not None:
            yield f"  collectives have {format_size(self.ahead)} to start ahead of their use"
        error = peak - point.peak
        more = self.best(limit + GIB - error)
        if more is not None and more.seconds < point.seconds:
            yield f"  1 GiB more would save {_format(point.seconds - more.seconds)}"
        elif point.seconds:
            yield "  1 GiB more would save nothing"


def _format(seconds: float) -> str:
    return f"{1000 * seconds:.2f} ms"
