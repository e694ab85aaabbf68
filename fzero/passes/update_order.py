"""Update order: the host reads, updates and writes one bucket behind the other, each as soon as its gradients are there."""

from __future__ import annotations

from collections.abc import Mapping, Set

from torch import fx

from fzero.program.operation import Node
from fzero.program.records import starts


def order_by_bucket(graph: fx.Graph, lazy: Set[Node], sends: Mapping[Node, str]) -> list[Node]:
    """The nodes in a new order: `lazy` nodes, which run on the host, stand in front of their first use.

    `sends` are copies of results that leave the host, each with its bucket. Those of a bucket stand together: behind
    the values that they need from elsewhere, and behind the start of the next reduce-scatter. The other nodes keep
    their order.
    """
    order: dict[Node, None] = {}
    waiting: dict[str, list[Node]] = {}
    for node, bucket in sends.items():
        waiting.setdefault(bucket, []).append(node)
    needs = {bucket: _find_needs(nodes, lazy) for bucket, nodes in waiting.items()}
    for node in graph.nodes:
        if node.op == "output":
            _place([x for nodes in waiting.values() for x in nodes], order)
            _place([x for x in graph.nodes if x in lazy], order)
        if node not in lazy and node not in sends:
            _place([node], order)
        if starts(node) == "scattered":
            for bucket in [bucket for bucket in waiting if needs[bucket] <= order.keys()]:
                _place(waiting.pop(bucket), order)
    return list(order)


def _find_needs(nodes: list[Node], lazy: Set[Node]) -> set[Node]:
    """The nodes that are not lazy, of which these nodes and the lazy ones in front of them use the values."""
    found, stack = set[Node](), list(nodes)
    seen = set(nodes)
    while stack:
        for source in stack.pop().all_input_nodes:
            if source in seen:
                continue
            seen.add(source)
            if source in lazy or source in nodes:
                stack.append(source)
            else:
                found.add(source)
    return found


def _place(nodes: list[Node], order: dict[Node, None]) -> None:
    """Add nodes to an order, each behind what it uses."""
    stack = list(reversed(nodes))
    while stack:
        waiting = [x for x in reversed(stack[-1].all_input_nodes) if x not in order]
        if waiting:
            stack.extend(waiting)
        else:
            order.setdefault(stack.pop())
