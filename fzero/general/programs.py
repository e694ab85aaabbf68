"""General programs: `trace_general` makes one, `check_general` compares it, `Generals` has those of a step."""

from __future__ import annotations

import functools
import operator
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

from fzero.base.errors import FzeroError
from fzero.base.formulas import LEAST, Conditions
from fzero.base.symbols import Symbols
from fzero.base.user_line import current_user_line
from fzero.budget.fit import Budget, Rewrite, find_plan, list_passes_of
from fzero.budget.programs import follow_plan
from fzero.general.sizes import Place, Sizes, find_changes, find_size, is_number, list_read, open_form
from fzero.passes.run import Pass, name_of_pass, run_passes
from fzero.program import ops
from fzero.program.open import Open, Template, fill_reference, find_difference, make_template
from fzero.program.program import Program
from fzero.program.readings import Found, flatten
from fzero.tracing.signatures import Signature, is_batch, sign_read
from fzero.tracing.trace import OpenForm
from fzero.tracing.watches import Watch

MORE, FEWER = 16, 4
"""One schedule serves programs of up to so many times more elements, and of so many times fewer. Collectives start too
late for the compute of much smaller ones: an eighth of the elements takes 5 % more time by the rates, a fourth 1 %."""
DRAWS = 1000
"""How many sizes are tried, where no simple ones fulfil the conditions of a trace."""
FEWER_IN_PLAN = 2
"""The same of what a budget chose: much smaller programs would keep more."""
BY_SIZES = "relieve"
"""The first of the default passes that looks at bytes or costs, which depend on sizes."""
Trace = Callable[[Symbols | None, Mapping[int, OpenForm]], Program]
"""From symbols, and shapes and strides with open sizes by the positions of leaves, to an open program. Without symbols
to the program of other sizes."""
Finish = Callable[[Template], Callable[[Sequence[int]], Any]]
"""From a template to a function of sizes: what `fzero.pipeline.Pipeline` makes of the program of these."""


class OpenTrace:
    """A trace with open sizes and what is made of it: templates. `late` passes, or a budget, depend on sizes."""

    def __init__(self, trace: Trace, symbols: Symbols, forms: Mapping[int, OpenForm], rewrite: Rewrite):
        self.symbols, self.late = symbols, rewrite
        early: Sequence[Pass] = ()
        if not isinstance(rewrite, Budget):
            passes = list_passes_of(rewrite)
            at = list(map(name_of_pass, passes)).index(BY_SIZES)
            early, self.late = passes[:at], passes[at:]
        with raw_numbers():
            self.traced = trace(symbols, forms)
            self.early = run_passes(self.traced, early)

    def fill_trace(self, sizes: Sequence[int]) -> Program:
        """The trace with these sizes, before any pass."""
        with raw_numbers():
            return fill_reference(schedule_by(self.traced, Open(self.symbols, tuple(sizes))))

    def __call__(self, sizes: Sequence[int], known: Program | None = None) -> Template:
        """The template that is scheduled for these sizes: with a budget by the plan of a program of these sizes, if one
        is known, else by one that is searched."""
        early = schedule_by(self.early, Open(self.symbols, tuple(sizes)))
        with raw_numbers():
            if isinstance(self.late, Budget):
                found = known or find_plan(fill_reference(early), self.late).program
                assert found.plan is not None
                return make_template(replace(follow_plan(early, found.plan), remarks=found.remarks))
            return make_template(run_passes(early, list_passes_of(self.late)))


