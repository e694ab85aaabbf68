"""The bucket pass: one all-gather and one reduce-scatter a bucket."""

from __future__ import annotations

from itertools import count
from typing import Any

import torch

from fzero.layout.layout import wire
from fzero.passes.order import hops, restore_order, sink_gathers
from fzero.program import ops
from fzero.program.operation import Node
from fzero.program.program import Program
from fzero.program.records import is_call


def bucket(program: Program) -> Program:
    """Leaf gathers of one bucket become one all-gather, leaf scatters one reduce-scatter; leaves are views of it.

    Same results, bit for bit where kernels do not mind how their operands are aligned, as MKL does unless MKL_CBWR is
    set: a leaf of a buffer may lie anywhere. A leaf gathered twice from the same slice is gathered once. State
    arguments that are cast to be gathered are cast into what is sent, each time. Each all-gather stands at its first
    use and each reduce-scatter where the last of its gradients is ready. Two sets of slices in one layout (parameters
    and their moving average) keep gathers of their own.
    """
    program = program.copy()
    _merge_repeated(program)
    for members in _groups(program, ops.gather):
        _move_together(program, members, ops.all_gather, ops.whole)
    restore_order(program.graph)
    for members in _groups(program, ops.scatter):
        _move_together(program, members, ops.reduce_scatter, ops.part)
    sink_gathers(program.graph)
    return program


def _merge_repeated(program: Program) -> None:
    """Gathers of the same slice become the first of them."""
    first: dict[tuple[object, ...], Node] = {}
    for node in program.graph.find_nodes(op="call_function", target=ops.gather):
        kept = first.setdefault(node.args, node)
        if kept is not node:
            program.substitute(node, kept)


def _groups(program: Program, target: Any) -> list[list[Node]]:
    """Nodes that may become one collective: of one bucket, dtype and tree of state, independent, each leaf once."""
    depth = hops(program.graph, lambda node: is_call(node, target))
    path = {node: argument.path for node, argument in zip(program.placeholders, program.arguments)}
    groups: dict[tuple[object, ...], dict[int, Node]] = {}
    for node in program.graph.find_nodes(op="call_function", target=target):
        key = (node.args[1], node.meta["val"].dtype, depth[node], _family(program, node, path))
        repeats = (groups.setdefault((*key, repeat), {}) for repeat in count())
        next(members for members in repeats if node.args[2] not in members)[node.args[2]] = node
    return [[members[leaf] for leaf in sorted(members)] for members in groups.values()]


def _family(program: Program, node: Node, path: dict[Node, str]) -> tuple[str, ...] | None:
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
    given, own = path[source].split("."), leaf.split(".")
    while given and own and given[-1] == own[-1]:
        given.pop()
        own.pop()
    return tuple(given)


def _move_together(program: Program, members: list[Node], start: Any, take: Any) -> None:
    """Behind the last of their operands, one collective, a wait for it, and what `take` takes for each member."""
    name, values, leaves = members[0].args[1], [node.args[0] for node in members], [node.args[2] for node in members]
    sent = wire(program.layouts[name], tuple(leaves))
    size, (values, how) = (sent.numel, _uncast(values)) if start is ops.all_gather else (sent.stride, (values, {}))
    with program.graph.inserting_before(max(values).next):
        pending = program.emit(start, values, name, leaves, size, **how)
        buffer = program.emit(ops.wait, pending)
        taken = [program.emit(take, buffer, name, leaves, i, node.args[3]) for i, node in enumerate(members)]
    program.substitute_all(dict(zip(members, taken)))


def _uncast(slices: list[Node]) -> tuple[list[Node], dict[str, Any]]:
    """Slices as they were before they were cast, and what has an all-gather cast them."""
    given = [node.args[0] if _is_cast(node) else node for node in slices]
    return given, {} if given == slices else {"dtype": slices[0].meta["val"].dtype}


def _is_cast(node: Node) -> bool:
    """Whether a node is a state argument in another dtype, and nothing else."""
    return (
        is_call(node, torch.ops.aten._to_copy.default)
        and node.kwargs.keys() == {"dtype"}
        and node.args[0].op == "placeholder"
    )
