"""Ranks whose batches have other sizes: each runs the program of its own sizes, and all have one schedule.

A general program leaves open the sizes in which ranks differ. Ranks schedule it for the largest of these sizes, so that
all start the same collectives in the same order, and each fills in its own sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.base.formulas import LEAST
from fzero.base.symbols import Symbols
from fzero.base.torch_private import OpOverload, pytree_leaves
from fzero.base.torch_private_traces import has_open_sizes
from fzero.general.programs import General
from fzero.general.sizes import Place, Sizes, is_constant, is_number, list_own_strides, list_read, open_form
from fzero.program.operation import Node
from fzero.program.program import Program
from fzero.program.readings import Found
from fzero.program.records import alias_of, body_of, comm_of, find_bodies, record
from fzero.ranks.ranks import Ranks
from fzero.ranks.together import gather_words
from fzero.tracing.calls import Calls
from fzero.tracing.signatures import Signature, SignedCall, is_batch, sign_all

ALIKE = "batches do not differ in sizes"
MISFIT = 2**63 - 1
"""A size that no batch has, the largest of all: of a rank whose call the program does not fit."""
Table = list[Any]
"""The shape and the strides of each batch of a call, the text of each constant, and None for each other leaf."""


_COPIES = (torch.ops.aten.clone.default, torch.ops.aten._unsafe_view.default, torch.ops.aten._to_copy.default)


class Traces(NamedTuple):
    """Traces for a common program: `trace` makes the program of a call, before any pass, where readings find these
    values. `note` notes what the step calls then, and `note_open` what it calls in the common program."""

    trace: Callable[[SignedCall, Found], Program]
    note: Callable[[SignedCall], tuple[Program, Calls]]
    note_open: Callable[[SignedCall, Found], tuple[Symbols, Calls]]


class CommonProgram:
    """A general program for ranks whose batches have other sizes, of which it keeps the programs of `limit` sizes.

    `like` is the general program of ranks that have the same sizes. A trace of some sizes is held against it: where
    ranks differ, so do the numbers that follow from sizes, and means over ranks stand elsewhere. Where torch computes
    in another way at sizes of 0 and 1, the calls that are noted tell whether it computes the same."""

    def __init__(self, general: General, like: General, on: Ranks, limit: int, traces: Traces) -> None:
        self.general, self._like, self._on, self._limit, self._traces = general, like, on, limit, traces
        self._made: dict[Any, Any] = {}
        self._noted: tuple[Symbols, Calls] | None = None
        self._different: dict[Any, str | None] = {}  # by sizes that break conditions, or by those below `LEAST`
        self.why: str | None = None

    def find(self, calls: Sequence[SignedCall]) -> list[tuple[Any, Found]] | None:
        """What is finished for the calls of the ranks of this process, and what readings find; None on all ranks where
        the program does not fit the call of one. A collective of one number for each open size."""
        self.why = None
        known = [self._find_sizes(call) for call in calls]
        largest = self._find_largest([sizes for sizes, _ in known])
        if largest is None:
            return None
        finish, is_new = self.general.find_finish(largest)
        made = [(self._finish(finish, tuple(sizes)), found) for sizes, found in known]
        if is_new and self._find_largest([self._find_sizes(call)[0] for call in calls]) is None:
            return None  # the schedule has asked for more
        return made

    def _find_sizes(self, call: SignedCall) -> tuple[list[int], Found]:
        """The sizes of a call, and what readings find. `MISFIT` for each size where the program does not fit: `why`."""
        found = self.general.read(*call) if all(x.is_unchanged for x in self.general.watches) else None
        whole = None if found is None else sign_all(call.signature, found)
        sizes = "it differs in more than sizes" if whole is None else self.general.sizes.find(whole, least=0)
        if isinstance(sizes, str):
            why: str | None = sizes
        else:
            assert found is not None
            why = self._find_difference(call, found, sizes)
            if why is None:
                return sizes, found
        self.why = self.why or why  # of the first rank of this process that it does not fit
        return [MISFIT] * len(self.general.sizes.places), []

    def _find_difference(self, call: SignedCall, found: Found, sizes: list[int]) -> str | None:
        """Why a call of these sizes has another program; None where it has this one. Of sizes that break conditions, as
        sizes of 0 and 1 do, a trace shows it."""
        conditions = self.general.conditions()
        broken = conditions.find_broken(sizes)
        if broken is None:
            return None
        is_small = conditions.find_broken(sizes, least=0) is None
        key = is_small, *(min(size, LEAST) if is_small else size for size in sizes)
        if key not in self._different:
            self._different[key] = self._compare(call, found, sizes, is_small, broken)
        return self._different[key]

    def _compare(self, call: SignedCall, found: Found, sizes: Sequence[int], is_small: bool, broken: str) -> str | None:
        """`_find_difference` by traces. Of sizes that are small, and break no other condition, what is called tells."""
        difference = f"{broken}, and a trace shows that it is another one"
        try:
            if self._like.find_difference(sizes, self._traces.trace(call, found)) is None:
                return None
        except Exception as error:  # as of a step that reads more; the step raises again what is its own
            difference = f"{difference}: {error}"
        if not is_small:
            return difference
        try:
            self._noted = self._noted or self._traces.note_open(call, found)
            traced, calls = self._traces.note(call)
            symbols, expected = self._noted
            line = expected.find_difference(symbols, sizes, calls)
            if line is not None:
                return f"{difference}, as {line} calls another function, or with other tensors"
            assert self.general.schedule is not None
            own = self.general.schedule.fill_trace(sizes)
        except Exception as error:
            return f"{difference}: {error}"
        return None if list_empty(own) <= list_empty(traced) else difference

    def _find_largest(self, rows: Sequence[Sequence[int]]) -> list[int] | None:
        """The largest sizes of any rank; None on all ranks where the program does not fit one."""
        largest = list[int]()
        for column in zip(*rows):
            largest.append(self._on.find_largest(max(column), "the largest sizes of batches"))
            if largest[0] == MISFIT:
                return None
        return largest

    def _finish(self, finish: Callable[[Sequence[int]], Any], sizes: tuple[int, ...]) -> Any:
        key = finish, sizes
        made = self._made.pop(key) if key in self._made else finish(sizes)
        self._made[key] = made  # the last one is the one that was used last
        if len(self._made) > self._limit:
            del self._made[next(iter(self._made))]
        return made


def list_empty(program: Program) -> set[Any]:
    """The operations of torch that a program calls where a tensor is empty, but views and those of single elements. Not
    every kernel can compute nothing: torch chooses another one."""
    found = set[Any]()
    for node in program.graph.nodes:
        values = pytree_leaves([x.meta.get("val") for x in (node, *node.all_input_nodes)])
        is_empty = any(isinstance(x, Tensor) and x.numel() == 0 for x in values)
        if is_empty and isinstance(node.target, OpOverload) and alias_of(node) is None:
            found.add(node.target)
    return {target for target in found if target not in _COPIES and torch.Tag.pointwise not in target.tags}


def tabulate(signature: Signature) -> Table:
    """The table of a call."""
    leaves = signature[2]
    values = {i: repr(x[1]) for i, x in enumerate(leaves) if is_constant(x) and isinstance(x, tuple)}
    return [(tuple(x[0]), tuple(x[3])) if is_batch(x) else values.get(i) for i, x in enumerate(leaves)]


Groups = list[tuple[tuple[int, ...], list[Place]]]
"""Places at which sizes differ in tables, behind the sizes that they have in all of them."""


def group_places(tables: Sequence[Table], signature: Signature) -> Groups | str:
    """The groups of places of tables, one of which is that of a signature. Where tables differ in more than sizes, the
    reason."""
    groups, read = dict[Any, tuple[tuple[int, ...], list[Place]]](), set(list_read(signature))
    if len(set(map(len, tables))) > 1:
        return "values of their batches lead ranks through other code"
    for i, column in enumerate(zip(*tables)):
        texts = [x for x in column if isinstance(x, str)]
        if len(set(texts)) > 1:
            return f"Python reads {texts[0]} on one rank and {next(x for x in texts if x != texts[0])} on another"
        if not all(isinstance(x, tuple) for x in column):
            continue
        own = {(len(shape), *list_own_strides((shape, None, None, stride))) for shape, stride in column}
        if len(own) > 1:
            return "batches differ in more than sizes"
        ((count, *strides),) = own
        for dim in (*range(count), *(count + x for x in strides)):
            sizes = tuple((*shape, *stride)[dim] for shape, stride in column)
            if len(set(sizes)) > 1 or ((i, dim) in read and sizes[0] >= LEAST):
                key = ((i, dim),) if is_number(signature, (i, dim)) else sizes
                groups.setdefault(key, (sizes, []))[1].append((i, dim))
    return list(groups.values()) if len(set(map(repr, tables))) > 1 else ALIKE


def open_sizes(signature: Signature, groups: Groups) -> Sizes:
    """The sizes that are open in a program for all ranks. Their examples, the same on all ranks, are those of the
    largest call: small sizes have programs of their own."""
    settings, treedef, described = signature
    made, calls = list(described), list(zip(*(sizes for sizes, _ in groups)))
    largest = max(calls, key=lambda sizes: (min(sizes) >= LEAST, prod(sizes)))
    examples = {place: max(size, LEAST) for (_, group), size in zip(groups, largest) for place in group}
    for i in {i for i, _ in examples}:
        shape, strides = open_form(described[i], examples, i)
        made[i] = (torch.Size(shape), *described[i][1:3], tuple(strides), *described[i][4:])
    return Sizes((settings, treedef, made), tuple(tuple(group) for _, group in groups))


def find_open_moves(program: Program) -> Node | None:
    """The first collective between ranks that take other batches, of values whose shapes are open. Ranks along model
    axes take the same batch."""
    model_axes = frozenset(program.model_axes)
    for node in program.graph.nodes:
        if node.op != "call_function" or record(node).moves is None or body_of(node) is not None:
            continue
        values = pytree_leaves([x.meta.get("val") for x in (node, *node.all_input_nodes)])
        if any(isinstance(x, Tensor) and has_open_sizes(x) for x in values):
            axes = (program.mesh.split(move.axis) for move in comm_of(program, node))
            if not model_axes.issuperset(axis for each in axes for axis in each):
                return node
    found = map(find_open_moves, find_bodies(program.graph))
    return next((node for node in found if node is not None), None)


def find_common_places(on: Ranks, signatures: Sequence[Signature]) -> Groups | str:
    """The groups of places of the calls that ranks know: a collective. Where they differ in more, the reason."""
    gather = gather_words(on.members, "the sizes of batches")
    tables = gather(list(map(tabulate, signatures))).values()
    return group_places([table for own in tables for table in own], signatures[0])


def find_failure(on: Ranks, why: str | None) -> str | None:
    """Why a rank has failed, the first that has: a collective. None where none has."""
    failures = gather_words(on.members, "programs for batches of other sizes")(why)
    return next((each for each in failures.values() if each is not None), None)
