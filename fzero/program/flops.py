"""Flops: how many a program has on one rank, by layer."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING

from fzero.program.arguments import item_of, name_in, operand_of
from fzero.program.operation import AGAIN, Node
from fzero.program.records import body_of, name_of, record, shares_memory, turns_of
from fzero.program.work import work

if TYPE_CHECKING:
    from fzero.program.program import Program

_PART = re.compile(r"#\d+$")


def count_flops(program: Program) -> dict[str, int]:
    """Layer -> the flops of one rank with the leaves of that layer, and for their gradients. An operation without such
    a leaf, such as attention, counts under its own name. All turns of a loop count, by the leaves of its body: those of
    equal layers as the first layer; a gradient that is summed up over turns counts under the name of its product. What
    is computed twice counts twice."""
    buckets = _find_leaves(program)
    gradients = _find_gradients(program)
    total = Counter[str]()
    for node in program.graph.nodes:
        body = body_of(node)
        if body is not None:
            for layer, flops in count_flops(body).items():
                total[layer] += turns_of(node) * flops
        elif flops := work(node).flops:
            weight = next((buckets[each] for each in node.all_input_nodes if each in buckets), None)
            total[_PART.sub("", weight or gradients.get(node, "")) or name_of(node)] += flops
    return dict(total)


def count_flops_again(program: Program) -> int:
    """The flops of one rank, among those of `count_flops`, of values that the backward pass computes again."""
    total = 0
    for node in program.graph.nodes:
        if AGAIN in node.meta:
            total += work(node).flops
        elif (body := body_of(node)) is not None:
            total += turns_of(node) * count_flops_again(body)
    return total


def _find_leaves(program: Program) -> dict[Node, str]:
    """Node -> the bucket of the leaf that it holds, whole or in slices."""
    found = {
        node: argument.bucket
        for node, argument in zip(program.placeholders, program.arguments)
        if argument.bucket is not None
    }
    for node in program.graph.nodes:
        bucket = _find_name(program, node)
        inherited = next((found[each] for each in node.all_input_nodes if each in found), None)
        if bucket is not None:
            found[node] = bucket
        elif inherited is not None and _keeps_elements(node):
            found[node] = inherited
    return found


def _find_gradients(program: Program) -> dict[Node, str]:
    """Node -> the bucket whose gradient it is, before or behind the sum over ranks."""
    returned = zip(program.returned, program.tensor_results)
    waiting = [(node, result.bucket) for node, result in returned if result.bucket is not None]
    for node in program.graph.nodes:
        bucket = _find_name(program, node)
        waiting += [(each, bucket) for each in node.all_input_nodes if bucket is not None]
    found: dict[Node, str] = {}
    while waiting:
        node, bucket = waiting.pop()
        if node in found:
            continue
        found[node] = bucket
        item = item_of(node)
        moved = None if item is None or record(item.source).moves is None else operand_of(item.source)
        if item is not None and isinstance(moved, (list, tuple)):
            waiting.append((moved[item.position], bucket))  # of a collective of several gradients
        elif _keeps_elements(node):
            waiting.append((node.all_input_nodes[0], bucket))
    return found


def _find_name(program: Program, node: Node) -> str | None:
    """The bucket that an operation names, which moves the bucket's leaves."""
    name = name_in(node) if node.op == "call_function" else None
    return name if name in program.layouts else None


def _keeps_elements(node: Node) -> bool:
    """Whether a node's result has the elements of its operand: a view, or a cast."""
    return node.op == "call_function" and (shares_memory(node) or name_of(node) == "_to_copy")
