"""Fit: the fastest program of a step whose peak stays under a number of bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from fzero.base.errors import FzeroError
from fzero.base.placement import Host, host
from fzero.base.sizes import format_size
from fzero.budget.choices import list_bucket_choices, list_segment_choices
from fzero.budget.costs import Costs, estimate_costs, measure_costs
from fzero.budget.frontier import Choice, Point, find_frontier, keep_fastest
from fzero.budget.movable import NOTHING, Movable
from fzero.budget.outline import Outline
from fzero.budget.placements import list_placement_choices
from fzero.budget.programs import Builder, verify_program
from fzero.budget.saved import Level, Segment, find_segments
from fzero.passes import list_passes
from fzero.passes.run import Pass
from fzero.program.largest import list_largest
from fzero.program.operation import nbytes
from fzero.program.plan import Plan
from fzero.program.program import Program
from fzero.program.records import starts

TRIES = 4
"""How many programs are built, at most, to come near a budget: an estimate of the peak is a few percent off."""
MOST_NODES = 4000
"""Programs of more nodes take seconds to build. Fewer are built of them, and more is estimated."""
COMPARED = 4
"""With how many smaller programs one that was found is compared: an estimate of the seconds is a few percent off."""
LARGEST_ERROR = 0.1
"""Where an estimate is above a limit by more than this part of it, and fewer collectives may start ahead, no program is
built."""
DEAR = 0.1
"""Where state elsewhere takes more than this part of a step, collectives may get less room in its place."""
NAMED = 5
"""How many of the largest values an error names."""
GIB = 1 << 30


class Budget(NamedTuple):
    """The most bytes that are alive at once, and a plan that says all that the budget does not choose. State and saved
    values may also lie in the placement of the plan."""

    limit: int
    plan: Plan


Rewrite = Plan | Budget | Sequence[Pass]
"""What becomes of a trace: what passes make of it, those of a plan, or those of the plan that a budget finds."""


def list_passes_of(rewrite: Rewrite) -> Sequence[Pass]:
    """The passes of a rewrite; of a budget those of its plan, which all of its programs have."""
    if isinstance(rewrite, Budget):
        rewrite = rewrite.plan
    return list_passes(rewrite) if isinstance(rewrite, Plan) else rewrite


def find_plan(traced: Program, budget: Budget) -> Found:
    """The fastest program of a trace whose peak, arguments included, is within a budget on every rank, and its plan.

    It chooses from the program that keeps all saved values, gathers every bucket again and has all state on the device:
    which buckets stay gathered, which saved values are computed again or, where `to` is the host, move there and back,
    and which state lies in `to`. Seconds are those of `program.rates`. Where that does not suffice, or where state in
    `to` takes much of the step, collectives start less far ahead of their use, or not at all.

    Raises:
        FzeroError: where the least peak is above the limit, with the largest values that are alive there.
    """
    plan, programs = replace(budget.plan, mesh=traced.mesh, rates=traced.measured), Builder(traced)
    resident = Space(traced, programs, plan, is_resident=plan.to is not None)
    found = resident.find(budget.limit) if plan.to and resident.is_fastest(budget.limit) else None
    if found is None:
        space = Space(traced, programs, plan, resident) if plan.to else resident
        found = find_fastest(space, budget.limit)
    return found._replace(program=verify_program(found.program))


def find_fastest(space: Space, limit: int) -> Found:
    """The fastest of the programs that were found in a space, in which collectives start as far ahead as they like, and
    in those of the same trace in which they have less room."""
    found = space.find(limit)
    if found is not None and not found.is_dear:
        return found
    last = Space(space.traced, space.programs, replace(space.plan, ahead=0), space)
    if found is not None and space.estimate(limit) <= last.estimate(limit):
        return found
    least = last.find(limit)
    if found is None and least is None:
        fits = space.plan.to is None and _would_fit(last, limit)
        raise _refuse(last.least(), limit, "; or give to=fzero.host() too, so that state may lie there" * fits)
    wider = (last.widen(limit, ahead) for ahead in space.list_ahead())
    return min(filter(None, (found, least, *wider)), key=lambda each: each.program.timeline().seconds)


def _would_fit(last: Space, limit: int) -> bool:
    """Whether some program of the last space would be within a limit if its state could lie on the host. Builds one
    only where the bytes of state make up for what is missing."""
    movable = Movable(last.traced, host())
    if last.frontier[0].peak - movable.count(movable.both) > (1 + LARGEST_ERROR) * limit:
        return False
    return Space(last.traced, last.programs, replace(last.plan, to=host())).find(limit) is not None


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


class Space:
    """The programs of a trace, by what is kept, what is computed again, and where state lies. `programs` makes a
    program of a plan; what is not chosen here is as in `plan`. With `is_resident` all state stays on the device. `like`
    is another space of the trace with the same `to`."""

    outline: Outline
    buckets: list[tuple[Choice, frozenset[str]]]
    segments: list[tuple[Choice, Segment]]

    def __init__(
        self,
        traced: Program,
        programs: Callable[[Plan], Program],
        plan: Plan,
        like: Space | None = None,
        is_resident: bool = False,
    ) -> None:
        self.traced, self.programs, self.plan = traced, programs if like else cache(programs), plan
        self.movable: Movable = like.movable if like else Movable(traced, plan.to)
        self._names: list[str] = like._names if like else [node.name for node in traced.graph.nodes]
        has_host = isinstance(plan.to, Host)
        self._parts: list[Segment] = like._parts if like else find_segments(traced, traced.rates, has_host)
        if like and like.plan == plan:
            self.outline, self.buckets, self.segments = like.outline, like.buckets, like.segments
        else:
            self.outline = Outline(self.programs(plan))
            self.buckets = list(list_bucket_choices(self.outline))
            self.segments = list(list_segment_choices(self._parts, self.outline))
        self.costs = self._find_costs(like) if self.movable.layers and not is_resident else None
        self.placements = (
            list(list_placement_choices(self.outline, self.movable, self.costs)) if self.costs is not None else []
        )
        self.choices: list[Choice] = [choice for choice, _ in (*self.buckets, *self.segments, *self.placements)]
        line = self.outline.line
        self.frontier = self._search([place.nbytes for place in line])
        picks = [0] * len(self.buckets)
        picks += [len(choice.options) - 1 for choice, _ in (*self.segments, *self.placements)]
        slower = sum(choice.options[0].seconds for choice, _ in self.buckets)
        self.start = Point(max(place.nbytes for place in line), slower, tuple(picks))
        self.gathered = {nbytes(place.node.meta["val"]) for place in line if starts(place.node) == "gathered"}

    def _find_costs(self, like: Space | None) -> Costs:
        """The costs of state elsewhere: those of a space like this, else estimated where programs take long to
        build."""
        if like and like.costs:
            return like.costs
        if not self.is_small:
            return estimate_costs(self.outline, self.movable)
        return measure_costs(self.outline, self.movable, lambda away: self.programs(replace(self.plan, away=away)))

    @property
    def is_small(self) -> bool:
        """Whether programs have so few nodes that some more of them are built."""
        return len(self.outline.program.graph.nodes) <= MOST_NODES

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

    def list_ahead(self) -> list[int]:
        """Limits below the default of what awaits its use: the largest buffer, and two and one of the next size."""
        largest, *others = sorted(self.gathered, reverse=True) or [0]
        return sorted({largest, *(size for other in others[:1] for size in (2 * other, other))}, reverse=True)

    def best(self, limit: int) -> Point | None:
        """The fastest point whose estimated peak is within a limit."""
        within = [point for point in self.frontier if point.peak <= limit]
        return min(within, key=lambda point: point.seconds) if within else None

    def is_fastest(self, limit: int) -> bool:
        """Whether no limit would allow an estimate of less time than this one."""
        return self.best(limit) == self.frontier[-1]

    def estimate(self, limit: int) -> float:
        """The estimated seconds of the fastest program within a limit; infinite where there is none."""
        point = self.best(limit)
        return self.outline.timeline.seconds - self.start.seconds + point.seconds if point else float("inf")

    def pick(self, point: Point) -> Plan:
        """What a point says."""
        keep = (names for (_, names), option in zip(self.buckets, point.picks) if option)
        away = (
            options[i]
            for (_, options), i in zip(self.placements, point.picks[len(self.choices) - len(self.placements) :])
        )
        levels = self._list_levels(point)
        again, on_host = (
            frozenset(self._names[i] for each in nodes for i in each)
            for nodes in ([level.lost for level in levels], [level.moved for level in levels])
        )
        return replace(self.plan, keep=NOTHING.union(*keep), again=again, on_host=on_host, away=NOTHING.union(*away))

    def _list_levels(self, point: Point) -> list[Level]:
        """The levels of the segments that compute values again or move them."""
        picks = zip(self.segments, point.picks[len(self.buckets) :])
        return [segment.levels[-1 - i] for (_, segment), i in picks if i < len(segment.levels)]

    def build(self, point: Point) -> Program:
        """The program of a point."""
        return self.programs(self.pick(point))

    def least(self) -> Program:
        """The program with the least peak. That is where the estimate is least, or the program that this began with."""
        both = self.build(self.frontier[0]), self.outline.program
        return min(both, key=lambda program: program.memory().peak)

    def find(self, limit: int) -> Found | None:
        """The fastest program within a limit among those that were built. How far the estimate of one is off says which
        one is built next. An estimate counts as many bytes that await their use as the base has, which is too many
        where nearly all buckets are kept: so the first program of a small step may be above the limit by as much."""
        least = self.frontier[0]
        if self.plan.ahead != 0 and min(least.peak, self.start.peak) > (1 + LARGEST_ERROR) * limit:
            return None
        ahead = self.plan.ahead
        awaiting = 2 * max(self.gathered, default=0) if ahead is None else ahead
        peaks, bound = {self.start: self.start.peak}, limit + self.is_small * awaiting
        found: Point | None = None
        for _ in range(TRIES):
            point = self.best(bound) or least
            if point in peaks or (found and point.seconds >= found.seconds):
                break
            peak = peaks[point] = self.build(point).memory().peak
            bound = limit - (peak - point.peak)
            if peak <= limit:
                found = point
            else:
                bound = min(bound, point.peak - 1)
        if found is None and least not in peaks:
            peaks[least] = self.build(least).memory().peak
        peaks |= {point: self.build(point).memory().peak for point in self._list_smaller(found) if point not in peaks}
        within = [point for point, peak in peaks.items() if peak <= limit]
        is_compared = self.is_small and ahead != 0
        seconds = {point: self.build(point).timeline().seconds for point in within if is_compared}
        best = min(within, key=lambda point: (seconds.get(point), point.seconds, point.peak), default=None)
        return self._tell(best, self.build(best), limit) if best else None

    def _list_smaller(self, found: Point | None) -> list[Point]:
        """Of the next smaller points, whose programs may be faster than the estimates say, those that have no more
        state elsewhere. None of large programs, in which one choice is a small part of the step, and none where
        collectives do not start ahead: there estimates are exact."""
        if found is None or found not in self.frontier or self.plan.ahead == 0 or not self.is_small:
            return []
        at, away = self.frontier.index(found), self.pick(found).away
        return [point for point in self.frontier[max(at - COMPARED, 0) : at] if self.pick(point).away <= away]

    def widen(self, limit: int, ahead: int) -> Found | None:
        """A program of this space in which collectives have more bytes, `ahead`, and in exchange more is computed or
        gathered again. None where the first ones that are built are not within the limit."""
        bound = limit - ahead
        for _ in range(TRIES if self.is_small else 1):
            point = self.best(bound)
            if point is None:
                break
            program = self.programs(replace(self.pick(point), ahead=ahead))
            peak = program.memory().peak
            if peak <= limit:
                return self._tell(point, program, limit)
            bound = min(bound, point.peak) - (peak - limit)
        return None

    def _tell(self, point: Point, program: Program, limit: int) -> Found:
        """The program of a point, with lines that say what was chosen."""
        remarks = (*program.remarks, *self._explain(point, program, limit))
        return Found(replace(program, remarks=remarks), self._count_elsewhere(point))

    def _explain(self, point: Point, program: Program, limit: int) -> Iterator[str]:
        """Lines that say what was chosen, and what more bytes would buy."""
        plan, peak = self.pick(point), program.memory().peak
        yield f"memory: {format_size(peak)} of {format_size(limit)}"
        names, all_names = len(plan.keep), sum(len(names) for _, names in self.buckets)
        if all_names:
            seconds = sum(choice.options[i].seconds for (choice, _), i in zip(self.buckets, point.picks))
            rest = f"gathering the others again costs {_format(seconds)}"
            yield f"  keeps {names} of {all_names} buckets gathered: {rest}"
        if self.segments:
            yield from _explain_segments(self._list_levels(point), [segment for _, segment in self.segments])
        if self.movable.nbytes:
            yield from self.movable.explain(plan.away, f"{_format(self._count_elsewhere(point))} more")
        error = peak - point.peak
        more = self.best(limit + GIB - error)
        if more is not None and more.seconds < point.seconds:
            yield f"  1 GiB more would save {_format(point.seconds - more.seconds)}"
        elif point.seconds:
            yield "  1 GiB more would save nothing"
        if program.plan and program.plan.ahead is not None:
            yield f"  collectives have {format_size(program.plan.ahead)} to start ahead of their use"

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
