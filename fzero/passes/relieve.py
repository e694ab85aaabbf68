"""The relieve pass: gathered weights die before gradients of weights take memory."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence

from torch import Tensor

from fzero.passes.order import find_mutable, find_origins, reorder
from fzero.program.open import fill_reference
from fzero.program.operation import Node, nbytes
from fzero.program.program import Program
from fzero.program.records import alias_of, record, shares_memory

SMALL = 64
"""Buffers, and results, of fewer bytes than the largest buffer has, divided by this, stay where they are."""


def relieve(program: Program) -> Program:
    """Move nodes behind the last use of a gathered buffer, where that use does not need them, and where their results
    are larger than the operands that live longer for them. Such nodes compute gradients of weights, which then find the
    memory of the gathered weights free.

    Same results, bit for bit. Collectives keep their places. The peak does not rise; of an open program that is said of
    the sizes by which it is scheduled.
    """
    order = _find_order(fill_reference(program))  # as positions: decisions by open sizes would be conditions
    if order is None:
        return program
    program = program.take()
    nodes = list(program.graph.nodes)
    reorder(program.graph, [nodes[position] for position in order])
    return program


def _find_order(program: Program) -> list[int] | None:
    """The positions of the nodes in their new order, or None where they stay."""
    origin = find_origins(program.graph, "gathered")
    if not origin:
        return None
    nodes = list(program.graph.nodes)
    position = {node: at for at, node in enumerate(nodes)}
    last_uses = _find_last_uses(program, origin, position)
    fixed = {*origin, *find_mutable(program.graph)}
    least = max(last_uses.values(), default=0) / SMALL
    order, begin = list[int](), 0
    for at in sorted(last_uses):
        if last_uses[at] >= least:
            late = _find_late(nodes[begin : at + 1], position, fixed, least, last_uses[at])
            order += [i for i in range(begin, at + 1) if nodes[i] not in late]
            order += map(position.__getitem__, late)
            begin = at + 1
    return [*order, *range(begin, len(nodes))] if order != list(range(begin)) else None


def _find_last_uses(program: Program, origin: Mapping[Node, Node], position: Mapping[Node, int]) -> dict[int, int]:
    """The positions of the last uses of gathered buffers -> the bytes that die there."""
    last: dict[Node, Node] = {}
    for node, start in origin.items():
        for user in node.users:
            if user not in origin and (start not in last or position[user] > position[last[start]]):
                last[start] = user
    freed: dict[int, int] = {}
    for start, user in last.items():
        if user.op == "call_function" and not shares_memory(user) and program.layout_of(start).world > 1:
            freed[position[user]] = freed.get(position[user], 0) + nbytes(start.meta["val"])
    return freed


def _find_late(
    nodes: Sequence[Node], position: Mapping[Node, int], fixed: set[Node], least: float, freed: int
) -> dict[Node, None]:
    """Those of some nodes that come behind the last of them, where `freed` bytes die. The others need none of them."""
    late, kept, needed = dict[Node, None](), set[Node](), set(nodes[-1].all_input_nodes)
    end = position[nodes[-1]]
    for node in reversed(nodes[:-1]):
        if node not in needed and node not in fixed and _is_plain(node) and fixed.isdisjoint(node.all_input_nodes):
            if shares_memory(node):
                late[node] = None
                continue
            longer = {x for x in map(_find_base, node.all_input_nodes) if x not in kept and _dies(x, position, end)}
            made = _count_bytes(node)
            if made >= least and sum(map(_count_bytes, longer)) <= min(made, freed):
                late[node] = None
                kept |= longer
                continue
        needed.update(node.all_input_nodes)
    moved = dict[Node, None]()
    for node in reversed(late):
        if not shares_memory(node) or any(x in moved for x in node.all_input_nodes):  # other views may stay
            moved[node] = None
    return moved


def _is_plain(node: Node) -> bool:
    """Whether a node computes or views one tensor, and does nothing else."""
    if node.op != "call_function" or node.target is operator.getitem or not isinstance(node.meta.get("val"), Tensor):
        return False
    known = record(node)
    does_more = known.moves or known.starts or known.waits or known.body or known.to or known.arrives
    return not does_more and not known.is_random(node) and not known.writes(node)


def _find_base(node: Node) -> Node:
    """The node whose value's memory a node's value has. An item of a list has memory of its own."""
    source = None if node.target is operator.getitem else alias_of(node)
    return node if source is None else _find_base(source)


def _dies(base: Node, position: Mapping[Node, int], end: int) -> bool:
    """Whether nothing uses memory behind a position."""
    if base.op != "call_function":
        return False  # the caller's
    views = [base]
    for node in views:
        for user in node.users:
            if position[user] > end:
                return False
            if alias_of(user) is node:
                views.append(user)
    return True


def _count_bytes(node: Node) -> int:
    return int(node.meta["val"].untyped_storage().nbytes())
