"""The order of a graph's nodes. Passes move nodes with the functions of this file only.

A node stands behind its inputs. Where a node writes into memory, the reads and writes of the memory also keep the order
in which they were traced: `find_dependences` lists these pairs of nodes, `reorder` keeps them, and `erase_dead` keeps
what they need.
"""

from __future__ import annotations

import heapq
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import fx

from fzero.base.errors import FzeroError
from fzero.base.torch_private import find_root
from fzero.base.torch_private_functions import list_targets
from fzero.layout.layout import layer_of
from fzero.optim.operations import STAGES
from fzero.program.operation import Node, no_operands
from fzero.program.program import Program
from fzero.program.records import find_writes, is_call, name_of, record, storage
from fzero.program.refusals import PASS_BUG

# memory


def find_changes(graph: fx.Graph) -> set[Any]:
    """The memory that some node writes into. Nothing reads it earlier or later than the trace does."""
    writing = [target for target in list_targets(graph) if record(target).writes is not no_operands]
    calls = (node for target in writing for node in graph.find_nodes(op="call_function", target=target, sort=False))
    return {storage(written) for node in calls for written in find_writes(node)}


def find_accesses(node: Node) -> list[Node]:
    """The operands whose memory a node reads or writes. A view reads nothing; a wait reads what its collective sent."""
    operation = record(node) if node.op == "call_function" else None
    if operation is None:
        return node.all_input_nodes
    if operation.perform is None and operation.shares(node) and not operation.writes(node):
        return []
    return [*node.all_input_nodes, *(node.args[0].all_input_nodes if operation.waits else ())]


def find_dependences(graph: fx.Graph, touched: Callable[[Node], list[Node]] = find_accesses) -> dict[Node, list[Node]]:
    """Node -> the nodes that it must stay behind without using their values: one of both writes into memory that the
    other reads or writes. Empty where nothing writes.

    The list has the last write of each memory that the node touches and, where the node writes, the reads since then.
    """
    changed = find_changes(graph)
    dependences: dict[Node, list[Node]] = {}
    last_write: dict[Any, Node] = {}
    reads_since: dict[Any, list[Node]] = {}
    for node in graph.nodes if changed else ():
        used = touched(node)
        written = {storage(x) for x in find_writes(node) if x in used}
        for memory in {storage(x) for x in used} & changed:
            before = [last_write[memory]] if memory in last_write else []
            if memory in written:
                before += reads_since.pop(memory, [])
                last_write[memory] = node
            else:
                reads_since.setdefault(memory, []).append(node)
            if before:
                dependences.setdefault(node, []).extend(before)
    return dependences


def is_cast(node: Node) -> bool:
    """Whether a node casts a value to another dtype, and does nothing else."""
    if not is_call(node, torch.ops.aten._to_copy.default):
        return False
    new, old = node.meta["val"], node.args[0].meta["val"]
    return bool(new.dtype != old.dtype and (new.device, new.stride()) == (old.device, old.stride()))


def drop_dead_rows(graph: fx.Graph) -> None:
    """Drop the rows of list operations whose results nothing uses, and the rows in front that only these use."""
    for call in reversed(list(graph.nodes)):
        name = name_of(call) if call.op == "call_function" else ""
        if name.startswith("_foreach_") and not find_writes(call):
            _drop_rows_of(call, [call])
        elif name in STAGES:
            _drop_rows_of(call, list(call.users))


def _drop_rows_of(call: Node, columns: list[Node]) -> None:
    """Drop the rows of which no item of `columns`, the lists that a call returns, has a use."""
    items = [item for column in columns for item in column.users]
    if not all(is_call(item, operator.getitem) for item in items):
        return
    count = next(len(arg) for arg in call.args if isinstance(arg, (list, tuple)))  # `_foreach_pow` begins with a number
    used = sorted({item.args[1] for item in items if item.users})

    def cut(values: Any) -> Any:
        is_column = isinstance(values, (list, tuple)) and len(values) == count
        return [values[row] for row in used] if is_column else values

    if len(used) < count:
        call.args = tuple(map(cut, call.args))
        value = call.meta["val"]
        call.meta["val"] = cut(value) if call in columns else tuple(map(cut, value))
        for item in items:
            if item.users:
                item.args = (item.args[0], used.index(item.args[1]))
            else:
                call.graph.erase_node(item)
        for column in columns:
            column.meta["val"] = cut(column.meta["val"]) if column is not call else call.meta["val"]
    if not used:
        for node in dict.fromkeys([*columns, call]):
            call.graph.erase_node(node)


def _has_effect(node: Node, read: set[Any]) -> bool:
    """Whether a node does more than to compute its value: it writes into memory that is read later, or is no call."""
    written = find_writes(node)
    return any(storage(x) in read for x in written) if written else bool(node.is_impure(impure_random=False))


