"""Owners: which nodes of a program share memory, and where each memory is read last."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import fx

from fzero.base.torch_private_functions import inputs_of
from fzero.program import ops
from fzero.program.arguments import BufferView, start_of
from fzero.program.operation import Node
from fzero.program.program import Program
from fzero.program.records import alias_of, find_calls, is_call, list_operands, record, storage


class MemoryOwners:
    """Which nodes share memory, and the position at which each memory is allocated or read last."""

    def __init__(self, program: Program) -> None:
        self.position = {node: index for index, node in enumerate(program.graph.nodes)}
        self.argument = dict(zip(program.placeholders, program.arguments))
        self.owner: dict[Node, Any] = {}
        self.nodes: dict[Any, list[Node]] = {}  # of an owner
        self.last_read: dict[Any, int] = {}
        self._sending = set(find_calls(program.graph, lambda known: known.starts is not None or known.to is not None))
        for node in program.graph.nodes:
            self.owner[node] = owner = self._find_owner(node)
            self.nodes.setdefault(owner, []).append(node)
            self.last_read[owner] = at = self.position[node]
            for read in inputs_of(node):
                self._read(read, at)

    def _find_owner(self, node: Node) -> Any:
        """The key of a node's memory: the storage of its fake tensor, or the key of the tensor that it is a view of.

        A leaf of a gathered buffer, and a slice of a scattered block, have the key of the tensor that was sent: on one
        rank a collective returns its operand's memory.
        """
        if is_call(node, ops.whole, ops.part):
            view = BufferView(*node.args)
            started = start_of(view.buffer)
            sent = record(started).alias_at(started, view.position)
            return storage(node) if sent is None else self.owner[sent]
        source = alias_of(node)
        owner = None if source is None else self.owner[source]
        return storage(node) if owner is None or isinstance(owner, fx.Node) else owner

    def _read(self, node: Node, at: int) -> None:
        """Note that `node` is read here, later than anywhere so far. A collective reads its operands until its wait."""
        self.last_read[self.owner[node]] = at
        if node in self._sending:
            for sent in node.all_input_nodes:
                self._read(sent, at)

    def dies_at(self, node: Node, user: Node) -> bool:
        """Whether nothing reads the memory of `node` after `user`."""
        return self.last_read[self.owner[node]] <= self.position[user]

    def is_left_to(self, start: Node, node: Node) -> bool:
        """Whether a collective that starts is the last to take the memory of `node`: what reads it later, if anything,
        reads what the collective returns."""
        at = self.position[start]
        earlier = (each for each in self.nodes[self.owner[node]] if self.position[each] < at)
        users = {user for each in earlier for user in each.users} - {start}
        return all(self.position[user] < at and user not in self._sending for user in users)

    def reads(self, user: Node) -> Counter[Any]:
        """How many operands of `user` lie in each memory; an operand that is given twice counts twice. `user` may
        overwrite an operand that lies there alone."""
        return Counter(self.owner[read] for read in list_operands(user))

    def add(self, node: Node, user: Node) -> None:
        """Note a new node, a copy that `user` reads."""
        self.position[node] = self.position[user]
        self.owner[node] = storage(node)
        self.nodes[self.owner[node]] = [node]
        self.last_read[self.owner[node]] = self.position[user]

    def join(self, old: Node, new: Node) -> None:
        """Note that `new` has taken the memory of `old`."""
        owner, former = self.owner[old], self.owner[new]
        self.last_read[owner] = max(self.last_read[owner], self.last_read[former])
        if owner != former:
            self.owner.update(dict.fromkeys(self.nodes[former], owner))
            self.nodes[owner] += self.nodes.pop(former)
