"""Saved values on the host: what the backward pass uses of the forward pass goes to the host and comes back."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from torch import Tensor, fx

from fzero.passes.order import find_changes, is_cast
from fzero.program import ops
from fzero.program.arguments import operand_of
from fzero.program.open import fill_reference
from fzero.program.operation import Node
from fzero.program.ops import loops
from fzero.program.program import Program
from fzero.program.records import is_call, record, shares_memory, storage
from fzero.program.work import work
from fzero.values.regions import Mark, Turn, get_mark, set_mark

LEAST_BYTES = 4096
"""Smaller values stay on the device, by default: a copy costs more than it frees."""


def move_to_host(program: Program, values: Sequence[Node], again: Collection[Node], least: int) -> None:
    """Copy each of these values of the forward pass to the host, and back in front of its first use in the backward
    pass, in the program's own graph. The nodes `again` belong to the backward pass whatever their marks say.

    A copy to the host starts behind the value's node, and is waited for behind its last use in the forward pass. There
    the device lets go of the value. In a loop each turn copies its own values.

    These values stay: those of less than `least` bytes, and those with gaps between their elements; gathered leaves,
    which `release` gathers again; values that something writes into; values that the backward pass uses before they
    could have gone and come back, by `program.rates`. The carry of a loop moves where its next value is among `values`.
    """
    if values:
        saved = Saved(program, again, least)
        for value in (*values, *_find_carries(program.graph, values)):
            saved.move(value)


def _find_carries(graph: fx.Graph, values: Sequence[Node]) -> Iterator[Node]:
    """The carries of loops whose next value is one of these."""
    carries, lasts = ([node for node in graph.nodes if is_call(node, target)] for target in (loops.carry, loops.last))
    for number in dict.fromkeys(map(loops.number_of, lasts)):
        pairs = zip(*([node for node in nodes if loops.number_of(node) == number] for nodes in (carries, lasts)))
        yield from (carry for carry, end in pairs if operand_of(end) in values)


class Uses(NamedTuple):
    """Where a saved value is used. `here` are its node and its views in the forward pass, `last` is its last use there,
    and `late` are its users in the backward pass, in order."""

    here: list[Node]
    last: Node
    late: list[Node]


class Saved:
    """The values of a graph that may move to the host. The arguments are as in `move_to_host`."""

    def __init__(self, program: Program, again: Collection[Node] = (), least: int = LEAST_BYTES) -> None:
        self.program, self.graph, self.again, self.least = program, program.graph, again, least
        nodes = list(program.graph.nodes)
        self._changed = find_changes(program.graph)
        self._memory = dict[Node, Any]()
        for node in nodes:
            self._memory[node] = self._memory[node.all_input_nodes[0]] if _lists_views(node) else storage(node)
        self._sharing: dict[Any, list[Node]] = {}  # memory -> the nodes whose values lie there
        for node, memory in self._memory.items():
            self._sharing.setdefault(memory, []).append(node)
        filled = list(fill_reference(program).graph.nodes)
        self._value = {node: same.meta.get("val") for node, same in zip(nodes, filled)}  # of given sizes
        seconds = [program.rates.compute(work(node)) for node in filled]
        self._clock = dict(zip(nodes, accumulate(seconds)))  # behind each node

    def move(self, value: Node) -> None:
        """Move a value to the host and back, where that is possible."""
        uses = self.find_uses(value)
        if uses is None:
            return
        away, turns = self._send(value, uses.last), _turns_of(value)
        groups: dict[Any, list[Node]] = {}
        for user in uses.late:
            groups.setdefault(get_mark(user).turns[: len(turns)], []).append(user)
        for around, of_turn in groups.items():
            self._bring_back(away, uses.here, of_turn, around)

    def find_uses(self, value: Node) -> Uses | None:
        """The uses of a value; None where it may not move."""
        sharing, turns = self._sharing[self._memory[value]], _turns_of(value)
        if value is not sharing[0] or not self._may_move(value):
            return None
        here = [node for node in sharing if not self._is_backward(node)]
        users = dict.fromkeys(user for node in here for user in node.users)
        early = [user for user in users if not self._is_backward(user) and not _is_border(user, turns)]
        last = max([value, *early])
        late = sorted(user for user in users if self._is_backward(user) and user > last)
        return Uses(here, last, late) if late and self._has_time(value, late[0]) else None

    def _is_backward(self, node: Node) -> bool:
        return get_mark(node).in_backward or node in self.again

    def _may_move(self, value: Node) -> bool:
        """Whether a value is large enough, has its memory to itself, and is not made of a leaf alone."""
        x = self._value[value]
        if not isinstance(x, Tensor) or self._is_backward(value) or self._memory[value] in self._changed:
            return False
        fills = x.untyped_storage().nbytes() == x.nbytes and x.storage_offset() == 0
        return fills and x.nbytes >= self.least and not _comes_from_leaf(value)

    def _has_time(self, value: Node, user: Node) -> bool:
        """Whether a value could go to the host and come back before its use."""
        there_and_back = 2 * self.program.rates.copy(self._value[value].nbytes)
        return self._clock[user] - self._clock[value] >= there_and_back

    def _send(self, value: Node, last: Node) -> Node:
        """Copy a value to the host behind its node, and wait for that behind its `last` use in the forward pass.
        Returns the copy."""
        mark = Mark(turns=_turns_of(value))
        with self.graph.inserting_after(value):
            start = self._emit(mark, ops.to_host, [value])
        with self.graph.inserting_after(max(start, last)):
            arrived = self._emit(mark, ops.arrive, start, [value])
        with self.graph.inserting_after(arrived):
            return self._emit(mark, operator.getitem, arrived, 0)

    def _bring_back(self, away: Node, here: Sequence[Node], users: Sequence[Node], turns: tuple[Turn, ...]) -> None:
        """Give these users a copy of the value, and views of that where they use views. `here` are the value and its
        views, in order."""
        mark, used = Mark(in_backward=True, turns=turns), {x for user in users for x in user.all_input_nodes}
        for view in reversed(here):
            used.update(view.all_input_nodes if view in used else ())
        copies: dict[Node, Node] = {}
        with self.graph.inserting_before(users[0]):
            arrived = self._emit(mark, ops.arrive, self._emit(mark, ops.to_device, [away]), [away])
            copies[here[0]] = self._emit(mark, operator.getitem, arrived, 0)
            for view in here[1:]:
                if view in used:
                    copies[view] = self.program.repeat(view, lambda x: copies.get(x, x))
                    set_mark(copies[view].meta, mark)
        for user in users:
            user.args, user.kwargs = fx.map_arg((user.args, user.kwargs), lambda x: copies.get(x, x))
        self.program.refresh(copies.values())

    def _emit(self, mark: Mark, target: Any, *args: Any, **kwargs: Any) -> Node:
        node = self.program.emit(target, *args, **kwargs)
        set_mark(node.meta, mark)
        return node


def _turns_of(value: Node) -> tuple[Turn, ...]:
    """The turns that a value belongs to. The carry of a turn belongs to the turn."""
    mark = get_mark(value)
    return mark.turns if mark.port is None else (*mark.turns, mark.port)


def _lists_views(node: Node) -> bool:
    """Whether a node's value is a list of views of its operand, as that of `unbind`."""
    return isinstance(node.meta.get("val"), (list, tuple)) and shares_memory(node) and len(node.all_input_nodes) == 1


def _is_border(node: Node, turns: tuple[Turn, ...]) -> bool:
    """Whether a node is the border of the innermost of these turns: what crosses it is used there, not computed."""
    return bool(turns) and get_mark(node).port is turns[-1]


def _comes_from_leaf(node: Node) -> bool:
    """Whether a value is a gathered leaf, or a view or a cast of one."""
    while not is_call(node, ops.gather):
        is_cheap = node.op == "call_function" and (record(node).is_derived or shares_memory(node) or is_cast(node))
        if not is_cheap or len(node.all_input_nodes) != 1:
            return False
        (node,) = node.all_input_nodes
    return True
