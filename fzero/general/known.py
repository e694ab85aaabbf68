"""The general programs of a step: which one fits a call, and when a further one is traced."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from fzero.base.torch_private_traces import without_log_of_failures
from fzero.budget.fit import Rewrite, list_passes_of
from fzero.general.programs import (
    BY_SIZES,
    Finish,
    General,
    Trace,
    check_general,
    open_common,
    open_general,
    trace_general,
)
from fzero.general.sizes import Sizes, find_changes
from fzero.passes.run import is_foreign, name_of_pass
from fzero.program.program import Program
from fzero.program.readings import Found
from fzero.tracing.signatures import Signature, sign_all
from fzero.tracing.watches import Watch

T = TypeVar("T")
MAX_GENERALS = 3
"""How often a step is traced with open sizes at most, for each structure of its arguments."""
_log = logging.getLogger("fzero")


class Generals:
    """The general programs of the step `name`."""

    def __init__(self, name: str) -> None:
        self.name, self.why = name, "its passes may do anything with sizes"
        self._found: list[General] = []  # used last first
        self._tries = Counter[Any]()  # by the structure of the arguments

    def find(self, signature: Signature, leaves: Sequence[Any]) -> tuple[Any, General, Found] | None:
        """What `Finish` makes of the program of a call, with the general program that fits it, and what its readings
        find. None where none fits."""
        for general in list(self._found):
            if not all(value.is_unchanged for value in general.watches):  # another one is due, and no further try
                self._found.remove(general)
                self.forget_try(general.sizes.signature)
        for i, general in enumerate(self._found):
            found = general.read(signature, leaves)
            if found is None:
                continue
            whole = sign_all(signature, found)
            sizes = general.find_sizes(whole)
            finished = None if isinstance(sizes, str) else general.finish(sizes)
            sizes = general.find_sizes(whole)  # again: passes that schedule for these sizes may ask, too
            if not isinstance(sizes, str):
                self._found.insert(0, self._found.pop(i))
                return finished, general, found
            _log.debug("%s does not fit: %s", self.name, sizes)
        return None

    def add(self, general: General, watches: list[Watch]) -> None:
        """Let a general program, which depends on these values, be found."""
        general.watches = watches
        self._found.insert(0, general)

    def trace(
        self,
        signature: Signature,
        known: Sequence[tuple[Signature, Program]],
        trace: Trace,
        rewrite: Rewrite,
        finish: Finish,
    ) -> General | None:
        """A new general program, where one of the programs `known`, which were traced at other signatures, differs in
        sizes only, and no general program that fits it has all of these open. None where there is none."""
        like = [x for x in known if self._is_apart(x[0], signature)][:2]

        def make() -> General:
            fitting = (x.sizes.signature for x in self._found if any(x.fits(each) for each, _ in like))
            general = trace_general(trace, rewrite, finish, signature, [*(each for each, _ in like), *fitting])
            check_general(general, like)
            return general

        return self._try(make, rewrite, signature[1]) if like else None

    def open(self, sizes: Sizes, trace: Trace, rewrite: Rewrite, finish: Finish) -> General | None:
        """A general program of the first call of its kind, with these sizes open. None where there is none."""
        signature = sizes.signature
        if any(find_changes(x.sizes.signature, signature) is not None for x in self._found):
            return None  # it does not fit these sizes
        return self._try(lambda: open_general(trace, rewrite, finish, sizes), rewrite, signature[1])

    def open_common(
        self, sizes: Sizes, others: Sequence[Sequence[int]], trace: Trace, rewrite: Rewrite, finish: Finish
    ) -> tuple[General, General] | None:
        """The programs of `fzero.general.programs.open_common`. None where there are none."""

        def make() -> tuple[General, General]:
            return open_common(trace, rewrite, finish, sizes, others)

        return self._try(make, rewrite, (*sizes.list_closed(), sizes.signature[1], "others"))

    def forget_try(self, signature: Signature) -> None:
        """Do not count a trace with open sizes: the step itself raises for these arguments, or reads what has changed
        since."""
        self._tries[signature[1]] -= self._tries[signature[1]] > 0

    def _try(self, make: Callable[[], T], rewrite: Rewrite, key: Any) -> T | None:
        passes = list_passes_of(rewrite)
        if any(map(is_foreign, passes)) or BY_SIZES not in map(name_of_pass, passes):
            return None  # passes of others may do anything with sizes
        if self._tries[key] >= MAX_GENERALS:
            self.why = f"it was traced with open sizes {MAX_GENERALS} times, and other sizes fit none of these programs"
            return None
        self._tries[key] += 1
        try:
            with without_log_of_failures():
                return make()
        except Exception as error:  # whatever torch cannot do with open sizes: the trace of given sizes says more
            self.why = str(error)
            _log.debug("%s is traced for each shape: %s", self.name, error)
            return None

    def _is_apart(self, known: Signature, signature: Signature) -> bool:
        """Whether a known signature differs from a new one in sizes only, and no general program that fits the known
        one has all of these open."""
        changes = find_changes(known, signature)
        return (
            changes is not None
            and bool(changes)
            and not any(x.fits(known) and x.sizes.has(changes) for x in self._found)
        )
