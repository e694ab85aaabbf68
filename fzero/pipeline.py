"""The pipeline: from a function and its arguments to the program that ranks run. Trace, check, rewrite."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Generic, TypeVar

from fzero.base import tree
from fzero.base.ambient import disable_autocast, find_ambient, forget_casts
from fzero.base.errors import FzeroError
from fzero.base.executed_code import leave_out_code
from fzero.base.garbage import pause_garbage_collection
from fzero.base.symbols import Symbols
from fzero.budget.fit import Budget, Rewrite, find_plan, list_passes_of
from fzero.budget.programs import follow_plan, mark_trace
from fzero.cache.programs import Call, CallFiles, StoredPrograms
from fzero.general.dynamic import Dynamic, Ranges
from fzero.general.known import Generals
from fzero.general.programs import General, Trace
from fzero.general.sizes import Sizes
from fzero.given import refuse_mesh
from fzero.passes import resolve, run_passes
from fzero.passes.dequantize import dequantize
from fzero.passes.roll import roll
from fzero.prepared import BatchReader, PreparedCall, TracedCall, explain, read_call
from fzero.program.open import Template
from fzero.program.plan import Plan
from fzero.program.program import Program
from fzero.program.rates import Rates
from fzero.program.readings import Found, list_tensors, read_all
from fzero.ranks.agreement import digest
from fzero.ranks.ranks import Ranks
from fzero.tracing.escapes import check_argument
from fzero.tracing.followed import refresh_functions
from fzero.tracing.mistakes import check_mistakes
from fzero.tracing.seeds import check_seeds
from fzero.tracing.signatures import Signature, SignedCall, sign_all, sign_leaf
from fzero.tracing.trace import OpenForm, trace
from fzero.tracing.watches import Watch, find_watches, watch_elements
from fzero.values.sharded import Form, Sharded

T = TypeVar("T")
MAX_PROGRAMS = 16
"""How many programs a step keeps, unless the user says otherwise."""
IN_A_FILE = "which program of a step a file has"
_log = logging.getLogger("fzero")


class Pipeline(Generic[T]):
    """The programs of a function on the mesh of `on`, one for each signature of its arguments, as `finish` returns
    them.

    A signature is the structure, shapes, strides, dtypes, devices, layouts and constants of the arguments, and the
    settings of torch around the call. A program also has to agree with the values that its trace captured.

    The `limit` programs that were used last are kept. All ranks run the same programs in the same order, so all drop
    the same one.

    With `cache`, a folder, a program that another process has traced comes from a file (`fzero.cache`).

    Along `model_axes` ranks take the same batch. The dimensions of batches in `dynamic` are open from the first call.

    `finish_open`, of a template, returns a function of sizes that returns what `finish` returns for the program of
    these. It may return None, and then each of these programs is filled in and finished. Where it needs the open
    program, which no file has, `restores_open` is false.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        on: Ranks,
        passes: Rewrite,
        finish: Callable[[Any, Program], T],
        limit: int = MAX_PROGRAMS,
        finish_open: Callable[[Any, Template], Callable[[Sequence[int]], T] | None] = lambda on, template: None,
        cache: str | os.PathLike[str] | None = None,
        restores_open: bool = True,
        model_axes: tuple[str, ...] = (),
        dynamic: Ranges | None = None,
    ) -> None:
        if not isinstance(limit, int) or limit < 1:
            raise FzeroError("max_programs", f"is {limit!r}", "give how many programs to keep, at least 1")
        self.fn, self.on, self.passes, self.finish, self.limit = fn, on, passes, finish, limit
        self._finish_open, self._restores_open, self._model_axes = finish_open, restores_open, model_axes
        self._cache: list[TracedCall] = []  # used last first
        self._name = getattr(fn, "__qualname__", repr(fn))
        self._dynamic = None if dynamic is None else Dynamic(dynamic, fn)
        self._generals = Generals(self._name)
        self._links_open = True  # whether `finish_open` returned a function
        self._stored = None if cache is None else StoredPrograms(cache, self._name)
        self._has_warned = False
        self._measured: Rates | None = None
        if isinstance(passes, Plan):
            passes.check_mesh(on.mesh)
            self._measured = passes.rates

    def program(self, args: tuple[Any, ...]) -> Program:
        """The program for these arguments, traced now.

        Raises:
            FzeroError: for state of another mesh, or a leaf that a trace cannot see into.
        """
        leaves, treedef = tree.flatten(args)
        self._lie_with(leaves)
        self._check(leaves, treedef)
        with pause_garbage_collection():
            traced, rolled = self._trace(args)
            with disable_autocast():
                if isinstance(self.passes, Budget):
                    return find_plan(traced, self.passes).program
                if traced.plan and traced.plan.mesh:
                    return follow_plan(traced, traced.plan)  # as a search does: its nodes have the same names
                with leave_out_code() if isinstance(self.passes, Plan) else nullcontext():  # code of fzero alone
                    resolved = resolve(replace(rolled, is_spare=True))
                    return run_passes(replace(resolved, is_spare=True), list_passes_of(self.passes))

    def _trace(
        self,
        args: tuple[Any, ...],
        symbols: Symbols | None = None,
        shapes: Mapping[int, OpenForm] | None = None,
        given: Found | None = None,
    ) -> tuple[Program, Program]:
        """The program of a trace, and with its loops rolled."""
        with forget_casts():
            traced = trace(self.fn, args, self.on.mesh, symbols, shapes, self._model_axes, given=given)
            traced = replace(dequantize(traced), measured=self._measured)
            marked = traced
            if isinstance(self.passes, Plan):
                traced = replace(traced, plan=replace(self.passes, rates=self._measured))
                marked = mark_trace(traced, self.passes)
            is_kept = isinstance(self.passes, Budget) or bool(traced.plan and traced.plan.mesh)
            rolled = roll(marked.copy() if is_kept else marked)
        check_seeds(rolled)
        if symbols is None:  # else it is traced at another shape, too
            check_mistakes(rolled, self.fn, warn=not self._cache)
        return traced, rolled

    def reschedule(self, measured: Rates) -> None:
        """Drop all programs. The next ones are scheduled for a machine with these rates."""
        self._measured = measured
        self._forget()

    def _forget(self) -> None:
        self._cache.clear()
        self._generals = Generals(self._name)

    def _lie_with(self, leaves: Sequence[Any]) -> None:
        """Let state lie along the axes of the mesh that `partition` cut it over."""
        on = self.on.follow(next((x.on for x in leaves if isinstance(x, Sharded)), self.on))
        if on is not self.on:
            self.on = on
            self._forget()

    def prepare(self, leaves: list[Any], treedef: tree.TreeDef) -> T:
        """The finished program for these arguments. Raises as `program`."""
        return self.find(leaves, treedef).finished

    def find(self, leaves: list[Any], treedef: tree.TreeDef) -> PreparedCall[T]:
        """The finished program for these arguments, from the cache where their signature is known, and its further
        arguments. Raises as `program`.

        Signatures are compared, not hashed: the forms of state that `Returned` set are the same objects at each call,
        which Python compares by identity first.
        """
        reader = self._read_call(leaves, treedef)
        known = self._find_known(reader)
        if known is not None:
            return known
        with pause_garbage_collection():
            return self._keep(*self._make(reader))

    def _read_call(self, leaves: list[Any], treedef: tree.TreeDef) -> BatchReader:
        self._lie_with(leaves)
        return BatchReader(SignedCall(self._describe(leaves, treedef), leaves))

    def _find_known(self, reader: BatchReader) -> PreparedCall[T] | None:
        """The program of a call that a program in memory fits."""
        for i, known in enumerate(self._cache):
            found = reader.match(known)
            if found is not None and all(value.is_unchanged for value in known.watches):
                self._cache.insert(0, self._cache.pop(i))
                return PreparedCall(known.finished, list_tensors(found))
        self._check(reader.leaves, reader.signature[1])
        with pause_garbage_collection():
            general = self._find_general(reader)
        return None if general is None else self._keep(*general)

    def _keep(self, made: TracedCall, found: Found) -> PreparedCall[T]:
        self._cache.insert(0, made)
        del self._cache[self.limit :]
        return PreparedCall(made.finished, list_tensors(found))

    def _describe(self, leaves: list[Any], treedef: tree.TreeDef) -> Signature:
        try:
            return find_ambient(), treedef, [self._sign(leaf) for leaf in leaves]
        except Exception:  # a tensor without strides
            self._check(leaves, treedef)
            raise

    def _make(self, reader: BatchReader) -> tuple[TracedCall, Found]:
        """The program of a call that no program in memory fits: from a file, of a trace with open sizes, or of a trace
        of its own. Also returns what its readings find."""
        refresh_functions(self.fn)  # a file is of what they are now
        signature, leaves = reader.signature, reader.leaves
        settings, treedef, _ = signature
        entry = None
        if self._stored is not None:
            entry = self._stored.find(
                Call(self.fn, settings, treedef, leaves, self.passes, self.on, self._measured, self._model_axes)
            )
            found = self._read(entry, signature)
            if isinstance(found, Program):
                return self._finish(reader, found)
            if found is not None and (made := self._add(found, reader)) is not None:
                return made
        args = tree.unflatten(treedef, leaves)
        expected = self._expect(reader)
        with disable_autocast():
            generalize = partial(self._generalize, reader, expected)
            general = entry.trace_general(generalize) if entry else generalize()
        if general is not None and (made := self._add(general, reader)) is not None:
            return made
        if self._cache:
            self._report(sign_all(signature, expected))
        trace_now = partial(self.program, args)
        try:
            program = entry.trace(trace_now) if entry else trace_now()
        except Exception:
            self._generals.forget_try(signature)
            raise
        read = read_all(program.readings, leaves)
        if sign_all(signature, read) != sign_all(signature, expected):  # the guess was another
            general = self._generalize(reader, read)
            if general is not None and (made := self._add(general, reader)) is not None:
                return made
        return self._finish(reader, program)

    def _expect(self, reader: BatchReader) -> Found:
        """What the readings of another call's program find in this call's batch: a guess, which a trace corrects."""
        like = (x for x in self._cache if x.readings and x.signature[1] == reader.signature[1])
        return next((found for x in like if (found := reader.read(x)) is not None), [])

    def _generalize(self, reader: BatchReader, expected: Found) -> General | None:
        """A general program that a trace with open sizes gives: at once of sizes that the user named, else of those in
        which calls have differed. None where there is none."""
        signature = sign_all(reader.signature, expected)
        why = explain(self._cache, signature, False) if self._cache else "dynamic names them"
        trace = self._open_trace(reader.call, expected, why)
        how = trace, self.passes, self._finish_template
        places = self._dynamic.find_places(signature) if self._dynamic else ()
        general = self._generals.open(Sizes(signature, places), *how) if places else None
        if general is None:
            known = [(x.signature, x.program) for x in self._cache if x.program is not None]
            general = self._generals.trace(signature, known, *how)
        if general is None:
            return None
        found = general.read(reader.signature, reader.leaves)
        return general if found is not None and sign_all(reader.signature, found) == signature else None

    def _finish(self, reader: BatchReader, program: Program) -> tuple[TracedCall, Found]:
        watches, readings = self._watch(program, reader), program.readings
        found = read_all(readings, reader.leaves)
        with disable_autocast():
            finished = self.finish(self.on, program)
        signature = sign_all(reader.signature, found)
        return TracedCall(signature, watches, finished, program, readings, partial(read_call, readings)), found

    def _add(self, general: General, reader: BatchReader) -> tuple[TracedCall, Found] | None:
        """Keep a general program for further signatures. The program of this call, None where it does not fit."""
        self._generals.add(general, self._watch(general.program, reader))
        return self._find_general(reader)

    def _find_general(self, reader: BatchReader) -> tuple[TracedCall, Found] | None:
        with disable_autocast():
            made = self._generals.find(reader.signature, reader.leaves)
        if made is None:
            return None
        finished, general, found = made
        signature, readings = sign_all(reader.signature, found), general.program.readings
        return TracedCall(signature, general.watches, finished, None, readings, general.read), found

    def _read(self, entry: CallFiles | None, signature: Signature) -> Program | General | None:
        """The program of a signature from a file, or else a general one, where all ranks have the same."""
        number: int = 0
        found: Program | General | None = entry.program if entry else None
        if entry is not None:
            if found is None and self._restores_open:
                with disable_autocast():
                    found = entry.read_general(signature, self._finish_template)
            number = digest([entry.key, *(found.lines() if isinstance(found, General) else ())]) if found else 0
        if self.on.is_equal(number, IN_A_FILE):
            return found
        _log.info("cache: %s is traced: not all ranks have the same file", self._name)
        return None

    def _watch(self, program: Program, reader: BatchReader) -> list[Watch]:
        """Watches of what a program depends on, after its trace, which may count itself."""
        watches = find_watches(self.fn, reader.leaves)
        return watches + watch_elements(program, watches)

    def _finish_template(self, template: Template) -> Callable[[Sequence[int]], T]:
        """A function of sizes that returns the finished program of these."""
        made = self._finish_open(self.on, template)
        self._links_open = made is not None
        return made or (lambda sizes: self.finish(self.on, template.fill(sizes)))

    def _open_trace(self, call: SignedCall, expected: Found, why: str, is_own: bool = True) -> Trace:
        """Traces of a call with open sizes, whose examples are its own with `is_own`, and without symbols of other
        sizes, where readings find what is expected. The logger says why."""

        def trace(symbols: Symbols | None, shapes: Mapping[int, OpenForm]) -> Program:
            how = "with open sizes" if symbols else "at other sizes, to be compared with that"
            _log.info("%s is traced %s: %s", self._name, how, why)
            args = tree.unflatten(call.signature[1], call.leaves)
            traced, rolled = self._trace(args, symbols, shapes, None if is_own and symbols else expected)
            return traced if isinstance(self.passes, Budget) else resolve(rolled)

        return trace

    def _sign(self, leaf: Any) -> Any:
        """The properties of a leaf on which the program depends. Where a plan decides where state lies, it does not
        matter whether it was given on the device or in the plan's placement."""
        signed = sign_leaf(leaf)
        plan = self.passes.plan if isinstance(self.passes, Budget) else self.passes
        to = plan.to if isinstance(plan, Plan) else None
        return signed._replace(place=None) if to and isinstance(signed, Form) and signed.place == to else signed

    def _report(self, signature: Any) -> None:
        """Say why the step is traced again. The first time that a program has to go, say which argument keeps changing;
        from then on say no more."""
        is_full = len(self._cache) == self.limit
        if self._has_warned:
            return
        self._has_warned = is_full
        does = f"has {self.limit} programs, and drops one for each further one" if is_full else "is traced again"
        _log.warning("%s %s: %s", self._name, does, explain(self._cache, signature, is_full))

    def _check(self, leaves: Sequence[Any], treedef: tree.TreeDef) -> None:
        """Refuse state of another mesh, leaves that a trace cannot see into, and sizes that the user excluded."""
        for key, leaf in zip(tree.keys(treedef), leaves):
            if isinstance(leaf, Sharded):
                if leaf.on is not self.on:
                    raise refuse_mesh(leaf, self.on)
            else:
                check_argument(f"argument {tree.dotted(key)}", leaf)
        if self._dynamic is not None:
            self._dynamic.find_places((None, treedef, [self._sign(leaf) for leaf in leaves]))
