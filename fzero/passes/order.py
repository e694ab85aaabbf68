"""The order of a graph's nodes. Passes move nodes with the functions of this file only.

A node stands behind its inputs. Where a node writes into memory, the reads and writes of the memory also keep the order
in which they were traced: `find_dependences` lists these pairs of nodes, `reorder` keeps them, and `erase_dead` keeps
what they need. All of them look at the values in such memory alone, which `find_mutable` finds.
"""

from __future__ import annotations

import heapq
import operator
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from fzero.base.errors import FzeroError
from fzero.base.torch_private import find_root, storage_key
from fzero.base.torch_private_functions import inputs_of
from fzero.layout.layout import layer_of
from fzero.optim.operations import STAGES
from fzero.program.arguments import Item, operand_of, position_of, start_of
from fzero.program.operation import Node, no_operands
from fzero.program.program import Program
from fzero.program.records import find_calls, find_writes, is_call, name_of, record, starts, storage
from fzero.program.refusals import PASS_BUG

# memory


def _list_targets_of_writes(graph: fx.Graph) -> list[Node]:
    """The operands that nodes of a graph write into."""
    calls = find_calls(graph, lambda known: known.writes is not no_operands)
    return [written for node in calls for written in find_writes(node)]


def find_changes(graph: fx.Graph) -> set[Any]:
    """The memory that some node writes into. Nothing reads it earlier or later than the trace does."""
    return {storage(written) for written in _list_targets_of_writes(graph)}


def find_accesses(node: Node) -> list[Node]:
    """The operands whose memory a node reads or writes. A view reads nothing; a wait reads what its collective sent."""
    operation = record(node) if node.op == "call_function" else None
    if operation is None:
        return node.all_input_nodes
    if operation.perform is None and operation.shares(node) and not operation.writes(node):
        return []
    return [*node.all_input_nodes, *(start_of(node).all_input_nodes if operation.waits else ())]


Held = Mapping[Node, Any]
"""Node -> the memory of its value, where some node writes into that memory. Stays right while nodes move and go."""


def find_mutable(graph: fx.Graph) -> Held:
    """The values of a graph in memory that some node writes into. Empty where nothing writes.

    A value has memory of its own, of an operand or of the step's surroundings. So those in one memory are found from
    operand to user and from user to operand, without a walk over all nodes.
    """
    waiting = _list_targets_of_writes(graph)
    changed = {storage(written) for written in waiting}
    held: dict[Node, Any] = {}
    seen = set[Node]()
    if changed:
        waiting += graph.find_nodes(op="placeholder") + graph.find_nodes(op="get_attr")
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        memory = storage(node)
        if memory in changed:
            held[node] = memory
        if memory in changed or _lists_any(node.meta.get("val"), changed):
            waiting += [*node.all_input_nodes, *node.users]
    return held


def _lists_any(value: Any, changed: set[Any]) -> bool:
    """Whether a list has a tensor in memory that changes."""
    if not isinstance(value, (list, tuple)):
        return False
    return any(storage_key(x) in changed if isinstance(x, Tensor) else _lists_any(x, changed) for x in value)


class Access(NamedTuple):
    """What a node does with memory that some node writes into."""

    node: Node
    name: str
    target: Any
    memory: dict[str, Any]  # by the names of the operands there that the node reads or writes
    written: set[str]  # the names of those that it writes into


def list_accesses(held: Held) -> list[Access]:
    """What nodes do with memory that some node writes into, in the order of the nodes."""
    users = {user for node in held for user in node.users}
    users |= {wait for user in users if starts(user) for wait in user.users}  # which reads what its collective sent
    accesses = (_describe_access(node, held) for node in sorted(users))
    return [access for access in accesses if access.memory]


def _describe_access(node: Node, held: Held) -> Access:
    memory = {x.name: held[x] for x in find_accesses(node) if x in held}
    return Access(node, node.name, node.target, memory, {x.name for x in find_writes(node) if x.name in memory})


def find_dependences(held: Held) -> dict[Node, list[Node]]:
    """Node -> the nodes that it must stay behind without using their values: one of both writes into memory that the
    other reads or writes. Empty where nothing writes.

    The list has the last write of each memory that the node touches and, where the node writes, the reads since then.
    """
    return {access.node: [earlier.node for earlier in before] for access, before in pair_accesses(list_accesses(held))}


