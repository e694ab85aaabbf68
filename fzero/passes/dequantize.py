"""The dequantize pass, in front of all others: each use of a quantized leaf gets a dequantized value of its own."""

from __future__ import annotations

import torch

from fzero.passes.order import find_changes, is_cast
from fzero.program import ops
from fzero.program.arguments import operand_of
from fzero.program.operation import Node
from fzero.program.program import Program
from fzero.program.records import is_call, record, storage
from fzero.values.regions import get_mark, set_mark


def dequantize(program: Program) -> Program:
    """Dequantize each quantized leaf in front of every node that uses it, with its views and casts. Changes the
    program's own graph, and returns the program.

    Same results, bit for bit. A trace dequantizes a leaf once, where the step first reads it, and autograd keeps the
    result for the backward pass. From here on nothing of full precision is alive behind the node that uses it. A leaf
    that the step writes into, once it is dequantized, stays as it is.
    """
    graph = program.graph
    found = graph.find_nodes(op="call_function", target=ops.dequantize)
    changed = find_changes(graph) if found else set()
    for node in found:
        chain = _find_chain(node)
        if changed.intersection(map(storage, chain)):
            continue
        for user in dict.fromkeys(user for link in chain for user in link.users if user not in chain):
            copies = _copy_chain(program, chain, user)
            for source, copy in copies.items():
                user.replace_input_with(source, copy)
            program.refresh(copies.values())
        for link in reversed(chain):
            graph.erase_node(link)
    return program


def _find_chain(node: Node) -> list[Node]:
    """A dequantized leaf, and what is cheaply derived from it, in order."""
    chain, stack = {node}, [node]
    while stack:
        for user in stack.pop().users:
            is_derived = user.op == "call_function" and (record(user).is_derived or is_cast(user))
            if is_derived and len(user.all_input_nodes) == 1:
                chain.add(user)
                stack.append(user)
    return sorted(chain)


def _copy_chain(program: Program, chain: list[Node], user: Node) -> dict[Node, Node]:
    """Copies, in front of a node, of what the node uses of a chain. They belong to the turns and regions of the node,
    and to the backward pass where the node does."""
    copies: dict[Node, Node] = {}

    def copy(node: Node) -> Node:
        if node not in chain:
            return node
        if node not in copies:
            dtype = node.meta["val"].dtype
            source = copy(operand_of(node)) if is_cast(node) and dtype.is_floating_point else None
            if source is not None and is_call(source, ops.dequantize) and source.meta["val"].dtype == torch.float32:
                codes, scales, shape, _, *rest = source.args  # it computes in float32, and rounds once
                copies[node] = program.emit(ops.dequantize, codes, scales, shape, dtype, *rest)
            else:
                copies[node] = program.repeat(node, copy)
            copies[node].meta.update({key: each for key, each in node.meta.items() if key != "val"})
            set_mark(copies[node].meta, get_mark(user)._replace(port=None))
        return copies[node]

    with program.graph.inserting_before(user):
        return {node: copy(node) for node in user.all_input_nodes if node in chain}
