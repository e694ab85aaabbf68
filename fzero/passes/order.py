"""The order of a graph's nodes: gathers at their first use, everything else as traced. Helpers of the passes."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

from torch import fx

from fzero.base.torch_private import find_root
from fzero.program.operation import Node
from fzero.program.records import find_writes, record, starts, storage


def find_origins(graph: fx.Graph, direction: str) -> dict[Node, Node]:
    """Node -> the node that starts the buffer that it comes from, for "gathered" or for "scattered" buffers.

    Covers the starting nodes themselves, and every node that is cheaply derived (`Operation.is_derived`) from one such
    buffer alone and whose memory nothing writes to.
    """
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
    """Move each all-gather, and the nodes derived from its buffer, to the first use. Erases nodes without a use."""
    restore_order(graph)
    lazy = find_origins(graph, "gathered")
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
    """Move each node that stands before one of its inputs behind the last of them. Erases nodes without a use.

    Nodes that stand behind their inputs keep their order: the heap yields the ready node that was first in the graph.
    """
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
    """Node -> the nodes that must stay behind it without using its value, because both touch memory that some node
    overwrites."""
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
    anchor = find_root(graph)
    for node in order:
        anchor.append(node)
        anchor = node


def count_depths(graph: fx.Graph, counted: Callable[[Node], bool]) -> dict[Node, int]:
    """Node -> the largest number of counted nodes on a path that ends in the node.

    Two counted nodes of equal depth do not depend on each other.
    """
    depth: dict[Node, int] = {}
    for node in graph.nodes:
        below = max((depth[n] for n in node.all_input_nodes), default=0)
        depth[node] = below + bool(counted(node))
    return depth
