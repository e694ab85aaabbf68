"""Costs: what a program communicates and how many bytes it keeps alive, read off its graph before anything runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from fzero import ops
from fzero.layout import Layout, wire
from fzero.mesh import VirtualMesh
from fzero.ops import Node, is_call

Layouts = Mapping[str | None, Layout]


class Comm(NamedTuple):
    """One collective: `nbytes` is the size of the full buffer, what every rank's part adds up to, padding included."""

    op: str  # "all_gather", "reduce_scatter" or "all_reduce"
    axis: str
    bucket: str | None
    dtype: torch.dtype
    nbytes: int


class Memory(NamedTuple):
    """Bytes of tensors alive on one rank: at most `peak`, at node `at`; `timeline` has one entry a node."""

    peak: int
    at: str
    timeline: list[int]


def comm(graph: fx.Graph, layouts: Layouts, mesh: VirtualMesh) -> list[Comm]:
    """The graph's collectives, in order."""
    return [entry for node in graph.nodes for entry in collectives(node, layouts, mesh)]


def collectives(node: Node, layouts: Layouts, mesh: VirtualMesh) -> Iterator[Comm]:
    """The collectives that a node starts, in order."""
    axis, others = mesh.shard_axis, [name for name in mesh.names if name != mesh.shard_axis]
    if is_call(node, ops.all_gather, ops.gather):
        yield Comm("all_gather", axis, node.args[1], node.meta["val"].dtype, _wire_nbytes(node, layouts))
    elif is_call(node, ops.reduce_scatter, ops.scatter):
        bucket, dtype, size = node.args[1], node.meta["val"].dtype, _wire_nbytes(node, layouts)
        yield Comm("reduce_scatter", axis, bucket, dtype, size)
        for other in others:
            yield Comm("all_reduce", other, bucket, dtype, size // mesh.size(axis))
    elif is_call(node, ops.all_reduce, ops.all_reduce_list):
        value = node.meta["val"]
        first = value[0] if isinstance(value, list) else value
        yield Comm("all_reduce", node.args[2], None, first.dtype, nbytes(value))


def _wire_nbytes(node: Node, layouts: Layouts) -> int:
    leaves = node.args[2]
    sent = wire(layouts[node.args[1]], (leaves,) if isinstance(leaves, int) else tuple(leaves))
    return sent.numel * node.meta["val"].element_size()


def nbytes(value: Any) -> int:
    """Bytes of a fake tensor's elements, or of a list of them."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return sum(map(nbytes, value)) if isinstance(value, (list, tuple)) else 0


def memory(graph: fx.Graph, layouts: Layouts) -> Memory:
    """Walk the graph as generated code runs it: a value dies at its last use, arguments and results do not.

    Counts what a kernel returns and what a collective needs between start and wait, not a kernel's own scratch.
    """
    last_use = _last_uses(graph)
    held: dict[Any, int] = {}
    alive: dict[Node, set[Any]] = {}
    users: dict[Any, int] = {}
    timeline, peak, at, live = [], 0, "", 0
    for node in graph.nodes:
        owned = _storages(node, layouts)
        alive[node] = set(owned)
        for key, size in owned.items():
            live += size - held.get(key, 0) if key not in held else 0
            held.setdefault(key, size)
            users[key] = users.get(key, 0) + 1
        if live > peak:
            peak, at = live, node.name
        for dead in last_use.get(node, ()):
            for key in alive.pop(dead):
                users[key] -= 1
                if not users[key]:
                    live -= held.pop(key)
        timeline.append(live)
    return Memory(peak, at, timeline)


def _last_uses(graph: fx.Graph) -> dict[Node, list[Node]]:
    """Node -> the values that nothing needs after it. Arguments and results belong to the caller: never among them."""
    last: dict[Node, Node] = {}
    for node in graph.nodes:
        if node.op not in ("placeholder", "output"):
            last[node] = node
        for source in node.all_input_nodes:
            if source.op != "placeholder":
                last[source] = node
    for source in graph.output_node().all_input_nodes:
        last.pop(source, None)
    dying: dict[Node, list[Node]] = {}
    for source, node in last.items():
        dying.setdefault(node, []).append(source)
    return dying


def _storages(node: Node, layouts: Layouts) -> dict[Any, int]:
    """Memory that a node's value keeps alive: storage -> bytes. Views share their base's storage."""
    value = node.meta.get("val")
    tensors = [x for x in _flat(value) if isinstance(x, Tensor)]
    if is_call(node, ops.all_gather, ops.whole, ops.wait) and _is_alone(node, layouts):
        return {}  # one rank: a gathered leaf is a view of its slice
    owned = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in tensors}
    if is_call(node, ops.reduce_scatter):
        owned |= _sent(node, layouts)
    return owned


def _sent(node: Node, layouts: Layouts) -> dict[Any, int]:
    """Memory that a reduce-scatter keeps until it is waited for, besides its result: what it sends, which is packed
    unless it is one leaf that fills the buffer, and what it receives from other ranks than one."""
    world, size = layouts[node.args[1]].world, _wire_nbytes(node, layouts)
    first = node.args[0][0].meta["val"]
    received = {node: max(world - 2, 0) * nbytes(node.meta["val"])}
    if len(node.args[0]) == 1 and nbytes(first) == size:
        return received | {first.untyped_storage()._cdata: first.untyped_storage().nbytes()}
    return received | {(node, "packed"): size if world > 1 else 0}


def _is_alone(node: Node, layouts: Layouts) -> bool:
    while not is_call(node, ops.all_gather):
        node = node.all_input_nodes[0]
        if is_call(node, ops.reduce_scatter):
            return False
    return layouts[node.args[1]].world == 1


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _flat(item)
    else:
        yield value
