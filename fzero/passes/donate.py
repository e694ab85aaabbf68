"""The donate pass: state is updated in place."""

from __future__ import annotations

import operator
from collections import Counter
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from fzero.program import ops
from fzero.program.operation import Node
from fzero.program.program import Program
from fzero.program.records import is_call, name_of, record, shares_memory, starts, storage


def donate(program: Program) -> Program:
    """Results of state take the memory of the state arguments that they replace; those are marked `donated`.

    Same results, bit for bit; no second copy of parameters or optimizer state. An operation whose first operand is a
    state argument, and whose result is state of the same leaf, works in place where nothing reads the argument after
    it, and itself reads no view of it. A step that has such a result is an update: its other state results are copied
    into the arguments of the same path once everything has been read. Lists of gradients that die are overwritten too.
    """
    program = program.copy()
    memory = _Owners(program)
    _reuse_lists(program, memory)
    is_update = _is_update(program, memory)
    donated = _work_in_place(program, memory)
    if is_update:
        donated |= _copy_back(program, memory, donated)
    arguments = tuple(
        replace(argument, donated=node in donated) for argument, node in zip(program.arguments, program.placeholders)
    )
    return replace(program, arguments=arguments)


class _Owners:
    """Which nodes share memory, and the position at which each memory is made or read last."""

    def __init__(self, program: Program) -> None:
        self.position = {node: index for index, node in enumerate(program.graph.nodes)}
        self.argument = dict(zip(program.placeholders, program.arguments))
        self.owner: dict[Node, Any] = {}
        self.nodes: dict[Any, list[Node]] = {}  # of an owner
        self.last_read: dict[Any, int] = {}
        for node in program.graph.nodes:
            self.owner[node] = self._owner(node)
            self.nodes.setdefault(self.owner[node], []).append(node)
            for read in (node, *node.all_input_nodes):
                self._read(read, self.position[node])

    def _owner(self, node: Node) -> Any:
        """What stands for a node's memory: its fake tensor's storage, or that of what it is a view of.

        A leaf of a gathered buffer, or a slice of a scattered block, counts as what was sent: with one rank it is that.
        """
        if is_call(node, ops.whole, ops.part):
            started = node.args[0].args[0]
            sent = record(started).alias_at(started, node.args[3])
            return storage(node) if sent is None else self.owner[sent]
        sources = [self.owner[source] for source in node.all_input_nodes] if shares_memory(node) else []
        return sources[0] if sources and not isinstance(sources[0], fx.Node) else storage(node)

    def _read(self, node: Node, at: int) -> None:
        """Note that `node` is read at this position, the last so far. What is sent is read until it is waited for."""
        self.last_read[self.owner[node]] = at
        if starts(node):
            for sent in node.all_input_nodes:
                self._read(sent, at)

    def dies_at(self, node: Node, user: Node) -> bool:
        """Whether nothing reads the memory of `node` after `user`."""
        return self.last_read[self.owner[node]] <= self.position[user]

    def reads(self, user: Node) -> Counter[Any]:
        """How many inputs of `user` are in each memory: it may overwrite one where that is one, and no view beside."""
        return Counter(self.owner[read] for read in user.all_input_nodes)

    def join(self, old: Node, new: Node) -> None:
        """Note that `new` has taken the memory of `old`."""
        owner, former = self.owner[old], self.owner[new]
        self.last_read[owner] = max(self.last_read[owner], self.last_read[former])
        if owner != former:
            self.owner.update(dict.fromkeys(self.nodes[former], owner))
            self.nodes[owner] += self.nodes.pop(former)


def _state_results(program: Program) -> list[tuple[int, Any, Node]]:
    """`(position in the output, result, node)` of each result that is state."""
    returned = zip(program.tensor_results, program.output.args[0])
    return [(i, result, node) for i, (result, node) in enumerate(returned) if result.bucket is not None]


def _matches(memory: _Owners, placeholder: Node, result: Any, node: Node) -> bool:
    """Whether a state argument has the layout, leaf and dtype of a result."""
    argument = memory.argument[placeholder]
    same = (argument.bucket, argument.leaf) == (result.bucket, result.leaf)
    return same and placeholder.meta["val"].dtype == node.meta["val"].dtype


def _is_update(program: Program, memory: _Owners) -> bool:
    """Whether some state result is computed with the state argument of its leaf as first operand: `p + u`."""
    for _, result, node in _state_results(program):
        call = node
        path: list[int] = []
        while is_call(call, operator.getitem):
            call, path = call.args[0], [call.args[1], *path]
        if call.op == "call_function" and record(call).in_place is not None:
            return True
        first = call.args[0][path[-1]] if path and isinstance(call.args[0], (list, tuple)) else (*call.args, None)[0]
        if isinstance(first, fx.Node) and first.op == "placeholder" and _matches(memory, first, result, node):
            return True
    return False


def _work_in_place(program: Program, memory: _Owners) -> set[Node]:
    """Turn operations whose results replace what they read into their in-place forms."""
    wanted = {node: result for _, result, node in _state_results(program)}
    donated: set[Node] = set()
    for node in list(program.graph.nodes):
        if node.op == "call_function" and record(node).in_place is not None:
            donated |= _columns_in_place(program, memory, node, wanted)
        elif name_of(node).startswith("_foreach_"):
            donated |= _foreach_in_place(program, memory, node, wanted)
        elif node in wanted:
            donated |= _one_in_place(program, memory, node, wanted)
    return donated


