"""Comm: the collectives of a program, from its graph, before anything runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import torch

from fzero.program.operation import Node
from fzero.program.records import record

if TYPE_CHECKING:
    from fzero.program.program import Program


class Comm(NamedTuple):
    """One collective. `nbytes` is the size of the full buffer: the parts of all ranks together, padding included."""

    op: str  # the name of the collective, as of torch.distributed's: "all_gather", "all_to_all"
    axis: str
    bucket: str | None
    dtype: torch.dtype
    nbytes: int


def list_comm(program: Program) -> list[Comm]:
    """The program's collectives, in the order in which all ranks start them."""
    return [entry for node in program.graph.nodes for entry in comm_of(program, node)]


def comm_of(program: Program, node: Node) -> Iterable[Comm]:
    """The collectives that a node starts, in order."""
    moves = record(node).moves if node.op == "call_function" else None
    return () if moves is None else moves(program, node)
