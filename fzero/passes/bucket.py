"""The bucket pass: one all-gather and one reduce-scatter a bucket."""

from __future__ import annotations

from typing import Any

from fzero import ops
from fzero.layout import wire
from fzero.ops import Node, is_call
from fzero.passes.order import hops, settle, sink_gathers
from fzero.program import Program


def bucket(program: Program) -> Program:
    """Leaf gathers of one bucket become one all-gather, leaf scatters one reduce-scatter; leaves are views of it.

    Same results, bit for bit. A leaf gathered twice from the same slice is gathered once. Each all-gather stands at its
    first use and each reduce-scatter where the last of its gradients is ready. Two sets of slices in one layout
    (parameters and their moving average) keep gathers of their own.
    """
    program = program.copy("bucket")
    _merge_repeated(program)
    for members in _groups(program, ops.gather):
        _gather_together(program, members)
    settle(program.graph)
    for members in _groups(program, ops.scatter):
        _scatter_together(program, members)
    sink_gathers(program.graph)
    return program


def _merge_repeated(program: Program) -> None:
    """Gathers of the same slice become the first of them."""
    first: dict[tuple[object, ...], Node] = {}
    for node in program.graph.find_nodes(op="call_function", target=ops.gather):
        kept = first.setdefault(tuple(node.args[:3]), node)
        if kept is not node:
            program.substitute(node, kept)


def _groups(program: Program, target: Any) -> list[list[Node]]:
    """Nodes that may become one collective: of one bucket, dtype and tree of state, independent, each leaf once."""
    depth = hops(program.graph, lambda node: is_call(node, target))
    groups: dict[tuple[object, ...], dict[int, Node]] = {}
    for node in program.graph.find_nodes(op="call_function", target=target):
        key = (node.args[1], node.meta["val"].dtype, depth[node], _family(program, node))
        repeat = 0
        while node.args[2] in groups.setdefault((*key, repeat), {}):
            repeat += 1
        groups[*key, repeat][node.args[2]] = node
    return [[members[leaf] for leaf in sorted(members)] for members in groups.values()]


def _family(program: Program, node: Node) -> str | None:
    """Which tree of state a gathered slice comes from: what its argument's path has before the end it shares with the
    leaf's own path."""
    if not is_call(node, ops.gather):
        return None
    leaf = program.layout_of(node).leaves[node.args[2]].path
    source = node
    while source.all_input_nodes:
        source = source.all_input_nodes[0]
    if source.op != "placeholder":
        return None
    given, own = program.arguments[program.placeholders.index(source)].path.split("."), leaf.split(".")
    while given and own and given[-1] == own[-1]:
        given, own = given[:-1], own[:-1]
    return ".".join(given)


def _gather_together(program: Program, members: list[Node]) -> None:
    name, layout = members[0].args[1], program.layout_of(members[0])
    slices, leaves = [node.args[0] for node in members], [node.args[2] for node in members]
    with program.graph.inserting_after(max(slices)):
        pending = program.emit(ops.all_gather, slices, name, leaves, wire(layout, tuple(leaves)).numel)
    with program.graph.inserting_after(pending):
        buffer = program.emit(ops.wait, pending)
    for position, node in enumerate(members):
        with program.graph.inserting_after(buffer):
            program.substitute(node, program.emit(ops.whole, buffer, name, leaves, position, node.args[3]))


def _scatter_together(program: Program, members: list[Node]) -> None:
    name, layout = members[0].args[1], program.layout_of(members[0])
    leaves = [node.args[2] for node in members]
    size = wire(layout, tuple(leaves)).stride
    with program.graph.inserting_after(max(node.args[0] for node in members)):
        pending = program.emit(ops.reduce_scatter, [n.args[0] for n in members], name, leaves, size)
    with program.graph.inserting_after(pending):
        block = program.emit(ops.wait, pending)
    for position, node in enumerate(members):
        with program.graph.inserting_after(block):
            program.substitute(node, program.emit(ops.part, block, name, leaves, position, node.args[3]))