def pair_accesses(accesses: Iterable[Access]) -> Iterator[tuple[Access, list[Access]]]:
    """Each access with those that it must stay behind, where there are any."""
    last_write: dict[Any, Access] = {}
    reads_since: dict[Any, list[Access]] = {}
    for access in accesses:
        before: list[Access] = []
        written = {access.memory[name] for name in access.written}
        for memory in dict.fromkeys(access.memory.values()):
            before += [last_write[memory]] if memory in last_write else []
            if memory in written:
                before += reads_since.pop(memory, [])
                last_write[memory] = access
            else:
                reads_since.setdefault(memory, []).append(access)
        if before:
            yield access, before


def is_cast(node: Node) -> bool:
    """Whether a node casts a value to another dtype, and does nothing else."""
    if not is_call(node, torch.ops.aten._to_copy.default):
        return False
    new, old = node.meta["val"], operand_of(node).meta["val"]
    return bool(new.dtype != old.dtype and (new.device, new.stride()) == (old.device, old.stride()))


def drop_dead_rows(graph: fx.Graph) -> None:
    """Drop the rows of list operations whose results nothing uses, and the rows in front that only these use."""
    for call in reversed(find_calls(graph, lambda known: known.name.startswith("_foreach_") or known.name in STAGES)):
        if name_of(call) in STAGES:
            _drop_rows_of(call, list(call.users))
        elif not find_writes(call):
            _drop_rows_of(call, [call])


def _drop_rows_of(call: Node, columns: list[Node]) -> None:
    """Drop the rows of which no item of `columns`, the lists that a call returns, has a use."""
    items = [item for column in columns for item in column.users]
    if not all(is_call(item, operator.getitem) for item in items):
        return
    count = next(len(arg) for arg in call.args if isinstance(arg, (list, tuple)))  # `_foreach_pow` begins with a number
    used = sorted({position_of(item) for item in items if item.users})

    def cut(values: Any) -> Any:
        is_column = isinstance(values, (list, tuple)) and len(values) == count
        return [values[row] for row in used] if is_column else values

    if len(used) < count:
        call.args = tuple(map(cut, call.args))
        value = call.meta["val"]
        call.meta["val"] = cut(value) if call in columns else tuple(map(cut, value))
        for item in items:
            if item.users:
                source, row = Item(*item.args)
                item.args = (source, used.index(row))
            else:
                call.graph.erase_node(item)
        for column in columns:
            column.meta["val"] = cut(column.meta["val"]) if column is not call else call.meta["val"]
    if not used:
        for node in dict.fromkeys([*columns, call]):
            call.graph.erase_node(node)


def _has_effect(node: Node, held: Held, read: set[Any]) -> bool:
    """Whether a node does more than to compute its value: it writes into memory that is read later, or is no call."""
    written = find_writes(node)
    return any(held[x] in read for x in written) if written else bool(node.is_impure(impure_random=False))


def erase_dead(graph: fx.Graph, held: Held | None = None) -> None:
    """Erase the nodes whose value no result needs, and which write into no memory that a later node reads or the caller
    holds."""
    held = find_mutable(graph) if held is None else held
    needed: set[Node] = set()
    read = {memory for node, memory in held.items() if node.op in ("placeholder", "get_attr")}
    for node in reversed(list(graph.nodes)):
        if node in needed or _has_effect(node, held, read):
            inputs = inputs_of(node)
            needed.update(inputs)
            if not held.keys().isdisjoint(inputs):
                read.update([held[x] for x in inputs if x in held])
        else:
            graph.erase_node(node)


# order


def reorder(graph: fx.Graph, wanted: Iterable[Node], held: Held | None = None) -> None:
    """Put the nodes into the order `wanted`, in which each stands behind its inputs. A node that would pass a read or
    write of memory that it depends on waits for it. The output stays last. `held` is that of the graph, if known."""
    wanted = list(wanted)
    if wanted == list(graph.nodes):
        return
    dependences = find_dependences(find_mutable(graph) if held is None else held)
    _rearrange(graph, sort(wanted, dependences) if dependences else wanted)


def restore_order(graph: fx.Graph, held: Held | None = None) -> None:
    """Move each node that stands before one of its inputs behind the last of them. Erases nodes without a use.

    Nodes that stand behind their inputs keep their order.
    """
    held = find_mutable(graph) if held is None else held
    _rearrange(graph, sort(graph.nodes, find_dependences(held)))
    erase_dead(graph, held)


