"""The coalesce pass: one collective for small all-reduces."""

from __future__ import annotations

import operator
from typing import Any

from fzero.passes.order import count_depths, find_dependences, find_mutable, restore_order
from fzero.program import ops
from fzero.program.arguments import Reduction
from fzero.program.operation import Node
from fzero.program.program import Program


def coalesce(program: Program) -> Program:
    """Turn independent all-reduces of one operation, axis and dtype into one, where the last of their operands is
    ready.

    The sums of squares behind a global norm then cost one collective, not one for each leaf. All-reduces of operands
    that the step overwrites stay as they are. Same results, bit for bit where the backend reduces elements alike at
    all positions; with two ranks every backend does.
    """
    if len(program.graph.find_nodes(op="call_function", target=ops.all_reduce)) < 2:
        return program
    program = program.take()
    reductions = program.graph.find_nodes(op="call_function", target=ops.all_reduce)
    held = find_mutable(program.graph)
    depth = count_depths(program.graph, set(reductions), find_dependences(held))
    groups: dict[tuple[Any, ...], list[Node]] = {}
    for node in reductions:
        value, (source, op, axis) = node.meta["val"], Reduction(*node.args)
        if source not in held:
            groups.setdefault((op, axis, value.dtype, value.device, depth[node]), []).append(node)
    for (op, axis, *_), members in groups.items():
        if len(members) > 1:
            _reduce_together(program, members, op, axis)
    restore_order(program.graph)
    return program


def _reduce_together(program: Program, members: list[Node], op: str, axis: str) -> None:
    values = [Reduction(*node.args).value for node in members]
    with program.graph.inserting_before(max(values).next):
        together = program.emit(ops.all_reduce_list, values, op, axis)
        reduced = [program.emit(operator.getitem, together, position) for position in range(len(members))]
    program.substitute_all(dict(zip(members, reduced)))
