"""Largest: the values that are alive at the peak of a program."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, fx

from fzero.program.memory import Allocator, list_changes, representative_ranks, select_rank
from fzero.program.records import body_of, name_of
from fzero.program.refusals import line_of

if TYPE_CHECKING:
    from fzero.program.program import Program


class Alive(NamedTuple):
    """A value that is alive at the peak: its bytes, and what it is."""

    nbytes: int
    what: str


def list_largest(program: Program, count: int) -> list[Alive]:
    """The `count` largest values at the peak of a program, largest first, on the rank whose peak is largest. At a peak
    inside of a loop these are the values around the loop and those of the turn."""
    memory, ranks = program.memory(), representative_ranks(program.layouts.values())
    allocator = Allocator(program, ranks)
    sizes = [select_rank(allocator.nbytes, rank) for rank in range(len(ranks))]
    alive: dict[Any, None] = {}
    at = next(node for node in program.graph.nodes if node.name == memory.at)
    for node, (made, freed) in zip(program.graph.nodes, list_changes(program.graph, allocator.keys)):
        alive |= dict.fromkeys(made)
        if node is at:
            break
        for key in freed:
            del alive[key]
    names = {node: argument.path for node, argument in zip(program.placeholders, program.arguments)}
    nbytes = {key: max(of_rank[key] for of_rank in sizes) for key in alive}
    found = [Alive(nbytes[key], _describe(key, names)) for key in alive if allocator.where(key) == "device"]
    body = body_of(at)
    if body is not None:
        inside = list_largest(body, count + len(body.arguments))
        found += [
            Alive(value.nbytes, f"{value.what}, in each turn of {at.name}")
            for value in inside
            if not value.what.startswith("argument")
        ]
    return sorted(found, key=lambda value: (-value.nbytes, value.what))[:count]


def _describe(key: Any, names: dict[Any, str]) -> str:
    if isinstance(key, tuple) and key[0] == "block":
        first, *others = (names[node] for node in key[1:])
        return f"argument {first}" + (f" and {len(others)} beside it" if others else "")
    node = key
    while isinstance(node, tuple):
        node = node[0] if isinstance(node[0], (tuple, fx.Node)) else node[1]
    if not isinstance(node, fx.Node):
        return f"constant {node}"
    if node in names:
        return f"argument {names[node]}"
    value = node.meta.get("val")
    shape = f" {list(value.shape)}" if isinstance(value, Tensor) else ""
    bucket = f" of {node.args[1]}" if len(node.args) > 1 and isinstance(node.args[1], str) else ""
    return f"{name_of(node)}{bucket}{shape}{line_of(node)}"
