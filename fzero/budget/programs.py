"""Programs: those of a trace, by what a budget chooses. What several programs have in common is made once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from fzero.base.placement import Placement
from fzero.passes.fuse import fuse
from fzero.passes.prefetch import prefetch
from fzero.passes.resolve import resolve
from fzero.passes.roll import roll
from fzero.passes.run import Pass, name_of_pass, run_passes
from fzero.passes.verify import verify
from fzero.program.places import place_arguments
from fzero.program.program import Program

Choose = Callable[..., Sequence[Pass]]
"""The passes of a choice, by the keywords `keep` and `ahead` of `fzero.passes.defaults`."""


class Programs:
    """Makes the programs of numbered traces.

    Where state lies matters to `fuse` and the passes behind it, and the room of collectives to `prefetch` and the
    passes behind it. So programs of a trace that keep the same buckets share what stands in front of `fuse`, and those
    that have state in the same places also what stands in front of `prefetch`. Programs are not verified: `check`
    verifies the one that a step takes.
    """

    def __init__(self, choose: Choose) -> None:
        self._choose = choose
        self._traces: list[Program] = []  # alive, so that no other trace has the id of one
        self._shared: dict[tuple[object, ...], Program] = {}

    def __call__(
        self, traced: Program, *, keep: Collection[str], ahead: int | None, places: Mapping[int, Placement | None]
    ) -> Program:
        """The program of a numbered trace, which belongs to this object from then on. The buckets to `keep` stay
        gathered; `ahead` is the `memory` of `prefetch`; `places` says of some arguments, by position, where they
        lie."""
        if all(traced is not each for each in self._traces):
            self._traces.append(traced)
        passes = list(self._choose(keep=keep, ahead=ahead))
        names = [name_of_pass(each) for each in passes]
        first, second = names.index(name_of_pass(fuse)), names.index(name_of_pass(prefetch))
        number, kept = id(traced), frozenset(keep)
        resolved = self._share((number,), lambda: resolve(roll(traced)))
        early = self._share((number, kept), lambda: run_passes(resolved, passes[:first]))
        late = self._share(
            (number, kept, tuple(places.items())),
            lambda: run_passes(place_arguments(early, places), passes[first:second]),
        )
        return run_passes(late, [each for each in passes[second:] if name_of_pass(each) != name_of_pass(verify)])

    def _share(self, key: tuple[object, ...], make: Callable[[], Program]) -> Program:
        if key not in self._shared:
            self._shared[key] = make()
        return self._shared[key]

    def check(self, program: Program, keep: Collection[str]) -> Program:
        """The program, which keeps these buckets, verified."""
        return run_passes(program, self._choose(keep=keep, ahead=None)[-1:])
