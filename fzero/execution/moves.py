"""Moves: the exchanges that one call of an operation from outside yields, held against the collectives that its record
lists."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fzero.base.dtypes import name_dtype
from fzero.base.errors import FzeroError
from fzero.base.sizes import format_size
from fzero.program.comm import Comm
from fzero.program.operation import Node
from fzero.program.ops.buckets import sum_dtype
from fzero.program.program import Program
from fzero.program.records import comm_of
from fzero.ranks.exchanges import AllGather, AllReduce, AllToAll, Exchange, ReduceScatter, Steps
from fzero.ranks.transports.reduction import JOINS

_NAMES = "ops.AllGather, ops.ReduceScatter, ops.AllReduce or ops.AllToAll"
_Refuse = Callable[[str, str], FzeroError]
"""Problem, way out -> the error of an operation on a rank."""


class Moves:
    """The collectives that `moves` lists for a call of a node, and how many of them the operation has yielded."""

    def __init__(self, program: Program, node: Node, refuse: _Refuse) -> None:
        self._mesh, self._refuse, self._count = program.mesh, refuse, 0
        listed = comm_of(program, node)
        self._listed = [x for x in listed if program.mesh.size(x.axis) > 1]  # alone, a rank exchanges nothing

    @property
    def is_empty(self) -> bool:
        """Whether the operation exchanges nothing with other ranks."""
        return not self._listed

    def check(self, asked: Any) -> None:
        """Refuse an exchange that `moves` does not list at this place, and one that no transport performs."""
        axis = getattr(asked, "axis", None)
        if axis is None:
            raise self._refuse(f"perform yields a {type(asked).__name__}, which is no exchange", f"yield {_NAMES}")
        if not isinstance(axis, str) or not self._mesh.has(axis):
            problem = f"perform yields an exchange over the axis {axis!r}; the mesh has {self._mesh.names}"
            raise self._refuse(problem, "name an axis of it")
        _check_operands(asked, self._refuse)
        world = self._mesh.size(axis)
        if world == 1:
            return
        self._count += 1
        if self._count > len(self._listed):
            raise self._disagree(f"lists {len(self._listed)} exchanges", f"yields another, {asked.what}")
        listed, does = self._listed[self._count - 1], _list_exchange(asked, world)
        if does is None:
            return
        is_uneven = isinstance(asked, AllToAll) and asked.splits is not None  # `check_splits` knows its bytes
        found = does._replace(bucket=listed.bucket, nbytes=listed.nbytes if is_uneven else does.nbytes)
        if found != listed:
            says = f"lists {_format_comm(listed)} as exchange {self._count}"
            raise self._disagree(says, f"yields {_format_comm(does)}")

    def check_splits(self, asked: AllToAll) -> Steps:
        """Refuse an all-to-all in which a rank gives another rank more or less than that one takes. Ranks tell each
        other what they give and take."""
        world = self._mesh.size(asked.axis)
        splits = self._read_splits(asked, world)
        if world == 1:
            return
        mine = torch.tensor([*splits[0], *splits[1]], device=asked.blocks.device)
        every = yield AllGather(f"splits of {asked.what}", asked.axis, mine)
        rows = every.view(world, 2, world).tolist()
        for giver, (given, _) in enumerate(rows):
            for taker, (_, taken) in enumerate(rows):
                if given[taker] != taken[giver]:
                    problem = (
                        f"perform yields splits that do not fit: along {asked.axis!r} rank {giver} gives "
                        f"{given[taker]} elements to rank {taker}, which takes {taken[giver]}"
                    )
                    raise self._refuse(problem, "let each rank take what the other gives")
        if asked.splits is None:
            return
        busiest = max(sum(given) - given[i] for i, (given, _) in enumerate(rows))
        nbytes = -(-busiest * world // (world - 1)) * asked.blocks.element_size()
        listed = self._listed[self._count - 1]
        if listed.nbytes != nbytes:
            says = f"lists {_format_comm(listed)} as exchange {self._count}"
            does = f"moves {nbytes} B, {world} times what the busiest rank sends to each other rank on average"
            raise self._disagree(says, does)

    def _read_splits(self, asked: AllToAll, world: int) -> tuple[list[int], list[int]]:
        """What the rank gives to each rank and takes from each, two lists of numbers of elements."""
        way_out = "give splits=(given, taken), two lists with a whole number of elements for each rank"
        pair = None
        if asked.splits is not None:
            try:
                first, second = ([*map(operator.index, x)] for x in asked.splits)
            except (TypeError, ValueError):
                raise self._refuse(f"perform yields the splits {asked.splits!r}", way_out) from None
            pair = first, second
        try:
            given, taken = map(list, replace(asked, splits=pair).split(world))
        except FzeroError as error:
            raise self._refuse(f"perform yields an all-to-all that {error.problem}", error.way_out) from error
        if min([*given, *taken]) < 0:
            raise self._refuse(f"perform yields splits below 0: gives {given}, takes {taken}", way_out)
        return given, taken

    def check_end(self) -> None:
        """Refuse an operation that ends before it has yielded all that `moves` lists."""
        if self._count < len(self._listed):
            entry = _format_comm(self._listed[self._count])
            raise self._disagree(f"lists {entry} as exchange {self._count + 1}", "ends before it")

    def _disagree(self, says: str, does: str) -> FzeroError:
        return self._refuse(f"moves {says}, and perform {does}", "make perform and moves agree")


def _check_operands(asked: Exchange, refuse: _Refuse) -> None:
    """Refuse an exchange of what is no tensor, and a reduction that there is not."""
    sent: Any = ()
    if isinstance(asked, AllReduce):
        sent = [asked.value]
        if asked.op not in JOINS:
            problem = f"perform yields an AllReduce by {asked.op!r}"
            raise refuse(problem, f"reduce by one of {', '.join(map(repr, JOINS))}")
    elif isinstance(asked, AllGather):
        sent = [asked.block]
    elif isinstance(asked, AllToAll):
        sent = [asked.blocks]
    elif isinstance(asked, ReduceScatter):
        sent = asked.fulls
    wrong = sent if not isinstance(sent, Sequence) else next((x for x in sent if not isinstance(x, Tensor)), ())
    if wrong != ():
        problem = f"perform yields an {type(asked).__name__} of a {type(wrong).__name__}"
        raise refuse(problem, "exchange tensors: join those of a list by torch.cat")


def _list_exchange(asked: Exchange, world: int) -> Comm | None:
    """An exchange as `moves` lists it; None for one of a user's own class."""
    if not isinstance(asked, (AllGather, AllReduce, AllToAll, ReduceScatter)):
        return None
    value, numel = asked.measure(world)
    dtype = sum_dtype(value) if isinstance(asked, (AllReduce, ReduceScatter)) else value.dtype
    return Comm(asked.name, asked.axis, None, dtype, numel * dtype.itemsize)


def _format_comm(entry: Comm) -> str:
    size = f"{entry.nbytes} B" if entry.nbytes < 1 << 20 else f"{format_size(entry.nbytes)} ({entry.nbytes} B)"
    return f"{entry.op} over {entry.axis!r} of {name_dtype(entry.dtype)}, {size}"
