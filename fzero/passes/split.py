"""The split pass: two calls for an AdamW update, where the last gradients are not there yet."""

from __future__ import annotations

import operator
from collections.abc import Sequence

from fzero.passes.order import find_origins
from fzero.program import ops
from fzero.program.operation import Node
from fzero.program.program import Program
from fzero.program.records import is_call
from fzero.program.timeline import Lanes


def split(program: Program) -> Program:
    """Cut each `ops.adamw` in two: first the leaves whose gradients have arrived by then, then the others, so that the
    first call hides the last reduce-scatters.

    Same results, bit for bit. `program.rates` says when gradients arrive. An update that needs all gradients before it
    begins, as with clipping by the global norm, is not cut.
    """
    program = program.copy()
    origin, lanes = find_origins(program.graph, "scattered"), Lanes(program.costs())
    for node in list(program.graph.nodes):
        if origin.get(node, node) is not node:
            continue  # the wait for a gradient, and its slices: `prefetch`, which comes next, moves them to their use
        if is_call(node, ops.adamw):
            late = [grad in origin and lanes.done_at[origin[grad]] > lanes.now for grad in node.args[1]]
            if len(set(late)) == 2:
                _cut(program, node, late)
        lanes.run([node])
    return program


def _cut(program: Program, call: Node, late: Sequence[bool]) -> None:
    """Replace one call by two: the first for the leaves that are not late, the second for those that are."""
    columns, items = list(call.users), dict[tuple[Node, int], Node]()
    with program.graph.inserting_before(call.next):
        for turn in (False, True):
            rows = [row for row, is_late in enumerate(late) if is_late is turn]
            lists = [[column[row] for row in rows] for column in call.args[:4]]
            part = program.emit(ops.adamw, *lists, *call.args[4:])
            for column in columns:
                news = program.emit(operator.getitem, part, column.args[1])
                items |= {(column, row): program.emit(operator.getitem, news, at) for at, row in enumerate(rows)}
    program.substitute_all({old: items[column, old.args[1]] for column in columns for old in column.users})
    for node in (*columns, call):
        program.graph.erase_node(node)