def sort(wanted: Iterable[Node], dependences: Mapping[Node, list[Node]]) -> list[Node]:
    """The nodes behind their inputs and dependences. Among the nodes that are ready, the first of `wanted` is next."""
    order: dict[Node, None] = {}
    waiting: dict[Node, list[tuple[int, Node]]] = {}  # node that is not in order yet -> nodes that wait for it
    for place in enumerate(wanted):
        ready = [place]
        while ready:
            index, node = heapq.heappop(ready)
            inputs = inputs_of(node)
            if node in dependences or not inputs.keys() <= order.keys():
                missing = next((x for x in (*inputs, *dependences.get(node, ())) if x not in order), None)
                if missing is not None:
                    waiting.setdefault(missing, []).append((index, node))
                    continue
            order[node] = None
            for each in waiting.pop(node, ()):
                heapq.heappush(ready, each)
    if waiting:
        _, stuck = min(each for nodes in waiting.values() for each in nodes)
        raise FzeroError(stuck.name, "depends on itself, through a value or through memory", PASS_BUG)
    return list(order)


def _rearrange(graph: fx.Graph, order: Iterable[Node]) -> None:
    anchor = find_root(graph)
    for node in list(order):
        if anchor.next is not node:
            anchor.append(node)
        anchor = node


def count_depths(graph: fx.Graph, counted: Container[Node], dependences: Mapping[Node, list[Node]]) -> dict[Node, int]:
    """Node -> the largest number of counted nodes on a path that ends in the node, through values and through memory.

    Two counted nodes of equal depth do not depend on each other.
    """
    depth: dict[Node, int] = {}
    for node in graph.nodes:
        before = [depth[x] for x in inputs_of(node)]
        if node in dependences:
            before += [depth[x] for x in dependences[node]]
        depth[node] = max(before, default=0) + (node in counted)
    return depth


# gathers at their first use


def find_origins(graph: fx.Graph, direction: str) -> dict[Node, Node]:
    """Node -> the node that starts the buffer that it comes from, for "gathered" or for "scattered" buffers, in order.

    Covers the starting nodes themselves, and every node that is cheaply derived (`Operation.is_derived`) from one such
    buffer alone and whose memory nothing writes to.
    """
    waiting = find_calls(graph, lambda known: known.starts == direction)
    origin = {node: node for node in waiting}
    changed = find_changes(graph) if waiting else set()
    for node in waiting:  # the list grows while it is read
        for user in node.users:
            if user not in origin and user.op == "call_function" and record(user).is_derived:
                sources = {origin.get(source) for source in inputs_of(user)}
                if len(sources) == 1 and None not in sources and storage(user) not in changed:
                    (origin[user],) = sources
                    waiting.append(user)
    return {node: origin[node] for node in sorted(origin)}


def list_uses(program: Program, origin: Mapping[Node, Node]) -> Iterator[tuple[Node, dict[Node, int]]]:
    """Each node that uses gathered leaves, with the all-gathers that these come from (`find_origins`), and for each the
    number of the run of uses of its layer. A run ends where a node uses other layers only. A layer has a bucket for
    each dtype. A wait for a copy to the host uses nothing: it holds what is copied."""
    position = 0
    last, runs = dict[str, int](), Counter[str]()  # of a layer: the position of its last use, and its runs so far
    for node in sorted({user for x in origin for user in x.users}.difference(origin)):
        used = dict.fromkeys([origin[source] for source in inputs_of(node) if source in origin])  # in their order
        if not record(node).arrives:
            position += 1
            layers = {start: layer_of(program.layout_of(start).bucket) for start in used}
            for layer in set(layers.values()):
                runs[layer] += last.get(layer) != position - 1
                last[layer] = position
            yield node, {start: runs[layer] for start, layer in layers.items()}


def sink_gathers(graph: fx.Graph) -> None:
    """Move each all-gather, and the nodes derived from its buffer, to the first use. Erases nodes without a use."""
    held = find_mutable(graph)
    restore_order(graph, held)
    lazy = find_origins(graph, "gathered")
    order: dict[Node, None] = {}
    for root in graph.nodes:
        stack = [] if root in lazy else [root]
        while stack:
            inputs = inputs_of(stack[-1])
            if inputs.keys() <= order.keys():
                order.setdefault(stack.pop())
            else:
                stack += [x for x in reversed(inputs) if x not in order]
    reorder(graph, order, held)