def _columns_in_place(program: Program, memory: _Owners, call: Node, wanted: dict[Node, Any]) -> set[Node]:
    """Turn an operation with an in-place form of its own, which replaces whole lists of operands, into that."""
    operation = record(call)
    columns = {column.args[1]: column for column in call.users}
    news: dict[Node, Node] = {}
    for index, argument in enumerate(operation.replaces):
        items = {item.args[1]: item for item in columns[index].users} if index in columns else {}
        news.update({old: items.get(position) for position, old in enumerate(call.args[argument])})
    reads = memory.reads(call)
    if not all(_replaces(memory, call, reads, old, new, wanted) for old, new in news.items()):
        return set()
    call.target, call.meta["val"] = operation.in_place, None
    for old, new in news.items():
        memory.join(old, new)
    program.substitute_all({new: old for old, new in news.items() if new is not None})
    for column in columns.values():
        program.graph.erase_node(column)
    return set(news)


def _foreach_in_place(program: Program, memory: _Owners, call: Node, wanted: dict[Node, Any]) -> set[Node]:
    in_place = _in_place_overload(call)
    items = {item.args[1]: item for item in call.users}
    olds = list(call.args[0])
    if in_place is None or len(set(olds)) < len(olds):
        return set()
    reads = memory.reads(call)
    if not all(_replaces(memory, call, reads, old, items.get(i), wanted) for i, old in enumerate(olds)):
        return set()
    _overwrite(program, memory, call, in_place)
    return set(olds)


def _one_in_place(program: Program, memory: _Owners, call: Node, wanted: dict[Node, Any]) -> set[Node]:
    in_place, old = _in_place_overload(call), call.args[0] if call.args else None
    if in_place is None or not isinstance(old, fx.Node):
        return set()
    if not _replaces(memory, call, memory.reads(call), old, call, wanted):
        return set()
    with program.graph.inserting_after(call):
        program.emit(in_place, *call.args, **call.kwargs)
    memory.join(old, call)
    program.substitute(call, old)
    return {old}


def _replaces(
    memory: _Owners, call: Node, reads: Counter[Any], old: Node, new: Node | None, wanted: dict[Node, Any]
) -> bool:
    """Whether `new`, which `call` computes from the argument `old`, is the state that replaces it."""
    return (
        new in wanted
        and old.op == "placeholder"
        and _matches(memory, old, wanted[new], new)
        and memory.dies_at(old, call)
        and reads[memory.owner[old]] == 1
    )


def _reuse_lists(program: Program, memory: _Owners) -> None:
    """List operations on temporaries that die there, and share nothing with each other, work in place."""
    given = {memory.owner[node] for node in program.placeholders + program.graph.find_nodes(op="get_attr")}
    for call in list(program.graph.nodes):
        in_place = _in_place_overload(call) if name_of(call).startswith("_foreach_") else None
        if in_place is None:
            continue
        olds = list(call.args[0])
        owners = [memory.owner[old] for old in olds]
        beside = [memory.owner[node] for node in call.all_input_nodes if node not in olds]
        apart = len({*owners, *beside}) == len(owners) + len(set(beside)) and not given & set(owners)
        fits = all(_is_whole(old) and old.meta["val"].dtype == new.dtype for old, new in zip(olds, call.meta["val"]))
        if apart and fits and all(memory.dies_at(old, call) for old in olds):
            _overwrite(program, memory, call, in_place)


def _is_whole(node: Node) -> bool:
    """Whether writing to a node's value writes each element once: it is no expanded view."""
    return 0 not in [stride for size, stride in zip(node.meta["val"].shape, node.meta["val"].stride()) if size > 1]


def _in_place_overload(call: Node) -> Any:
    """`_foreach_mul_.Scalar` for `_foreach_mul.Scalar`, `add_.Tensor` for `add.Tensor`; None where there is none."""
    name = name_of(call)
    if not name.startswith("_foreach_") and torch.Tag.pointwise not in getattr(call.target, "tags", ()):
        return None
    packet = getattr(torch.ops.aten, name + "_", None)
    return getattr(packet, call.target._overloadname, None)


def _overwrite(program: Program, memory: _Owners, call: Node, in_place: Any) -> None:
    """Make `call` write into its first list: its items are that list's nodes."""
    olds = {item: call.args[0][item.args[1]] for item in call.users}
    for item, old in olds.items():
        memory.join(old, item)
    program.substitute_all(olds)
    call.target, call.meta["val"] = in_place, None


def _copy_back(program: Program, memory: _Owners, donated: set[Node]) -> set[Node]:
    """Copy remaining state results of an update into the arguments of the same path, in one operation at the end."""
    returned = list(program.output.args[0])
    kept = {memory.owner[node] for node in returned}
    free = {
        argument.path: node
        for node, argument in zip(program.placeholders, program.arguments)
        if argument.bucket is not None and node not in donated and memory.owner[node] not in kept
    }
    pairs: list[tuple[Node, Node]] = []
    for position, result, node in _state_results(program):
        into = free.get(result.path)
        if into is not None and node.op != "placeholder" and _matches(memory, into, result, node):
            pairs.append((into, node))
            returned[position] = into
    if pairs:
        with program.graph.inserting_before(program.output):
            program.graph.call_function(
                torch.ops.aten._foreach_copy_.default, tuple([pair[side] for pair in pairs] for side in (0, 1))
            )
        program.output.args = (returned,)
    return {into for into, _ in pairs}
