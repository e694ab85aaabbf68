"""Programs: those of a trace, by a plan. What several programs have in common is made once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any

from fzero.base.progress import Progress
from fzero.budget.saved import list_saved_values
from fzero.passes import list_passes
from fzero.passes.fuse import fuse
from fzero.passes.prefetch import prefetch
from fzero.passes.resolve import resolve
from fzero.passes.roll import has_turns, roll
from fzero.passes.run import name_of_pass, run_passes
from fzero.program.plan import Plan, check_names
from fzero.program.program import Program
from fzero.values.regions import Region, get_mark, set_mark


def follow_plan(traced: Program, plan: Plan) -> Program:
    """The program of a trace by a plan.

    Raises:
        FzeroError: for a name of the plan that the step does not have; as the passes do.
    """
    return verify_program(Builder(traced)(plan))


def verify_program(program: Program) -> Program:
    """A program of `Builder`, verified."""
    assert program.plan is not None
    return run_passes(program, list_passes(program.plan)[-1:])


def mark_trace(traced: Program, plan: Plan) -> Program:
    """A trace with marks of what a plan computes again and has on the host; the trace itself where that is nothing.

    Raises:
        FzeroError: for a value that the trace does not have, or that it cannot compute again.
    """
    if not plan.again and not plan.on_host:
        return traced
    builder = Builder(traced)
    return builder.mark(builder.numbered, plan)


class Builder:
    """Makes the programs of a trace, by plans.

    Programs share what stands in front of the first pass that they differ in. Without loops all share the resolved
    trace. Programs that compute the same values again and keep the same buckets share what stands in front of `place`,
    because where state lies matters to the passes behind it. Those that have state in the same places also share what
    stands in front of `prefetch`, to which the room of collectives matters. Programs are not verified:
    `verify_program` verifies the one that a step takes.

    `numbered` is a copy of the trace whose nodes know their numbers, and so do the nodes that are made of them.
    """

    def __init__(self, traced: Program) -> None:
        self.numbered, self._names = traced.copy(), [node.name for node in traced.graph.nodes]
        for number, node in enumerate(self.numbered.graph.nodes):
            set_mark(node.meta, get_mark(node)._replace(number=number))
        self._shared: dict[tuple[object, ...], Program] = {}
        self._progress = Progress("searching", traced.name, "programs")

    def __call__(self, plan: Plan) -> Program:
        """The program of a plan."""
        passes = list_passes(plan)
        names = [name_of_pass(each) for each in passes]
        first = names.index(name_of_pass(fuse)) - (plan.to is not None)  # in front of `place`
        second = names.index(name_of_pass(prefetch))
        key = plan.again, plan.on_host, plan.keep
        early = self._share(key, lambda: run_passes(self._resolve(plan), passes[:first]))
        late = self._share((*key, plan.to, plan.away), lambda: run_passes(early, passes[first:second]))
        made = replace(run_passes(late, passes[second:-1]), plan=plan)
        self._progress.count()
        return made

    def _resolve(self, plan: Plan) -> Program:
        """The marked trace, resolved. What a turn computes again is decided before turns become loops."""
        if has_turns(self.numbered):
            return resolve(roll(self.mark(self.numbered, plan)))
        return self.mark(self._share((), lambda: resolve(self.numbered)), plan)

    def _share(self, key: tuple[object, ...], make: Callable[[], Program]) -> Program:
        if key not in self._shared:
            self._shared[key] = make()
        return self._shared[key]

    @cached_property
    def _saved(self) -> list[tuple[tuple[int, ...], frozenset[int]]]:
        return list_saved_values(self.numbered)

    def mark(self, program: Program, plan: Plan) -> Program:
        """A copy of `numbered`, or of what was made of it, with the regions of a plan."""
        regions, marked = self._find_regions(plan), program.copy()
        for node in marked.graph.nodes:
            mark = get_mark(node)
            if mark.number in regions:
                local = (region for region in mark.regions if region.is_local)
                set_mark(node.meta, mark._replace(regions=(*local, regions[mark.number])))
        return replace(marked, is_spare=True)

    def _find_regions(self, plan: Plan) -> dict[int | None, Region]:
        """Node -> its region. Those of a segment that computes values again have one region together."""
        known = (self._names[i] for _, saved in self._saved for i in saved) if plan.again else ()
        check_names("again", plan.again, known, "the values that the step can compute again")
        computed = (name for name, node in zip(self._names, self.numbered.graph.nodes) if node.op == "call_function")
        check_names("on_host", plan.on_host, computed, "the values of the step")
        again, moved = (
            frozenset(i for i, name in enumerate(self._names) if name in names) for names in (plan.again, plan.on_host)
        )
        regions: dict[int | None, Region] = {}
        regions |= dict.fromkeys(moved, Region(_keep_nothing, in_backward=False, moved=moved))
        for members, saved in self._saved if again else ():
            if again & saved:
                region = Region(_keep_nothing, in_backward=False, kept=saved - again, moved=moved)
                regions |= dict.fromkeys(members, region)
        return regions


def _keep_nothing(context: Any, operation: Any, *args: Any, **kwargs: Any) -> bool:
    """The policy of a region that keeps or moves the nodes that it names, and nothing else."""
    return False
