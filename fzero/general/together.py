"""Ranks whose batches have other sizes: each runs the program of its own sizes, and all have one schedule.

A general program leaves open the sizes in which ranks differ. Ranks schedule it for the largest of these sizes, so that
all start the same collectives in the same order, and each fills in its own sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from fzero.base.formulas import LEAST
from fzero.base.torch_private import pytree_leaves
from fzero.base.torch_private_traces import has_open_sizes
from fzero.general.programs import General
from fzero.general.sizes import Place, list_own_strides
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
"""The shape and the strides of each batch of a call, and None for each other leaf."""


class RankCall(NamedTuple):
    """The signature and the leaves of the call of one rank."""

    signature: Signature
    leaves: Sequence[Any]


class Together:
    """A general program for ranks whose batches have other sizes, of which it keeps the programs of `limit` sizes."""

    def __init__(self, general: General, on: Ranks, name: str, limit: int) -> None:
        self.general, self._on, self._name, self._limit = general.without_templates(), on, name, limit
        self.general.watches = general.watches
        self._made: dict[Any, Any] = {}

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
        sizes = "" if found is None else self.general.find_sizes(sign_all(call.signature, found))
        return ([MISFIT] * len(self.general.sizes.places), []) if isinstance(sizes, str) else (sizes, found or [])

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
    """The sizes of a signature."""
    return [(tuple(x[0]), tuple(x[3])) if is_batch(x) else None for x in signature[2]]


def group_places(tables: Sequence[Table]) -> tuple[tuple[Place, ...], ...] | str:
    """The places at which sizes differ in tables, by the sizes that they have in all of them. Where tables differ in
    more than sizes, and where a size can not be open, the reason."""
    groups = dict[tuple[int, ...], list[Place]]()
    if len(set(map(len, tables))) > 1:
        return "ranks read other values in their batches"
    for i, column in enumerate(zip(*tables)):
        own = [None if x is None else (len(x[0]), list_own_strides((x[0], None, None, x[1]))) for x in column]
        if any(x != own[0] for x in own):
            return "batches differ in more than sizes"
        if own[0] is None:
            continue
        count, strides = own[0]
        for dim in (*range(count), *(count + x for x in strides)):
            sizes = tuple((*shape, *stride)[dim] for shape, stride in column)
            if len(set(sizes)) > 1:
                groups.setdefault(sizes, []).append((i, dim))
    least = min((min(sizes) for sizes in groups), default=LEAST)
    if least < LEAST:
        return f"a size of {least} has a program of its own"
    return tuple(map(tuple, groups.values())) or ALIKE


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


def find_common_places(on: Ranks, tables: Sequence[Table], name: str) -> tuple[tuple[Place, ...], ...] | str:
    """`group_places` of the tables of all ranks: a collective."""
    gather = gather_words(on.members, f"the sizes of the batches of {name}")
    return group_places([table for own in gather(list(tables)).values() for table in own])