def erase_dead(graph: fx.Graph) -> None:
    """Erase the nodes whose value no result needs, and which write into no memory that a later node reads or the caller
    holds."""
    changed = find_changes(graph)
    needed: set[Node] = set()
    read = {storage(node) for node in graph.nodes if node.op in ("placeholder", "get_attr")} & changed
    for node in reversed(list(graph.nodes)):
        if node in needed or _has_effect(node, read):
            needed.update(node.all_input_nodes)
            if changed:
                read.update(storage(x) for x in node.all_input_nodes)
        else:
            graph.erase_node(node)


# order


def reorder(graph: fx.Graph, wanted: Iterable[Node]) -> None:
    """Put the nodes into the order `wanted`, in which each stands behind its inputs. A node that would pass a read or
    write of memory that it depends on waits for it. The output stays last."""
    dependences = find_dependences(graph)
    _rearrange(graph, sort(wanted, dependences) if dependences else wanted)


def restore_order(graph: fx.Graph) -> None:
    """Move each node that stands before one of its inputs behind the last of them. Erases nodes without a use.

    Nodes that stand behind their inputs keep their order.
    """
    _rearrange(graph, sort(graph.nodes, find_dependences(graph)))
    erase_dead(graph)


def sort(wanted: Iterable[Node], dependences: Mapping[Node, list[Node]]) -> list[Node]:
    """The nodes behind their inputs and dependences. Among the nodes that are ready, the first of `wanted` is next."""
    position = {node: index for index, node in enumerate(wanted)}
    followers: dict[Node, list[Node]] = {}
    missing = {node: len(node.all_input_nodes) + len(dependences.get(node, ())) for node in position}
    for node, before in dependences.items():
        for each in before:
            followers.setdefault(each, []).append(node)
    ready = [(index, node) for node, index in position.items() if not missing[node]]
    order: list[Node] = []
    while ready:
        _, node = heapq.heappop(ready)
        order.append(node)
        for user in (*node.users, *followers.get(node, ())):
            missing[user] -= 1
            if not missing[user]:
                heapq.heappush(ready, (position[user], user))
    if len(order) < len(position):
        stuck = next(node for node in position if missing[node])
        raise FzeroError(stuck.name, "depends on itself, through a value or through memory", PASS_BUG)
    return order


def _rearrange(graph: fx.Graph, order: Iterable[Node]) -> None:
    anchor = find_root(graph)
    for node in list(order):
        anchor.append(node)
        anchor = node


def count_depths(graph: fx.Graph, counted: Callable[[Node], bool]) -> dict[Node, int]:
    """Node -> the largest number of counted nodes on a path that ends in the node, through values and through memory.

    Two counted nodes of equal depth do not depend on each other.
    """
    depth: dict[Node, int] = {}
    dependences = find_dependences(graph)
    for node in graph.nodes:
        before = (*node.all_input_nodes, *dependences.get(node, ()))
        depth[node] = max((depth[n] for n in before), default=0) + bool(counted(node))
    return depth


# gathers at their first use


def find_origins(graph: fx.Graph, direction: str) -> dict[Node, Node]:
    """Node -> the node that starts the buffer that it comes from, for "gathered" or for "scattered" buffers.

    Covers the starting nodes themselves, and every node that is cheaply derived (`Operation.is_derived`) from one such
    buffer alone and whose memory nothing writes to.
    """
    targets = list_targets(graph)
    starting = {id(target) for target in targets if record(target).starts == direction}
    derived = {id(target) for target in targets if record(target).is_derived}
    origin: dict[Node, Node] = {}
    changed = find_changes(graph) if starting else set()
    for node in graph.nodes if starting else ():
        if id(node.target) in starting:
            origin[node] = node
        elif id(node.target) in derived and storage(node) not in changed:
            sources = {origin.get(source) for source in node.all_input_nodes}
            if len(sources) == 1 and None not in sources:
                (origin[node],) = sources
    return origin


def list_uses(program: Program) -> Iterator[tuple[Node, dict[Node, int]]]:
    """Each node that uses gathered leaves, with the all-gathers that these come from, and for each the number of the
    run of uses of its layer. A run ends where a node uses other layers only. A layer has a bucket for each dtype."""
    origin, position = find_origins(program.graph, "gathered"), 0
    last, runs = dict[str, int](), Counter[str]()  # of a layer: the position of its last use, and its runs so far
    for node in program.graph.nodes:
        used = {origin[source] for source in node.all_input_nodes if source in origin}
        if used and node not in origin:
            position += 1
            layers = {start: layer_of(program.layout_of(start).bucket) for start in used}
            for layer in set(layers.values()):
                runs[layer] += last.get(layer) != position - 1
                last[layer] = position
            yield node, {start: runs[layer] for start, layer in layers.items()}


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
    reorder(graph, order)
