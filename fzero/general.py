"""General programs: one trace for all sizes of a batch.

A step that is called with a second shape is traced with open sizes (`fzero.base.symbols`). Further shapes that fulfil
the conditions of that trace need no trace of their own: numbers take the place of open sizes, and code that was
generated once takes them. The conditions are those of forward, backward and update, and those of the passes.

A general program is used only where it equals, node by node, a program that was traced at another shape.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch

from fzero.base.errors import FzeroError
from fzero.base.symbols import LEAST, Symbols
from fzero.budget.fit import Budget, find_plan, follow_plan
from fzero.passes.run import Pass, is_foreign, name_of_pass, run_passes
from fzero.program import ops
from fzero.program.open import Open, Template, fill_reference, find_difference
from fzero.program.program import Program
from fzero.tracing.signatures import Signature
from fzero.tracing.trace import OpenForm
from fzero.tracing.user_line import current_user_line
from fzero.tracing.watches import Watch

MAX_GENERALS = 3
"""How often a step is traced with open sizes at most."""
MORE, FEWER = 16, 4
"""One schedule serves programs of up to so many times more elements, and of so many times fewer. Collectives start too
late for the compute of much smaller ones: an eighth of the elements takes 5 % more time by the rates, a fourth 1 %."""
FEWER_IN_PLAN = 2
"""The same of what a budget chose: much smaller programs would keep more."""
_log = logging.getLogger("fzero")
_BY_SIZES = "relieve"
"""The first of the default passes that looks at bytes or costs, which depend on sizes."""
Trace = Callable[[Symbols, Mapping[int, OpenForm]], Program]
"""From symbols, and shapes and strides with open sizes by the positions of leaves, to an open program."""
Finish = Callable[[Template], Callable[[Sequence[int]], Any]]
"""From a template to a function of sizes: what `fzero.pipeline.Pipeline` makes of the program of these."""
Place = tuple[int, int]
"""A dimension: the position of a leaf among the arguments, and of the dimension in its shape. Behind the dimensions of
its shape come those of its strides."""


def find_changes(known: Signature, new: Signature) -> dict[Place, tuple[int, int]] | None:
    """The dimensions of batches in which two signatures differ -> both sizes. None where anything else differs, and
    where a size is below `LEAST`. Strides that follow from sizes do not count. Where rows lie in longer ones, as in
    `tokens[:, :-1]`, the stride from row to row does."""
    if known[:2] != new[:2]:
        return None
    found: dict[Place, tuple[int, int]] = {}
    for i, (a, b) in enumerate(zip(known[2], new[2])):
        if a == b:
            continue
        if not (_is_batch(a) and _is_batch(b)) or a[1:3] != b[1:3] or a[4:] != b[4:] or len(a[0]) != len(b[0]):
            return None
        own, own_of_new = _list_own_strides(a), _list_own_strides(b)
        if own != own_of_new:
            return None
        dims = [*range(len(a[0])), *(len(a[0]) + dim for dim in own)]
        pairs = (((i, dim), ((*a[0], *a[3])[dim], (*b[0], *b[3])[dim])) for dim in dims)
        found |= {place: pair for place, pair in pairs if pair[0] != pair[1]}
    return found if min(map(min, found.values()), default=LEAST) >= LEAST else None


def _is_batch(described: Any) -> bool:
    """Whether this is the description of a tensor."""
    return isinstance(described, tuple) and isinstance(described[0], torch.Size)


def _list_own_strides(described: Any) -> list[int]:
    """The dimensions whose strides do not follow from the sizes and strides behind them."""
    shape, stride = described[0], described[3]
    return [dim for dim in range(len(shape)) if stride[dim] != _follow_stride(shape, stride, dim)]


def _follow_stride(shape: Sequence[Any], stride: Sequence[Any], dim: int) -> Any:
    """The stride of a dimension of which one step passes all that the next dimension has."""
    return 1 if dim == len(shape) - 1 else shape[dim + 1] * stride[dim + 1]


class General:
    """A program with open sizes: those in which a signature differs from `known` ones. Sizes that are equal in each of
    these are one size.

    `passes` make a program of what `trace` returns. Programs whose numbers of elements are alike, by the factors `MORE`
    and `FEWER`, have one schedule, and one template. What a budget chose for some sizes serves others whose peak is
    within the limit.

    Raises:
        FzeroError: where there is no such program.
    """

    def __init__(
        self,
        trace: Trace,
        passes: Sequence[Pass] | Budget,
        finish: Finish,
        signature: Signature,
        known: Sequence[Signature],
    ) -> None:
        self._signature, self.watches, self._finish = signature, list[Watch](), finish
        self._symbols = Symbols(current_user_line)
        self._places: dict[tuple[int, ...], list[Place]] = {}
        changed = {place: None for each in known for place in find_changes(each, signature) or ()}
        for place in changed:
            sizes = tuple(_find_size(each, place) for each in (signature, *known))
            self._places.setdefault(sizes, []).append(place)
        opened: dict[Place, Any] = {}
        for sizes, places in self._places.items():
            opened |= dict.fromkeys(places, self._symbols.open(sizes[0]))
        shapes = {i: _open_form(signature[2][i], opened, i) for i in dict.fromkeys(i for i, _ in changed)}
        self._late: Sequence[Pass] | Budget = passes
        early: Sequence[Pass] = ()
        if not isinstance(passes, Budget):
            at = list(map(name_of_pass, passes)).index(_BY_SIZES)
            early, self._late = passes[:at], passes[at:]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Raw Sym(Int|Float) value")  # fx has them as nodes
            self.early = run_passes(trace(self._symbols, shapes), early)
        self._templates: list[tuple[Template, Callable[[Sequence[int]], Any]]] = []

    def find_sizes(self, signature: Signature) -> list[int] | str:
        """The open sizes of a call. Where the program does not fit the call, the reason."""
        changes = find_changes(self._signature, signature)
        if changes is None:
            return "other arguments than sizes of batches differ"
        if changes.keys() - {place for places in self._places.values() for place in places}:
            return "another size changes"
        sizes: list[int] = []
        for places in self._places.values():
            found = {_find_size(signature, place) for place in places}
            if len(found) > 1:
                return f"sizes that were equal differ: {sorted(found)}"
            sizes += found
        return self._symbols.find_broken(sizes) or sizes

    def fill(self, sizes: Sequence[int]) -> Program:
        """The program of these sizes."""
        return self._find_template(sizes)[0].fill(sizes)

    def finish(self, sizes: Sequence[int]) -> Any:
        """What `Finish` makes of the program of these sizes."""
        return self._find_template(sizes)[1](sizes)

    def _find_template(self, sizes: Sequence[int]) -> tuple[Template, Callable[[Sequence[int]], Any]]:
        for template, finish in self._templates:
            if self._serves(template, sizes):
                return template, finish
        early = _schedule_by(self.early, Open(self._symbols, tuple(sizes)))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Raw Sym(Int|Float) value")
            if isinstance(self._late, Budget):
                found = find_plan(fill_reference(early), self._late)
                template = Template(follow_plan(early, self._late, found.plan))
            else:
                template = Template(run_passes(early, self._late))
            self._templates.insert(0, (template, self._finish(template)))
        return self._templates[0]

    def _serves(self, template: Template, sizes: Sequence[int]) -> bool:
        """Whether a template that was scheduled for other sizes is one for these, too."""
        reference = template.reference
        if tuple(sizes) == reference:
            return True
        count, known = self._count(sizes), self._count(reference)
        fewer = FEWER_IN_PLAN if isinstance(self._late, Budget) else FEWER
        if not (known <= fewer * count and count <= MORE * known):
            return False
        return not isinstance(self._late, Budget) or template.fill(sizes).memory().peak <= self._late.limit

    def _count(self, sizes: Sequence[int]) -> int:
        """The product of open sizes that are no strides: a number that grows with the elements of batches."""
        leaves = self._signature[2]
        places = zip(sizes, self._places.values())
        return prod(size for size, found in places if any(dim < len(leaves[i][0]) for i, dim in found))


def _schedule_by(program: Program, opened: Open) -> Program:
    """The program, and the bodies of its loops, with these sizes for its schedule."""
    return replace(ops.map_bodies(program, lambda body: _schedule_by(body, opened)), open=opened)


def _find_size(signature: Signature, place: Place) -> int:
    shape, _, _, stride, *_ = signature[2][place[0]]
    return (*shape, *stride)[place[1]]


def _open_form(described: Any, opened: Mapping[Place, Any], i: int) -> OpenForm:
    """The shape of the leaf at `i`, and its strides, with open sizes."""
    shape, stride, count = described[0], list(described[3]), len(described[0])
    sizes, own = [opened.get((i, dim), size) for dim, size in enumerate(shape)], _list_own_strides(described)
    for dim in reversed(range(count)):
        known = stride[dim] if dim in own else _follow_stride(sizes, stride, dim)
        stride[dim] = opened.get((i, count + dim), known)
    return sizes, stride


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
        difference = find_difference(general.fill(sizes), program)
        if difference is not None:
            raise FzeroError(program.name, f"has another program at another shape: {difference}", "each is traced")
        return
    raise FzeroError("the step", f"has another program at another shape: {problem}", "each is traced")


class Generals:
    """The general programs of the step `name`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._found: list[General] = []  # used last first
        self._tries = MAX_GENERALS

    def find(
        self,
        signature: Signature,
        known: Sequence[tuple[Signature, Program]],
        trace: Trace,
        passes: Sequence[Pass] | Budget,
        finish: Finish,
        watch: Callable[[Program], list[Watch]],
    ) -> tuple[Any, list[Watch]] | None:
        """What `finish` makes of the program of a signature, and what it depends on, where a general program fits. None
        where none does.

        `known` are programs that were traced at other signatures. Where one of them differs in sizes only, and no
        general program fits it, a new one is traced: `watch` returns what that depends on.
        """
        own = passes.passes() if isinstance(passes, Budget) else passes
        if any(map(is_foreign, own)) or _BY_SIZES not in map(name_of_pass, own):
            return None  # passes of others may do anything with sizes
        finished = self._finish(signature)
        like = [x for x in known if find_changes(x[0], signature) and self._is_apart(x[0])][:2]
        if finished is not None or not like or self._tries <= 0:
            return finished
        self._tries -= 1
        try:
            general = General(trace, passes, finish, signature, [each for each, _ in like])
            check_general(general, like)
        except Exception as error:  # whatever torch cannot do with open sizes: the trace of given sizes says more
            _log.debug("%s is traced for each shape: %s", self.name, error)
            return None
        general.watches = watch(general.early)
        self._found.insert(0, general)
        return self._finish(signature)

    def _is_apart(self, signature: Signature) -> bool:
        """Whether no general program fits a signature."""
        return all(isinstance(general.find_sizes(signature), str) for general in self._found)

    def _finish(self, signature: Signature) -> tuple[Any, list[Watch]] | None:
        self._found = [x for x in self._found if all(value.is_unchanged for value in x.watches)]
        for i, general in enumerate(self._found):
            sizes = general.find_sizes(signature)
            finished = None if isinstance(sizes, str) else general.finish(sizes)
            sizes = general.find_sizes(signature)  # again: passes that schedule for these sizes may ask, too
            if not isinstance(sizes, str):
                self._found.insert(0, self._found.pop(i))
                return finished, general.watches
            _log.debug("%s is traced again: %s", self.name, sizes)
        return None
