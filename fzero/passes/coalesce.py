"""The coalesce pass: one collective for small all-reduces."""

from __future__ import annotations

import operator
from typing import Any

from fzero.passes.order import count_depths, find_dependences, find_mutable, restore_order
from fzero.program.arguments import operand_of
from fzero.program.operation import AGAIN, Node
from fzero.program.program import Program
from fzero.program.records import find_calls, record


def coalesce(program: Program) -> Program:
    """Turn independent all-reduces of one operation, axis and dtype into one, where the last of their operands is
    ready.

    The sums of squares behind a global norm then cost one collective, not one for each leaf. All-reduces of operands
    that the step overwrites stay as they are, and so do those that a backward pass repeats: together with others they
    would be there long before their use. Same results, bit for bit where the backend reduces elements alike at
    all positions; with two ranks every backend does.
    """
    if len(_find_reductions(program)) < 2:
        return program
    program = program.take()
    reductions = _find_reductions(program)
    held = find_mutable(program.graph)
    depth = count_depths(program.graph, set(reductions), find_dependences(held))
    groups: dict[tuple[Any, ...], list[Node]] = {}
    for node in reductions:
        value, (source, *how) = node.meta["val"], node.args
        if source not in held and AGAIN not in node.meta:
            key = node.target, *how, value.dtype, value.device, depth[node]
            groups.setdefault(key, []).append(node)
    for members in groups.values():
        if len(members) > 1:
            _reduce_together(program, members)
    restore_order(program.graph)
    return program


def _find_reductions(program: Program) -> list[Node]:
    """The nodes that may be reduced together, with their results as one list."""
    return find_calls(program.graph, lambda known: known.together is not None and not record(known.together).starts)


def _reduce_together(program: Program, members: list[Node]) -> None:
    _, *how = members[0].args
    values = [operand_of(node) for node in members]
    with program.graph.inserting_before(max(values).next):
        together = program.emit(record(members[0]).together, values, *how)
        reduced = [program.emit(operator.getitem, together, position) for position in range(len(members))]
    program.substitute_all(dict(zip(members, reduced)))
