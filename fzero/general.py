"""General programs: one trace for all sizes of a batch.

A step that is called with a second shape is traced with open sizes (`fzero.base.symbols`). Further shapes that fulfil
the conditions of that trace need no trace of their own: numbers take the place of open sizes. The conditions are those
of forward, backward and update, and those of the passes.

A general program is used only where it equals, node by node, the program that was traced at the first shape.
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
from fzero.passes.run import Pass, is_foreign, name_of_pass, run_passes
from fzero.program.open import Open, Template, find_difference
from fzero.program.program import Program
from fzero.tracing.signatures import Signature
from fzero.tracing.user_line import current_user_line
from fzero.tracing.watches import Watch

_log = logging.getLogger("fzero")
_BY_COSTS = "split"
"""The first of the default passes that looks at costs, which depend on sizes."""
Place = tuple[int, int]
"""A dimension: the position of a leaf among the arguments, and of the dimension in its shape."""


def find_changes(known: Signature, new: Signature) -> dict[Place, tuple[int, int]] | None:
    """The dimensions of batches in which two signatures differ -> both sizes. None where anything else differs, where a
    batch is not contiguous, and where a size is below `LEAST`."""
    if known[:2] != new[:2]:
        return None
    found: dict[Place, tuple[int, int]] = {}
    for i, (a, b) in enumerate(zip(known[2], new[2])):
        if a == b:
            continue
        if not (_is_dense(a) and _is_dense(b)) or a[1:3] != b[1:3] or a[4:] != b[4:] or len(a[0]) != len(b[0]):
            return None
        found |= {(i, dim): pair for dim, pair in enumerate(zip(a[0], b[0])) if pair[0] != pair[1]}
    return found if min(map(min, found.values()), default=LEAST) >= LEAST else None


def _is_dense(described: Any) -> bool:
    """Whether this is the description of a contiguous tensor."""
    if not isinstance(described, tuple) or not isinstance(described[0], torch.Size):
        return False
    shape, stride = described[0], described[3]
    return all(size == 1 or step == prod(shape[dim + 1 :]) for dim, (size, step) in enumerate(zip(shape, stride)))


class General:
    """A program with open sizes: those in which a signature differs from that of a known program. Sizes that are equal
    in both are one size.

    `trace(symbols, shapes)` traces with open sizes. `passes` make a program of the trace.

    Raises:
        FzeroError: where there is no such program.
    """

    def __init__(
        self,
        trace: Callable[[Symbols, Mapping[int, Sequence[Any]]], Program],
        passes: Sequence[Pass],
        signature: Signature,
        changes: Mapping[Place, tuple[int, int]],
    ) -> None:
        self._signature, self.watches = signature, list[Watch]()
        self._symbols = Symbols(current_user_line)
        self._places: dict[tuple[int, int], list[Place]] = {}
        for place, pair in changes.items():
            self._places.setdefault(pair, []).append(place)
        opened = {place: self._symbols.open(pair[1]) for pair, places in self._places.items() for place in places[:1]}
        for places in self._places.values():
            opened |= dict.fromkeys(places, opened[places[0]])
        shapes = {
            i: [opened.get((i, dim), size) for dim, size in enumerate(signature[2][i][0])]
            for i in dict.fromkeys(i for i, _ in changes)
        }
        names = [name_of_pass(rewrite) for rewrite in passes]
        if any(map(is_foreign, passes)) or _BY_COSTS not in names:
            raise FzeroError("passes", "are not those of a stage", "each shape is traced")
        at = names.index(_BY_COSTS)
        self._late = passes[at:]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Raw SymInt value")  # fx has them as nodes
            self.early = run_passes(trace(self._symbols, shapes), passes[:at])
        self._templates: dict[int, Template] = {}

    def find_sizes(self, signature: Signature) -> list[int] | str:
        """The open sizes of a call. Where the program does not fit the call, the reason."""
        changes = find_changes(self._signature, signature)
        if changes is None:
            return "other arguments than sizes of batches differ"
        of = {place: changes.get(place, (self._size(place),) * 2)[1] for pair in self._places.values() for place in pair}
        if changes.keys() - of.keys():
            return "another size changes"
        sizes = []
        for places in self._places.values():
            if len({of[place] for place in places}) > 1:
                return f"sizes that were equal differ: {sorted({of[place] for place in places})}"
            sizes.append(of[places[0]])
        return self._symbols.find_broken(sizes) or sizes

    def fill(self, sizes: Sequence[int]) -> Program:
        """The program of these sizes. Programs whose numbers of elements have the same number of bits have the schedule
        of the first of them."""
        bits = prod(sizes).bit_length()
        if bits not in self._templates:
            early = replace(self.early, open=Open(self._symbols, tuple(sizes)))
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Raw SymInt value")
                self._templates[bits] = Template(run_passes(early, self._late))
        return self._templates[bits].fill(sizes)

    def _size(self, place: Place) -> int:
        return self._signature[2][place[0]][0][place[1]]


def check_general(general: General, signature: Signature, program: Program) -> None:
    """Compare a general program with the program that was traced at another signature.

    Raises:
        FzeroError: where they differ, or the general program does not fit the signature.
    """
    sizes = general.find_sizes(signature)
    difference = sizes if isinstance(sizes, str) else find_difference(general.fill(sizes), program)
    if difference is not None:
        raise FzeroError(program.name, f"has another program at another shape: {difference}", "each shape is traced")
