"""Ranks whose batches have other sizes: each runs the program of its own sizes, and all have one schedule.

A general program leaves open the sizes in which ranks differ. Ranks schedule it for the largest of these sizes, so that
all start the same collectives in the same order, and each fills in its own sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from fzero.base.formulas import LEAST
from fzero.base.torch_private import pytree_leaves
from fzero.base.torch_private_traces import has_open_sizes
from fzero.general.programs import General
from fzero.general.sizes import Place, Sizes, find_size, is_constant, list_own_strides, open_form
from fzero.program.operation import Node
from fzero.program.program import Program
from fzero.program.readings import Found
from fzero.program.records import find_bodies, record
from fzero.ranks.ranks import Ranks
from fzero.ranks.together import gather_words
from fzero.tracing.signatures import Signature, is_batch, sign_all

ALIKE = "batches do not differ in sizes"
MISFIT = 2**48
"""A size that no batch has: of a rank whose call the program does not fit."""
Table = list[Any]
"""The shape and the strides of each batch of a call, the text of each constant, and None for each other leaf."""


class RankCall(NamedTuple):
    """The signature and the leaves of the call of one rank."""

    signature: Signature
    leaves: Sequence[Any]


Trace = Callable[[RankCall, Found], Program]
"""The program of a call, before any pass, where readings find these values."""


class Together:
    """A general program for ranks whose batches have other sizes, of which it keeps the programs of `limit` sizes.

    `like` is the general program of ranks that have the same sizes. A trace of some sizes is held against it: where
    ranks differ, so do the numbers that follow from sizes, and means over ranks stand elsewhere."""

    def __init__(self, general: General, like: General, on: Ranks, name: str, limit: int, trace: Trace) -> None:
        self.general, self._like, self._on, self._name, self._limit = general, like, on, name, limit
        self._trace = trace
        self._made: dict[Any, Any] = {}
        self._small: dict[tuple[int, ...], bool] = {}  # sizes below `LEAST` -> whether they have the same program

    def find(self, calls: Sequence[RankCall]) -> list[tuple[Any, Found]] | None:
        """What is finished for the calls of the ranks of this process, and what readings find; None on all ranks where
        the program does not fit the call of one. A collective of one number for each open size."""
        known = [self._find_sizes(call) for call in calls]
        largest = self._find_largest([sizes for sizes, _ in known])
        if largest is None:
            return None
        finish, is_new = self.general.find_finish(largest)
        made = [(self._finish(finish, tuple(sizes)), found) for sizes, found in known]
        if is_new and self._find_largest([self._find_sizes(call)[0] for call in calls]) is None:
            return None  # the schedule has asked for more
        return made

    def _find_sizes(self, call: RankCall) -> tuple[list[int], Found]:
        """The sizes of a call, and what readings find. `MISFIT` for each size where the program does not fit."""
        found = self.general.read(*call) if all(x.is_unchanged for x in self.general.watches) else None
        sizes = "" if found is None else self.general.find_sizes(sign_all(call.signature, found), least=0)
        if found is None or isinstance(sizes, str) or not self._serves(call, found, sizes):
            return [MISFIT] * len(self.general.sizes.places), []
        return sizes, found

    def _serves(self, call: RankCall, found: Found, sizes: list[int]) -> bool:
        """Whether the sizes of a call have this program. Of sizes below `LEAST` a trace shows it."""
        key = tuple(sizes)
        if min(sizes) < LEAST and key not in self._small:
            self._small[key] = self._like.find_difference(sizes, self._trace(call, found)) is None
        return self._small.get(key, True)

    def _find_largest(self, rows: Sequence[Sequence[int]]) -> list[int] | None:
        """The largest sizes of any rank; None on all ranks where the program does not fit one."""
        largest = list[int]()
        for column in zip(*rows):
            largest.append(self._on.find_largest(max(column), f"the largest batch of {self._name}"))
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


def tabulate(signature: Signature) -> Table:
    """The table of a call."""
    leaves = signature[2]
    values = {i: repr(x[1]) for i, x in enumerate(leaves) if is_constant(x) and isinstance(x, tuple)}
    return [(tuple(x[0]), tuple(x[3])) if is_batch(x) else values.get(i) for i, x in enumerate(leaves)]


Groups = dict[tuple[int, ...], list[Place]]
"""Places at which sizes differ in tables, by the sizes that they have in all of them."""


def group_places(tables: Sequence[Table]) -> Groups | str:
    """The groups of places of tables. Where tables differ in more than sizes, the reason."""
    groups = Groups()
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
            if len(set(sizes)) > 1:
                groups.setdefault(sizes, []).append((i, dim))
    return groups or ALIKE


def open_sizes(signature: Signature, groups: Groups) -> Sizes:
    """The sizes that are open in a program for all ranks, and examples: those of a rank's `signature`, or larger ones
    for sizes that have programs of their own."""
    settings, treedef, described = signature
    made, places = list(described), tuple(map(tuple, groups.values()))
    own = Sizes(signature, places)
    small = {place: LEAST + max(sizes) for sizes, group in groups.items() for place in group}
    small = {place: size for place, size in small.items() if find_size(signature, place) < LEAST}
    for i in {i for i, _ in small}:
        shape, strides = open_form(described[i], small, i)
        made[i] = (torch.Size(shape), *described[i][1:3], tuple(strides), *described[i][4:])
    return own._replace(signature=(settings, treedef, made))


def find_open_moves(programs: Iterable[Program]) -> Node | None:
    """The first collective of values whose shapes are open."""
    for program in programs:
        for node in program.graph.nodes:
            if node.op == "call_function" and record(node).moves is not None:
                values = pytree_leaves([x.meta.get("val") for x in (node, *node.all_input_nodes)])
                if any(has_open_sizes(x) for x in values if hasattr(x, "untyped_storage")):
                    return node
        found = find_open_moves(find_bodies(program.graph))
        if found is not None:
            return found
    return None


def find_common_places(on: Ranks, tables: Sequence[Table], name: str) -> Groups | str:
    """`group_places` of the tables of all ranks: a collective."""
    gather = gather_words(on.members, f"the sizes of the batches of {name}")
    return group_places([table for own in gather(list(tables)).values() for table in own])
