"""The coalesce pass: small reductions travel together."""

from __future__ import annotations

import operator

from fzero import ops
from fzero.ops import Node, is_call
from fzero.passes.order import hops, settle
from fzero.program import Program


def coalesce(program: Program) -> Program:
    """All-reduces of one operation, axis and dtype that do not depend on each other become one.

    Same results, bit for bit where the backend reduces each element alike whatever its position, as two ranks always
    do. The sums of squares behind a global norm cost one collective, not one a leaf.
    """
    program = program.copy("coalesce")
    depth = hops(program.graph, lambda node: is_call(node, ops.all_reduce))
    groups: dict[tuple[object, ...], list[Node]] = {}
    for node in program.graph.find_nodes(op="call_function", target=ops.all_reduce):
        value = node.meta["val"]
        groups.setdefault((*node.args[1:], value.dtype, value.device, depth[node]), []).append(node)
    for members in groups.values():
        if len(members) > 1:
            _reduce_together(program, members)
    settle(program.graph)
    return program


def _reduce_together(program: Program, members: list[Node]) -> None:
    with program.graph.inserting_after(max(members)):
        together = program.emit(ops.all_reduce_list, [node.args[0] for node in members], *members[0].args[1:])
    for position, node in reversed(list(enumerate(members))):
        with program.graph.inserting_after(together):
            program.substitute(node, program.emit(operator.getitem, together, position))
