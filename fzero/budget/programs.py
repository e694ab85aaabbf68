"""Programs: those of a trace, by what a budget chooses. What several programs have in common is made once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from fzero.base.placement import Placement
from fzero.budget.saved import Again, number_nodes, set_levels
from fzero.passes.fuse import fuse
from fzero.passes.prefetch import prefetch
from fzero.passes.resolve import resolve
from fzero.passes.roll import has_turns, roll
from fzero.passes.run import Pass, name_of_pass, run_passes
from fzero.passes.verify import verify
from fzero.program.places import place_arguments
from fzero.program.program import Program

Choose = Callable[..., Sequence[Pass]]
"""The passes of a choice, by the keywords `keep` and `ahead` of `fzero.passes.defaults`."""


class Programs:
    """Makes the programs of a trace.

    Programs share what stands in front of the first pass that they differ in. Without loops all share the resolved
    trace. Programs that compute the same values again and keep the same buckets share what stands in front of `fuse`,
    because where state lies matters to `fuse` and the passes behind it. Those that have state in the same places also
    share what stands in front of `prefetch`, to which the room of collectives matters. Programs are not verified:
    `check` verifies the one that a step takes.
    """

    def __init__(self, choose: Choose, traced: Program) -> None:
        self._choose, self._numbered = choose, number_nodes(traced)
        self._shared: dict[tuple[object, ...], Program] = {}

    def __call__(
        self, again: Again, *, keep: Collection[str], ahead: int | None, places: Mapping[int, Placement | None]
    ) -> Program:
        """The program in which segments have the levels `again`. The buckets to `keep` stay gathered; `ahead` is the
        `memory` of `prefetch`; `places` says of some arguments, by position, where they lie."""
        passes = list(self._choose(keep=keep, ahead=ahead))
        names = [name_of_pass(each) for each in passes]
        first, second = names.index(name_of_pass(fuse)), names.index(name_of_pass(prefetch))
        kept, placed = frozenset(keep), tuple(places.items())
        early = self._share((again, kept), lambda: run_passes(self._resolve(again), passes[:first]))
        late = self._share(
            (again, kept, placed), lambda: run_passes(place_arguments(early, places), passes[first:second])
        )
        return run_passes(late, [each for each in passes[second:] if name_of_pass(each) != name_of_pass(verify)])

    def _resolve(self, again: Again) -> Program:
        """The trace with these levels, resolved. What a turn computes again is decided before turns become loops."""
        if has_turns(self._numbered):
            return resolve(roll(set_levels(self._numbered, again)))
        return set_levels(self._share((), lambda: resolve(self._numbered)), again)

    def _share(self, key: tuple[object, ...], make: Callable[[], Program]) -> Program:
        if key not in self._shared:
            self._shared[key] = make()
        return self._shared[key]

    def check(self, program: Program, keep: Collection[str]) -> Program:
        """The program, which keeps these buckets, verified."""
        return run_passes(program, self._choose(keep=keep, ahead=None)[-1:])
