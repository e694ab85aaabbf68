"""The order of a graph's nodes: gathers at their first use, everything else as written. A helper of the passes."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fzero.program import ops
from fzero.program.ops import Node, is_call, overwritten, storage

_aten = torch.ops.aten
VIEWS = frozenset({
    _aten.alias.default, _aten.detach.default, _aten.view.default, _aten._unsafe_view.default, _aten.t.default,
    _aten.transpose.int, _aten.permute.default, _aten.unsqueeze.default, _aten.squeeze.default, _aten.squeeze.dim,
    _aten.squeeze.dims, _aten.expand.default, _aten.slice.Tensor, _aten.select.int, _aten.as_strided.default,
    _aten.unfold.default, _aten.diagonal.default, _aten.view.dtype, _aten.real.default,
    ops.wait, ops.whole, ops.part,
})  # fmt: skip
"""Operations of one tensor whose result shares its memory."""

DERIVED = VIEWS | {_aten._to_copy.default, _aten.clone.default}
"""Operations so cheap that they are done again rather than keeping a gathered leaf alive for them."""


def gathered(graph: fx.Graph) -> dict[Node, Node]:
    """Each all-gather, and each node derived from one alone -> that all-gather."""
    return _derived(graph, ops.all_gather)


def scattered(graph: fx.Graph) -> dict[Node, Node]:
    """Each reduce-scatter, and each node derived from one alone -> that reduce-scatter."""
    return _derived(graph, ops.reduce_scatter)


def _derived(graph: fx.Graph, target: Any) -> dict[Node, Node]:
    origin: dict[Node, Node] = {}
    changed = {storage(written) for node in graph.nodes for written in overwritten(node)}
    for node in graph.nodes:
        if is_call(node, target):
            origin[node] = node
        elif node.target in DERIVED and len(node.all_input_nodes) == 1 and storage(node) not in changed:
            (source,) = node.all_input_nodes
            if source in origin:
                origin[node] = origin[source]
    return origin


def sink_gathers(graph: fx.Graph) -> None:
    """Move each all-gather, with what is derived from it, to its first use. Drops what has no use."""
    settle(graph)
    lazy = gathered(graph)
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


def settle(graph: fx.Graph) -> None:
    """Move each node that stands before one of its inputs to just behind the last of them. Drops what has no use."""
    position = {node: index for index, node in enumerate(graph.nodes)}
    followers = _followers(graph)
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


def _followers(graph: fx.Graph) -> dict[Node, list[Node]]:
    """Node -> nodes that must stay behind it although they do not take its value: both touch memory that is changed."""
    changed = {storage(written) for node in graph.nodes for written in overwritten(node)}
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
