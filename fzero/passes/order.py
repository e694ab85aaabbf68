"""The order of a graph's nodes: gathers at their first use, everything else as written. A helper of the passes."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

from torch import fx

from fzero.program.operation import Node
from fzero.program.records import find_writes, record, starts, storage


def find_derived(graph: fx.Graph, direction: str) -> dict[Node, Node]:
    """Each node that starts a "gathered" (or "scattered") buffer, and each node cheaply derived from one alone -> the
    node that starts it."""
    origin: dict[Node, Node] = {}
    changed = {storage(written) for node in graph.nodes for written in find_writes(node)}
    for node in graph.nodes:
        if starts(node) == direction:
            origin[node] = node
        elif _is_derived(node) and len(node.all_input_nodes) == 1 and storage(node) not in changed:
            (source,) = node.all_input_nodes
            if source in origin:
                origin[node] = origin[source]
    return origin


def _is_derived(node: Node) -> bool:
    return node.op == "call_function" and record(node).is_derived


def sink_gathers(graph: fx.Graph) -> None:
    """Move each all-gather, with what is derived from it, to its first use. Drops what has no use."""
    restore_order(graph)
    lazy = find_derived(graph, "gathered")
    order: dict[Node, None] = {}
    for root in graph.nodes:
        stack = [] if root in lazy else [root]
        while stack:
            waiting = [n for n in reversed(stack[-1].all_input_nodes) if n not in order]
            if waiting:
                stack.extend(waiting)
            else:
                order.setdefault(stack.pop())
    rearrange(graph, list(order))


def restore_order(graph: fx.Graph) -> None:
    """Move each node that stands before one of its inputs to just behind the last of them. Drops what has no use."""
    position = {node: index for index, node in enumerate(graph.nodes)}
    followers = _find_followers(graph)
    missing = {node: len(node.all_input_nodes) for node in position}
    for later in followers.values():
        for node in later:
            missing[node] += 1
    ready = [(index, node) for node, index in position.items() if not missing[node]]
    order: list[Node] = []
    while ready:
        _, node = heapq.heappop(ready)
        order.append(node)
        for user in (*node.users, *followers.get(node, ())):
            missing[user] -= 1
            if not missing[user]:
                heapq.heappush(ready, (position[user], user))
    rearrange(graph, order)
    graph.eliminate_dead_code()


def _find_followers(graph: fx.Graph) -> dict[Node, list[Node]]:
    """Node -> nodes that must stay behind it although they do not take its value: both touch memory that is changed."""
    changed = {storage(written) for node in graph.nodes for written in find_writes(node)}
    last: dict[Any, Node] = {}
    followers: dict[Node, list[Node]] = {}
    for node in graph.nodes if changed else ():
        for memory in {storage(n) for n in (node, *node.all_input_nodes)} & changed:
            if memory in last:
                followers.setdefault(last[memory], []).append(node)
            last[memory] = node
    return followers


def rearrange(graph: fx.Graph, order: list[Node]) -> None:
    """Put the graph's nodes into this order; the output stays last."""
    anchor = graph._root
    for node in order:
        anchor.append(node)
        anchor = node


def hops(graph: fx.Graph, counted: Callable[[Node], bool]) -> dict[Node, int]:
    """For each node the most counted nodes on a path that ends in it: equal counts of two counted nodes mean that
    neither depends on the other."""
    depth: dict[Node, int] = {}
    for node in graph.nodes:
        below = max((depth[n] for n in node.all_input_nodes), default=0)
        depth[node] = below + bool(counted(node))
    return depth
