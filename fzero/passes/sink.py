"""Sink: what the tiles of `fzero.tiled` share is gathered in each tile, and its gradient scattered there, for the
stream pass."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from fzero.passes.order import erase_dead
from fzero.program import ops
from fzero.program.arguments import Item, LeafMove, item_of
from fzero.program.inference import infer
from fzero.program.kinds import Kind
from fzero.program.operation import Node
from fzero.program.ops.loops import Loop
from fzero.program.program import Program
from fzero.program.records import is_call
from fzero.program.signature import Argument, Result
from fzero.values.tiles import TILES

_aten = torch.ops.aten
Key = tuple[str, int]
"""A leaf: its bucket, and its index in the bucket's layout."""


def sink(program: Program, keys: Collection[Key]) -> Program:
    """Let the loops of `fzero.tiled` gather these leaves, and scatter their gradients, in each turn instead of in front
    of the loop and behind it. So the stream pass finds the uses of the leaves in the body of the loop.

    The inverse of `hoist` and of `accumulate`. Same results up to rounding, because sums over turns and means over
    ranks change places. k turns gather and scatter k times. Other uses of the leaves stay.
    """
    program = program.copy()
    kinds = infer(program)
    slices = dict[Key, Node]()
    for node in _list_moves(program, ops.gather, keys):
        move = LeafMove(*node.args)
        slices[move.key] = move.value
        for loop in [user for user in node.users if is_tiles(user)]:
            _gather_within(loop, node, kinds)
    for node in _list_moves(program, ops.scatter, keys):
        move = LeafMove(*node.args)
        item = item_of(move.value)
        is_own = item is not None and is_tiles(item.source) and len(move.value.users) == 1
        if item is not None and is_own and _list_addends(*item):
            _scatter_within(program, node, slices[move.key], kinds[node])
    erase_dead(program.graph)
    return program


def list_leaves_in_front(program: Program) -> set[Key]:
    """The leaves that are gathered in front of loops of `fzero.tiled`."""
    gathers = program.graph.find_nodes(op="call_function", target=ops.gather)
    return {LeafMove(*node.args).key for node in gathers if any(map(is_tiles, node.users))}


def list_leaves_within(program: Program) -> set[Key]:
    """The leaves that the bodies of loops of `fzero.tiled` gather whole, or whose whole gradients they scatter."""
    graphs = [Loop(*node.args).body.graph for node in program.graph.nodes if is_tiles(node)]
    return {
        LeafMove(*node.args).key for graph in graphs for node in graph.nodes if is_call(node, ops.gather, ops.scatter)
    }


def is_tiles(node: Node) -> bool:
    """Whether a node is a loop of `fzero.tiled`."""
    return is_call(node, ops.loop) and Loop(*node.args).sync == TILES


def _list_moves(program: Program, target: Any, keys: Collection[Key]) -> Iterator[Node]:
    found = program.graph.find_nodes(op="call_function", target=target)
    return (node for node in found if LeafMove(*node.args).key in keys)


def _gather_within(node: Node, gather: Node, kinds: Mapping[Node, Kind]) -> None:
    """Give a loop the slice of a leaf in the place of the gathered leaf among its constants."""
    loop, (source, *leaf) = Loop(*node.args), gather.args
    body, constants = loop.body.copy(), list(loop.constants)
    arguments, first = list(body.arguments), len(body.arguments) - len(constants)
    for i, x in enumerate(constants):
        if x is gather:
            given = body.placeholders[first + i]
            with body.graph.inserting_after(body.placeholders[-1]):
                inside = body.emit_as(given.meta["val"], ops.gather, given, *leaf)
            inside.stack_trace = gather.stack_trace
            given.replace_all_uses_with(inside, delete_user_cb=lambda user, own=inside: user is not own)
            given.meta["val"] = source.meta["val"]
            body.refresh_with([inside])
            constants[i], arguments[first + i] = source, Argument("", kind=kinds[source])
    body = replace(body, arguments=tuple(arguments))
    node.args = tuple(loop._replace(body=body, constants=constants))


def _list_addends(loop: Node, at: int) -> list[Node]:
    """The gradients that a turn of a loop adds to a carry, none where it does something else with the carry."""
    body, count = Loop(*loop.args).body, len(Loop(*loop.args).carry)
    return _follow_sum(body.returned[at], body.placeholders[at]) or [] if at < count else []


def _follow_sum(total: Any, carry: Node) -> list[Node] | None:
    """What sums that nothing else uses add to a carry; None where a value is no sum of the carry and others."""
    if not isinstance(total, fx.Node) or len(total.users) != 1:
        return None
    if total is carry:
        return []
    if not is_call(total, _aten.add.Tensor) or total.kwargs.get("alpha", 1) != 1:
        return None
    for old, new in (total.args, reversed(total.args)):
        found = _follow_sum(old, carry)
        if found is not None and isinstance(new, fx.Node) and _is_like(new, total):
            return [*found, new]
    return None


def _is_like(x: Node, y: Node) -> bool:
    a, b = x.meta["val"], y.meta["val"]
    return a.shape == b.shape and a.dtype == b.dtype


def _scatter_within(program: Program, scatter: Node, like: Node, kind: Kind) -> None:
    """Let a loop carry the sum of a leaf's scattered gradients, in the place of the sum of the whole ones. `like` is a
    slice of the leaf."""
    total, *leaf = scatter.args
    node, at = Item(*total.args)
    loop = Loop(*node.args)
    body, carry, before = loop.body.copy(), list(loop.carry), loop.carry[at]
    node.args = tuple(loop._replace(body=body))
    returned, old = list(body.returned), body.placeholders[at]
    addends = _list_addends(node, at)
    with body.graph.inserting_before(max(addends).next):
        full = functools.reduce(functools.partial(body.emit, _aten.add.Tensor), addends)
        scattered = body.emit(ops.scatter, full, *leaf, **scatter.kwargs)
        scattered.stack_trace = scatter.stack_trace
        value = scattered.meta["val"]
        with body.fake_mode:
            old.meta["val"] = torch.empty_like(value)
        returned[at] = body.emit(_aten.add.Tensor, old, scattered)
    body.output.args = (returned,)
    erase_dead(body.graph)
    with program.graph.inserting_before(node):
        if is_call(before, _aten.zeros.default):
            carry[at] = program.emit(_aten.zeros_like.default, like, dtype=value.dtype)
        else:
            carry[at] = program.emit(ops.scatter, before, *leaf, **scatter.kwargs)
    arguments, results = list(body.arguments), list(body.results)
    arguments[at], results[at] = Argument(f"carry.{at}", kind=kind), Result(f"carry.{at}", kind=kind)
    body = replace(body, arguments=tuple(arguments), results=tuple(results))
    node.args = tuple(loop._replace(body=body, carry=carry))
    program.refresh_with([node])
    program.substitute(scatter, total)