@contextmanager
def raw_numbers() -> Iterator[None]:
    """A block in which fx may have open numbers as arguments of nodes, without a warning."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Raw Sym(Int|Float) value")
        yield


class _Scheduled(NamedTuple):
    """A template, what `Finish` makes of it, and numbers of sizes whose peak is within the limit, and above it."""

    template: Template
    finish: Callable[[Sequence[int]], Any]
    within: list[Sequence[int]]
    above: list[Sequence[int]]

    def is_within(self, limit: int, sizes: Sequence[int]) -> bool:
        """Whether the peak of these sizes is within a limit. Where no number of a program, a shape or bytes, is greater
        than at other sizes, its peak is not either: memory is worked out only where known sizes do not tell."""
        numbers = [x for x in self.template.evaluate(sizes) if type(x) is int]
        if any(all(map(operator.le, numbers, known)) for known in self.within):
            return True
        if any(all(map(operator.ge, numbers, known)) for known in self.above):
            return False
        found = self.within if self.template.fill(sizes).memory().peak <= limit else self.above
        found.append(numbers)
        return found is self.within


class General:
    """A program with open `sizes`, which fulfil `conditions`: a function, because passes may ask for more.

    Programs whose numbers of elements are alike, by the factors `MORE` and `FEWER`, have one schedule and one template.
    What a budget of `limit` bytes chose for some sizes serves others whose peak is within the limit. Where no template
    serves, `schedule` makes one. Without a schedule the program fits those sizes alone that a template serves.
    """

    def __init__(
        self,
        sizes: Sizes,
        conditions: Callable[[], Conditions],
        finish: Finish,
        limit: int | None,
        schedule: OpenTrace | None = None,
        templates: Sequence[Template] = (),
    ) -> None:
        self.sizes, self.conditions, self.watches, self._finish = sizes, conditions, list[Watch](), finish
        self._limit, self.schedule = limit, schedule
        self._templates = [_Scheduled(template, finish(template), [], []) for template in templates]
        self._keep: Callable[[Template], None] = lambda template: None

    @property
    def program(self) -> Program:
        """A program of the step: what it depends on is that of all sizes."""
        return self.schedule.early if self.schedule else self._templates[0].template.program

    def lines(self) -> list[str]:
        """What ranks compare before they use a program of a file."""
        shapes = [str(x[:1] + x[3:4]) for x in self.sizes.signature[2] if is_batch(x)]
        conditions, references = self.conditions(), [str(x.template.reference) for x in self._templates]
        return [str(self.sizes.places), *shapes, *references, *(row.formula for row in conditions.rows)]

    def keep(self, keep: Callable[[Template], None]) -> None:
        """Call `keep` with each template, those to come too."""
        for scheduled in self._templates:
            keep(scheduled.template)
        self._keep = keep

    def read(self, signature: Signature, leaves: Sequence[Any]) -> Found | None:
        """What the program's readings find in the batch of a call with these leaves; None where the call differs in
        anything but sizes, and where a reading raises."""
        settings, treedef, own = signature
        found = Found()
        for reading in self.program.readings:
            count = len(leaves) + len(flatten(found))
            described = [*own, *map(sign_read, flatten(found)), *self.sizes.signature[2][count:]]
            sizes = self.sizes.find((settings, treedef, described), count, least=0)
            if isinstance(sizes, str):
                return None
            try:
                found.append(reading.read([*leaves, *flatten(found)], sizes))
            except Exception:  # the step may raise, too
                return None
        return found

    def find_sizes(self, signature: Signature, least: int = LEAST) -> list[int] | str:
        """The open sizes of a call. Where the program does not fit the call, and where one is below `least`, the
        reason. Of sizes below `LEAST` a trace of their own has to show that they have the same program."""
        sizes = self.sizes.find(signature, least=least)
        if isinstance(sizes, str):
            return sizes
        broken = self.conditions().find_broken(sizes, least)
        if broken is None and self.schedule is None and not any(self._serves(x, sizes) for x in self._templates):
            return f"its file has no schedule for sizes of {sizes}"
        return broken or sizes

    def fits(self, signature: Signature) -> bool:
        """Whether the program is one for a signature."""
        return not isinstance(self.find_sizes(signature), str)

    def fill(self, sizes: Sequence[int]) -> Program:
        """The program of these sizes."""
        return self._find_template(sizes).template.fill(sizes)

    def fill_like(self, sizes: Sequence[int], known: Program) -> Program:
        """The program of these sizes by the schedule of a `known` one, which was traced at these sizes alone. A budget
        is not searched again."""
        assert self.schedule is not None
        return self._add(self.schedule(sizes, known)).template.fill(sizes)

    def find_difference(self, sizes: Sequence[int], traced: Program) -> str | None:
        """The first difference of the trace with these sizes from another trace."""
        assert self.schedule is not None
        return find_difference(self.schedule.fill_trace(sizes), traced)

    def find_finish(self, sizes: Sequence[int]) -> tuple[Callable[[Sequence[int]], Any], bool]:
        """What `Finish` makes of the template that is scheduled for these sizes; and whether the template is new."""
        count = len(self._templates)
        finish = self._find_template(sizes).finish
        return finish, len(self._templates) > count

    def finish(self, sizes: Sequence[int]) -> Any:
        """What `Finish` makes of the program of these sizes."""
        return self._find_template(sizes).finish(sizes)

    def _find_template(self, sizes: Sequence[int]) -> _Scheduled:
        for scheduled in self._templates:
            if self._serves(scheduled, sizes):
                return scheduled
        assert self.schedule is not None
        return self._add(self.schedule(sizes))

    def _add(self, template: Template) -> _Scheduled:
        self._templates.insert(0, _Scheduled(template, self._finish(template), [], []))
        self._keep(template)
        return self._templates[0]

    def _serves(self, scheduled: _Scheduled, sizes: Sequence[int]) -> bool:
        """Whether a template that was scheduled for other sizes is one for these, too."""
        reference = scheduled.template.reference
        if tuple(sizes) == reference:
            return True
        count, known = self.sizes.count(sizes), self.sizes.count(reference)
        fewer = FEWER if self._limit is None else FEWER_IN_PLAN
        if not (known <= fewer * count and count <= MORE * known):
            return False
        return self._limit is None or scheduled.is_within(self._limit, sizes)


def trace_general(
    trace: Trace, rewrite: Rewrite, finish: Finish, signature: Signature, known: Sequence[Signature]
) -> General:
    """A program with open sizes: those in which a signature differs from `known` ones. `rewrite` says what becomes of
    what `trace` returns.

    Raises:
        FzeroError: where there is no such program.
    """
    found = dict[Any, list[Place]]()
    changed = (place for each in known for place in find_changes(each, signature) or ())
    read = (place for place in list_read(signature) if find_size(signature, place) >= LEAST)
    for place in dict.fromkeys((*changed, *read)):
        sizes = tuple(find_size(each, place) for each in (signature, *known))
        found.setdefault(place if is_number(signature, place) else sizes, []).append(place)
    return make_general(trace, rewrite, finish, Sizes(signature, tuple(map(tuple, found.values()))))


def open_general(trace: Trace, rewrite: Rewrite, finish: Finish, sizes: Sizes) -> General:
    """A program with open `sizes`, which a trace near its own confirms.

    Raises:
        FzeroError: where there is no such program.
    """
    general = make_general(trace, rewrite, finish, sizes)
    _confirm(general, (), _trace_others(trace, sizes))
    return general


def open_common(
    trace: Trace, rewrite: Rewrite, finish: Finish, sizes: Sizes, others: Sequence[Sequence[int]]
) -> tuple[General, General]:
    """A program with open `sizes` for ranks that have other ones at the same time, such as `others`; and that of ranks
    which have the same, which a trace at one of `others` confirms: the same program where means over ranks stand at the
    same places.

    Raises:
        FzeroError: where there is no such program.
    """
    general, trace_at = make_general(trace, rewrite, finish, sizes, differ=True), _trace_others(trace, sizes)
    try:
        _confirm(general, others, trace_at)
    except FzeroError:
        like = make_general(trace, rewrite, finish, sizes)
        _confirm(like, others, trace_at)
        return general, like
    return general, general


def _trace_others(trace: Trace, sizes: Sizes) -> Callable[[tuple[int, ...]], Program]:
    """Traces at other sizes, each made once."""
    return functools.cache(lambda other: trace(None, _open_forms(sizes, other)))


def _confirm(general: General, others: Sequence[Sequence[int]], trace_at: Callable[[tuple[int, ...]], Program]) -> None:
    """Hold a general program against a trace at one of `others`, or near its own sizes.

    Raises:
        FzeroError: where they differ, and where it fits none.
    """
    assert general.schedule is not None
    own = tuple(general.schedule.symbols.examples)
    general.fill(own)  # which may ask for more conditions
    conditions = general.conditions()
    tried = [tuple(x) for x in (*others, *_list_others(own)) if tuple(x) != own and min(x) >= LEAST]
    other = next((x for x in tried if conditions.find_broken(x) is None), None) or _draw_other(own, conditions)
    if other is None:
        broken = conditions.find_broken(tried[0])
        raise FzeroError(
            "the step", f"has conditions that no size near {list(own)} fulfils: {broken}", "each is traced"
        )
    traced = trace_at(other)
    difference = general.find_difference(other, traced)
    if difference is not None:
        raise FzeroError(traced.name, f"has another program at sizes of {list(other)}: {difference}", "each is traced")


def _list_others(own: Sequence[int]) -> Iterator[list[int]]:
    """Other sizes, near to these first."""
    for step in (1, 2, 3, 4, 6, 8, 16, 32, 64, 128):
        yield [size + step for size in own]
        yield [size - step for size in own]
    for factor in (2, 3):
        yield [size * factor for size in own]


def _draw_other(own: Sequence[int], conditions: Conditions) -> tuple[int, ...] | None:
    """Sizes that fulfil conditions, the same on all ranks: of those that are drawn, the ones that differ in most from
    these. Some grow and others shrink, as sizes of parts do whose sum is given. None where none are found."""
    draws, found, most = random.Random(0), None, 0
    for number in range(DRAWS):
        width = 1 + number % 6
        other = tuple(size + draws.choice((0, *range(-width, width + 1))) for size in own)
        changed = sum(map(operator.ne, own, other))
        if changed > most and conditions.find_broken(other) is None:
            found, most = other, changed
    return found


def _open_forms(sizes: Sizes, values: Sequence[Any]) -> dict[int, OpenForm]:
    """Position of a leaf -> its shape and strides with these values, open or not, for the sizes."""
    places = {place: value for places, value in zip(sizes.places, values) for place in places}
    return {i: open_form(sizes.signature[2][i], places, i) for i in dict.fromkeys(i for i, _ in places)}


def make_general(trace: Trace, rewrite: Rewrite, finish: Finish, sizes: Sizes, differ: bool = False) -> General:
    """A program with open `sizes`, which nothing confirms. `differ` says that ranks may have other sizes at the same
    time."""
    symbols, forms = make_symbols(sizes, differ)
    schedule = OpenTrace(trace, symbols, forms, rewrite)
    return General(sizes, lambda: symbols.conditions, finish, find_limit(rewrite), schedule)


def make_symbols(sizes: Sizes, differ: bool) -> tuple[Symbols, dict[int, OpenForm]]:
    """Symbols of open sizes, and the shapes and strides that have these."""
    symbols = Symbols(current_user_line, differ=differ)
    opened = [symbols.open(find_size(sizes.signature, places[0])) for places in sizes.places]
    return symbols, _open_forms(sizes, opened)


def find_limit(rewrite: Rewrite) -> int | None:
    """The bytes of a budget; None without one."""
    return rewrite.limit if isinstance(rewrite, Budget) else None


def schedule_by(program: Program, opened: Open) -> Program:
    """A program with open sizes, and the bodies of its loops, with these sizes for its schedule."""
    return replace(ops.map_bodies(program, lambda body: schedule_by(body, opened)), open=opened)


def check_general(general: General, known: Sequence[tuple[Signature, Program]]) -> None:
    """Compare a general program with programs that were traced at other signatures, as far as it fits these.

    Raises:
        FzeroError: where they differ, and where it fits none.
    """
    problem = "no shape that was traced"
    for signature, program in known:
        sizes = general.find_sizes(signature)
        if isinstance(sizes, str):
            problem = sizes
            continue
        difference = find_difference(general.fill_like(sizes, program), program)
        if difference is not None:
            raise FzeroError(program.name, f"has another program at another shape: {difference}", "each is traced")
        return
    raise FzeroError("the step", f"has another program at another shape: {problem}", "each is traced")
