"""The split pass: two calls for an update of many leaves, where the last gradients are not there yet."""

from __future__ import annotations

from fzero.passes.cut_rows import cut_rows
from fzero.passes.order import find_origins
from fzero.program.program import Program
from fzero.program.records import find_calls, record
from fzero.program.timeline import Lanes


def split(program: Program) -> Program:
    """Cut each update of many leaves (`Operation.gradients`), such as AdamW's, in two: first the leaves whose gradients
    have arrived by then, then the others, so that the first call hides the last reduce-scatters.

    Same results, bit for bit. `program.rates` says when gradients arrive. An update that needs all gradients before it
    begins, as with clipping by the global norm, is not cut.
    """
    if not find_calls(program.graph, lambda known: known.gradients is not None):
        return program
    program = program.take()
    origin, lanes = find_origins(program.graph, "scattered"), Lanes(program.costs())
    for node in list(program.graph.nodes):
        if origin.get(node, node) is not node:
            continue  # the wait for a gradient, and its slices: `prefetch`, which comes next, moves them to their use
        position = record(node).gradients if node.op == "call_function" else None
        if position is not None:
            late = [grad in origin and lanes.done_at[origin[grad]] > lanes.now for grad in node.args[position]]
            if len(set(late)) == 2:
                cut_rows(program, node, [[row for row, x in enumerate(late) if x is turn] for turn in (False, True)])
        lanes.run([node])
    return program
