"""Fit: the fastest program of a step whose peak stays under a number of bytes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

from fzero.base.errors import FzeroError
from fzero.base.placement import Host, Placement, host
from fzero.budget.choices import flatten, list_bucket_choices, list_segment_choices, weigh
from fzero.budget.frontier import Choice, Point, find_frontier, keep_fastest
from fzero.budget.placements import NOTHING, Costs, Movable, Positions, list_placement_choices, measure_costs
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
DEAR = 0.1
"""Where state elsewhere takes more than this part of a step, collectives may get less room in its place."""
NAMED = 5
"""How many of the largest values an error names."""
GIB = 1 << 30


class Budget(NamedTuple):
    """The most bytes that are alive at once, and the passes of a choice, by the keywords `keep` and `ahead` of
    `fzero.passes.defaults`. State and saved values may also lie in the placement `to`, unless that is None."""

    limit: int
    passes: Callable[..., Sequence[Pass]]
    to: Placement | None = None


class Rewrite(Protocol):
    """Makes the program of a numbered trace, which it may change. The buckets to `keep` stay gathered; `ahead` is the
    `memory` of `prefetch`; `places` says of some arguments, by position, where they lie."""

    def __call__(
        self, traced: Program, *, keep: Collection[str], ahead: int | None, places: Mapping[int, Placement | None]
    ) -> Program: ...


def fit(traced: Program, limit: int, rewrite: Rewrite, to: Placement | None = None) -> Program:
    """The fastest program of a trace whose peak, arguments included, is at most `limit` bytes on every rank.

    It chooses from the program that keeps all saved values, gathers every bucket again and has all state on the device:
    which buckets stay gathered, which saved values are computed again or, where `to` is the host, move there and back,
    and which state lies in `to`. Seconds are those of `program.rates`. Where that does not suffice, or where state in
    `to` takes much of the step, collectives start less far ahead of their use, or not at all.

    Raises:
        FzeroError: where the least peak is above the limit, with the largest values that are alive there.
    """
    space = Space(traced, rewrite, None, to)
    found = space.find(limit)
    if found is not None and not found.is_dear:
        return found.program
    if found is not None:
        return _find_cheaper(space, found, limit).program
    last = Space(traced, rewrite, 0, to, space.costs)
    least = last.find(limit)
    if least is None:
        fits = to is None and _would_fit(last, limit)
        raise _refuse(last.least(), limit, "; or give to=fzero.host() too, so that state may lie there" * fits)
    further = (Space(traced, rewrite, ahead, to, space.costs).find(limit) for ahead in space.list_ahead())
    return next(filter(None, further), least).program


def _find_cheaper(space: Space, found: Found, limit: int) -> Found:
    """The faster of a program that was found and one in which collectives have less room, and less state has to lie
    elsewhere. One is built only where the estimates say so."""
    rooms = (*space.list_ahead()[:1], 0)
    others = (Space(space.traced, space.rewrite, ahead, space.movable.to, space.costs) for ahead in rooms)
    rival = min((space, *others), key=lambda each: each.estimate(limit))
    other = None if rival is space else rival.find(limit)
    return min(found, other or found, key=lambda each: each.program.timeline().seconds)


def _would_fit(last: Space, limit: int) -> bool:
    """Whether some program of the last space would be within a limit if its state could lie on the host. Builds one
    only where the bytes of state make up for what is missing."""
    movable = Movable(last.traced, host())
    if last.frontier[0].peak - movable.count(movable.both) > (1 + LARGEST_ERROR) * limit:
        return False
    return Space(last.traced, last.rewrite, 0, host()).find(limit) is not None


def _refuse(least: Program, limit: int, other_way: str) -> FzeroError:
    """The error of a limit below the least peak, which is that of the program `least`."""
    peak = least.memory().peak
    values = "; ".join(f"{format_size(value.nbytes)} of {value.what}" for value in list_largest(least, NAMED))
    problem = f"is {format_size(limit)}, and the least peak of {least.name} is {format_size(peak)}"
    way_out = f"give at least {peak} bytes, more ranks, or smaller batches{other_way}"
    return FzeroError("memory", problem, f"{way_out}; the largest values there: {values}")


class Found(NamedTuple):
    """A program within a limit, and the estimate of the seconds that it takes because state lies elsewhere."""

    program: Program
    elsewhere: float

    @property
    def is_dear(self) -> bool:
        """Whether these seconds are much of the step."""
        return self.elsewhere > 0 and self.elsewhere > DEAR * self.program.timeline().seconds


class _Picked(NamedTuple):
    """What a point says: the buckets to keep, the level of each segment that computes values again, and the arguments
    that lie away from the device."""

    keep: frozenset[str]
    again: tuple[tuple[Segment, Level], ...]
    away: Positions = NOTHING


class Space:
    """The programs of a trace, by what is kept, what is computed again, and where state lies. `costs` are those of
    another space of the trace with the same `to`."""

    def __init__(
        self,
        traced: Program,
        rewrite: Rewrite,
        ahead: int | None,
        to: Placement | None = None,
        costs: Costs | None = None,
    ) -> None:
        self.traced, self.rewrite, self.ahead, self.movable = traced, rewrite, ahead, Movable(traced, to)
        base = self._write(_Picked(frozenset(), ()))
        line, weights = list(flatten(base)), weigh(base)
        self.buckets = list(list_bucket_choices(base, line, weights))
        segments = find_segments(traced, base.rates, has_host=isinstance(to, Host))
        self.segments = list(list_segment_choices(segments, line, weights))
        self.costs = costs or measure_costs(
            base, self.movable, lambda away: self._write(_Picked(frozenset(), (), away))
        )
        self.placements = list(list_placement_choices(base, line, self.movable, self.costs))
        self.choices: list[Choice] = [choice for choice, _ in (*self.buckets, *self.segments, *self.placements)]
        self.frontier = self._search([place.nbytes for place in line])
        picks = [0] * len(self.buckets)
        picks += [len(choice.options) - 1 for choice, _ in (*self.segments, *self.placements)]
        slower = sum(choice.options[0].seconds for choice, _ in self.buckets)
        self.base, self.start = base, Point(max(place.nbytes for place in line), slower, tuple(picks))
        self.gathered = {nbytes(place.node.meta["val"]) for place in line if starts(place.node) == "gathered"}

    def _search(self, line: list[int]) -> list[Point]:
        """The frontier. Greedy search is better at fewer choices, so those of programs with no state elsewhere, and
        with all of it, are looked at once more."""
        points, count = find_frontier(line, self.choices), len(self.choices) - len(self.placements)
        for is_away in (False, True) if self.placements else ():
            picks = tuple(0 if is_away else len(choice.options) - 1 for choice, _ in self.placements)
            fixed = [choice._replace(options=(choice.options[i],)) for (choice, _), i in zip(self.placements, picks)]
            found = find_frontier(line, [*self.choices[:count], *fixed])
            points += [point._replace(picks=point.picks[:count] + picks) for point in found]
        return keep_fastest(points)

    def _write(self, picked: _Picked) -> Program:
        """The program of these picks."""
        numbered, places = number_nodes(self.traced, picked.again), self.movable.places(picked.away)
        return self.rewrite(numbered, keep=picked.keep, ahead=self.ahead, places=places)

    def list_ahead(self) -> list[int]:
        """Limits below the default of what awaits its use: the largest buffer, and two and one of the next size."""
        largest, *others = sorted(self.gathered, reverse=True) or [0]
        return sorted({largest, *(size for other in others[:1] for size in (2 * other, other))}, reverse=True)

    def best(self, limit: int) -> Point | None:
        """The fastest point whose estimated peak is within a limit."""
        within = [point for point in self.frontier if point.peak <= limit]
        return min(within, key=lambda point: point.seconds) if within else None

    def estimate(self, limit: int) -> float:
        """The estimated seconds of the fastest program within a limit; infinite where there is none."""
        point = self.best(limit)
        return self.base.timeline().seconds - self.start.seconds + point.seconds if point else float("inf")

    def pick(self, point: Point) -> _Picked:
        """What a point says."""
        first, second = len(self.buckets), len(self.buckets) + len(self.segments)
        keep = (names for (_, names), option in zip(self.buckets, point.picks) if option)
        again = [
            (segment, segment.levels[-1 - option])
            for (_, segment), option in zip(self.segments, point.picks[first:])
            if option < len(segment.levels)
        ]
        away = (options[i] for (_, options), i in zip(self.placements, point.picks[second:]))
        return _Picked(frozenset().union(*keep), tuple(again), NOTHING.union(*away))

    def build(self, point: Point) -> Program:
        """The program of a point."""
        return self._write(self.pick(point))

    def least(self) -> Program:
        """The program with the least peak. That is where the estimate is least, or the program that this began with."""
        return min((self.build(self.frontier[0]), self.base), key=lambda program: program.memory().peak)

    def find(self, limit: int) -> Found | None:
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
        program = replace(program, remarks=(*program.remarks, *self._explain(best, peaks[best], limit)))
        return Found(program, self._count_elsewhere(best))

    def _explain(self, point: Point, peak: int, limit: int) -> Iterator[str]:
        """Lines that say what was chosen, and what more bytes would buy."""
        keep, again, away = self.pick(point)
        yield f"memory: {format_size(peak)} of {format_size(limit)}"
        names, all_names = len(keep), sum(len(names) for _, names in self.buckets)
        if all_names:
            seconds = sum(choice.options[i].seconds for (choice, _), i in zip(self.buckets, point.picks))
            rest = f"gathering the others again costs {_format(seconds)}"
            yield f"  keeps {names} of {all_names} buckets gathered: {rest}"
        if self.segments:
            yield from _explain_segments([level for _, level in again], [segment for _, segment in self.segments])
        if self.placements:
            yield from self.movable.explain(away, f"{_format(self._count_elsewhere(point))} more")
        if self.ahead is not None:
            yield f"  collectives have {format_size(self.ahead)} to start ahead of their use"
        error = peak - point.peak
        more = self.best(limit + GIB - error)
        if more is not None and more.seconds < point.seconds:
            yield f"  1 GiB more would save {_format(point.seconds - more.seconds)}"
        elif point.seconds:
            yield "  1 GiB more would save nothing"

    def _count_elsewhere(self, point: Point) -> float:
        """The seconds that a point takes because state lies elsewhere."""
        chosen = point.picks[len(point.picks) - len(self.placements) :]
        return sum(choice.options[i].seconds for (choice, _), i in zip(self.placements, chosen))


def _explain_segments(levels: Sequence[Level], segments: Sequence[Segment]) -> Iterator[str]:
    """Lines that say what becomes of saved values at these levels."""
    freed, seconds = sum(level.nbytes for level in levels), sum(level.seconds for level in levels)
    count = sum(bool(segment.saved) for segment in segments)
    where = f"{sum(bool(level.lost) for level in levels)} of {count} segments"
    yield f"  computes saved values of {where} again: {format_size(freed)} less, {_format(seconds)} more"
    if any(level.moved for level in levels):
        freed, seconds = sum(level.away for level in levels), sum(level.exposed for level in levels)
        yield f"  has {format_size(freed)} of saved values on the host, {_format(seconds)} more"


def _format(seconds: float) -> str:
    return f"{1000 * seconds:.2f} ms"
