"""The pipeline of ranks whose batches may have other sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from fzero.base import tree
from fzero.base.ambient import disable_autocast, forget_casts
from fzero.base.garbage import pause_garbage_collection
from fzero.base.symbols import Symbols
from fzero.general.programs import make_symbols, raw_numbers
from fzero.general.sizes import Sizes, find_changes
from fzero.general.together import (
    CommonProgram,
    Groups,
    Traces,
    find_common_places,
    find_failure,
    find_open_moves,
    open_sizes,
)
from fzero.pipeline import IN_A_FILE, Pipeline
from fzero.prepared import BatchReader, PreparedCall
from fzero.program.program import Program
from fzero.program.readings import Found, list_tensors
from fzero.tracing.calls import Calls
from fzero.tracing.signatures import Signature, SignedCall, sign_all
from fzero.tracing.trace import OpenForm, trace

T = TypeVar("T")
DIFFER = "batches of ranks have other sizes"


class RankPipeline(Pipeline[T]):
    """The programs of a function on ranks. Where the batches of ranks have other sizes, `open_together` lets
    `find_together` find one schedule for all of them."""

    _common: tuple[CommonProgram, ...] = ()
    """The last one that was found first, the same ones on all ranks."""
    has_differed = False
    """Whether batches of ranks have had other sizes: each rank may know other general programs since."""

    def _forget(self) -> None:
        super()._forget()
        self._common = ()

    @property
    def is_common(self) -> bool:
        """Whether ranks share a schedule."""
        return bool(self._common)

    def find_together(self, rows: Sequence[list[Any]], treedef: tree.TreeDef) -> list[PreparedCall[T]]:
        """`find` for the leaves of each rank of this process. Where the batches of ranks have had other sizes, by one
        schedule for all ranks, which is a collective; and so is a step with a folder of programs."""
        readers = [self._read_call(leaves, treedef) for leaves in rows]
        for common in self._common:
            with disable_autocast(), pause_garbage_collection():
                found = common.find([reader.call for reader in readers])
            if found is not None:
                return [PreparedCall(finished, list_tensors(read), is_together=True) for finished, read in found]
        if self._stored is not None:
            known = [self._find_known(reader) for reader in readers]
            is_missing = int(None in known)
            if self.on.find_largest(is_missing, "whether all ranks know their programs") and not is_missing:
                self.on.is_equal(0, IN_A_FILE)  # which the ranks ask that do not
        return [self.find(leaves, treedef) for leaves in rows]

    def open_together(self, rows: Sequence[list[Any]], treedef: tree.TreeDef) -> str | None:
        """Let `find_together` find one schedule for calls that differ in the sizes of batches, behind `find` of each.
        A collective. Where there is none, the reason, on all ranks."""
        readers = [self._read_call(leaves, treedef) for leaves in rows]
        signatures = [sign_all(reader.signature, self._expect(reader)) for reader in readers]
        self.has_differed = True
        known = [*(x.general.sizes.signature for x in self._common), *(x.signature for x in self._cache)]
        like = [x for x in known if find_changes(x, signatures[0])]
        groups = find_common_places(self.on, [*signatures, *like])
        why = self._open_groups(readers, signatures[0], groups)
        if why is None:
            return None
        apart = find_common_places(self.on, signatures)  # too much may be open: the sizes of this call alone
        is_open = apart != groups and self._open_groups(readers, signatures[0], apart) is None
        return None if is_open else why

    def _open_groups(self, readers: Sequence[BatchReader], signature: Signature, groups: Groups | str) -> str | None:
        """`open_together` of the sizes at some places."""
        if isinstance(groups, str):
            return groups
        sizes, others = open_sizes(signature, groups), list(zip(*(sizes for sizes, _ in groups)))
        found = self._open(readers[0], sizes, others)
        why = find_failure(self.on, found if isinstance(found, str) else None)
        if why is None:
            assert isinstance(found, CommonProgram)
            with disable_autocast(), pause_garbage_collection():
                is_fitting = found.find([reader.call for reader in readers]) is not None
            if is_fitting:
                self._common = (found, *self._common)[: self.limit]
            else:
                why = find_failure(self.on, found.why)
        return why

    def _open(self, reader: BatchReader, sizes: Sizes, others: Sequence[Sequence[int]]) -> CommonProgram | str:
        """The program of `find_together`. Where there is none, the reason. `others` are the sizes of all ranks."""

        expected = self._expect(reader)
        is_own = sizes.signature == sign_all(reader.signature, expected)
        how = self._open_trace(reader.call, expected, DIFFER, is_own)
        with disable_autocast(), pause_garbage_collection():
            found = self._generals.open_common(sizes, others, how, self.passes, self._finish_template)
        if found is None:
            return self._generals.why
        general, like = found
        if not self._links_open:
            return "each of its programs is linked by itself, as with compile='graph' and operations from outside"
        node = find_open_moves(general.program)
        if node is not None:
            return f"{node.meta['stack_trace']}: ranks exchange values whose shapes differ"
        general.watches = self._watch(general.program, reader)

        def note_open(call: SignedCall, found: Found) -> tuple[Symbols, Calls]:
            symbols, forms = make_symbols(sizes, differ=True)
            return symbols, self._note(call, symbols, forms, found)[1]

        traces = Traces(lambda call, found: self._open_trace(call, found, DIFFER)(None, {}), self._note, note_open)
        return CommonProgram(general, like, self.on, self.limit, traces)

    def _note(
        self,
        call: SignedCall,
        symbols: Symbols | None = None,
        shapes: Mapping[int, OpenForm] | None = None,
        given: Found | None = None,
    ) -> tuple[Program, Calls]:
        """The program of a trace, and what the step calls in it."""
        calls, args = Calls(), tree.unflatten(call.signature[1], call.leaves)
        with forget_casts(), raw_numbers():
            program = trace(self.fn, args, self.on.mesh, symbols, shapes, self._model_axes, given=given, calls=calls)
        return program, calls
