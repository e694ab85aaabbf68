"""Places: whether each value of a program lies on the device, on the host or on a disk, by one walk over its graph.

An operation with an operand on the host runs on the host. No operation computes on a disk. Copies
(`fzero.program.ops.transfers`) are what goes from one place to the next.
"""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, fx

from fzero.base.errors import FzeroError
from fzero.base.torch_private_functions import list_targets
from fzero.program.arguments import item_of, operand_of, sources_of
from fzero.program.operation import Node
from fzero.program.records import body_of, find_bodies, is_call, record
from fzero.program.refusals import refuse_node

if TYPE_CHECKING:
    from fzero.base.placement import Placement
    from fzero.program.program import Program
    from fzero.program.signature import Argument, Result

Where = Literal["device", "host", "disk"]
CHAIN: tuple[Where, ...] = ("disk", "host", "device")
"""The places in order: a copy goes from a place to the next or to the one before."""


def step_towards(here: Where, there: Where) -> Where:
    """The place that a copy from `here` reaches first on the way to another place."""
    at, goal = CHAIN.index(here), CHAIN.index(there)
    return CHAIN[at + 1 if goal > at else at - 1]


def is_placed(program: Program) -> bool:
    """Whether some value lies elsewhere than on the device: an argument, what is copied there, or what a loop returns
    there."""
    bodies = list(find_bodies(program.graph))
    if any(argument.place is not None for each in (program, *bodies) for argument in each.arguments):
        return True
    copies = (record(target).to is not None for target in list_targets(program.graph))
    return any(copies) or any(result.place is not None for body in bodies for result in body.results)


def where_of(value: Argument | Result) -> Where:
    """Where an argument or a result lies."""
    return "device" if value.place is None else value.place.where


def find_places(program: Program) -> dict[Node, Where]:
    """Node -> where its value lies. It is computed there, unless it is a copy."""
    places: dict[Node, Where] = {
        node: where_of(argument) for node, argument in zip(program.placeholders, program.arguments)
    }
    for node in program.graph.nodes:
        if node.op == "get_attr":
            places[node] = "device"
        elif node.op == "call_function":
            places[node] = _find_place(node, places)
    return places


def _find_place(node: Node, places: dict[Node, Where]) -> Where:
    item = item_of(node)
    body = None if item is None else body_of(item.source)
    if item is not None and body is not None:
        return where_of(body.results[item.position])
    operation = record(node)
    if operation.to is not None:
        return operation.to
    if operation.arrives or item is not None:
        return places[operand_of(node)]
    is_away = any(places[x] != "device" for x in node.all_input_nodes) and not runs_on_device(node)
    return "host" if is_away else "device"


def check_places(program: Program) -> None:
    """Refuse a node that has operands in several places, or that communicates what is not on the device, and a state
    result that lies elsewhere than the state that it replaces."""
    if not is_placed(program):
        return
    places = find_places(program)
    for node in program.graph.nodes:
        if node.op == "call_function":
            away = next((x for x, where in list_sources(node, places[node]) if places[x] != where), None)
            if away is not None:
                raise refuse_node(program, node, f"takes {away.name}, which lies on the {places[away]}", _WAY_OUT)
    for result, node in zip(program.tensor_results, program.returned):
        if places[node] != where_of(result):
            problem = f"result {result.path!r} lies on the {places[node]}, its state on the {where_of(result)}"
            raise FzeroError(program.path_of(result), problem, _WAY_OUT)


_WAY_OUT = "put the pass offload among the passes"


def list_sources(node: Node, here: Where) -> list[tuple[Node, Where]]:
    """The operands of a node that runs `here`, and where each has to lie: those that a copy starts from, and those of a
    loop, elsewhere. A list is expected where its items are."""
    operation = record(node)
    if operation.source is not None:
        written = [(x, operation.to) for x in operation.writes(node) if operation.to is not None]
        return [*((x, operation.source) for x in sources_of(node)), *written]
    body = body_of(node)
    if body is None:
        takes_any = is_call(node, operator.getitem) or operation.arrives or operation.takes_shape
        return [] if takes_any else [(x, here) for x in node.all_input_nodes]
    _, _, carry, xs, lists, constants, *_ = node.args
    pairs = zip((*carry, *xs, *lists, *constants), map(where_of, body.arguments))
    return [
        (x, where)
        for given, where in pairs
        for x in (given if isinstance(given, (list, tuple)) else [given])
        if isinstance(x, fx.Node)
    ]


def runs_on_device(node: Node) -> bool:
    """Whether a node runs on the device wherever its operands lie: it communicates, or is a loop."""
    operation = record(node)
    return operation.moves is not None or operation.starts is not None or operation.body is not None


def is_wide(node: Node) -> bool:
    """Whether a node's value is more than a number: a tensor with dimensions, or a list."""
    value = node.meta.get("val")
    return not isinstance(value, Tensor) or value.ndim > 0


def place_results(program: Program) -> Program:
    """The program, each state result of which lies where the state lies that it replaces.

    That is the argument in whose place the result stands, where it has the leaf and the dtype of the result. Else it is
    the argument of the same leaf and dtype with the most path in common, counted from the end, and of these the one
    with the shortest path.
    """
    if not is_placed(program):
        return program
    given: dict[tuple[str, int, torch.dtype], list[Argument]] = {}
    for argument, node in zip(program.arguments, program.placeholders):
        if argument.bucket is not None:
            given.setdefault((argument.bucket, argument.leaf, node.meta["val"].dtype), []).append(argument)
    values = iter(program.returned)

    def place(result: Result) -> Result:
        if result.is_constant:
            return result
        dtype = next(values).meta["val"].dtype
        same = given.get((result.bucket, result.leaf, dtype)) if result.bucket is not None else None
        if same is None:
            return result

        def likeness(argument: Argument) -> tuple[bool, int, int]:
            common, depth = _count_common(argument.path, result.path), argument.path.count(".")
            return argument.path == result.replaces, common, -depth

        return replace(result, place=max(same, key=likeness).place)

    return replace(program, results=tuple(map(place, program.results)))


def list_movable(program: Program, to: Placement | None) -> list[int]:
    """The positions of the arguments that may lie on the device or in `to`: state in slices that lies in no third
    placement. None of them where `to` is None."""
    return [
        i
        for i, argument in enumerate(program.arguments)
        if to and argument.bucket is not None and argument.place in (None, to)
        if not program.layouts[argument.bucket].replicated
    ]


def _count_common(path: str, other: str) -> int:
    """The number of equal keys at the ends of two dotted paths."""
    pairs = list(zip(reversed(path.split(".")), reversed(other.split("."))))
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
