"""Variation: the plain arguments from which a value's variation between ranks comes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from fzero.program.operation import Node
from fzero.program.records import find_writes, record, storage

if TYPE_CHECKING:
    from fzero.program.program import Program
    from fzero.program.signature import Argument


def find_sources(program: Program, node: Node) -> list[Argument]:
    """The plain tensor arguments that a node's value is computed from, in order, also by what was written into memory.

    A collective ends the search: what comes out of it was averaged, summed, or belongs to a slice.
    """
    arguments = dict(zip(program.placeholders, program.arguments))
    writers: dict[object, list[Node]] = {}
    for writer in program.graph.nodes:
        for written in find_writes(writer):
            writers.setdefault(storage(written), []).append(writer)
    found: set[Node] = set()
    waiting, seen = [node], {node}
    while waiting:
        near = waiting.pop()
        if near in arguments:
            found.add(near)
        elif not _communicates(near):
            sources = [*near.all_input_nodes, *writers.get(storage(near), ())]
            waiting += [source for source in dict.fromkeys(sources) if source not in seen]
            seen.update(sources)
    return [arguments[each] for each in arguments if each in found and arguments[each].bucket is None]


def is_in_place_of_state(program: Program, argument: Argument) -> bool:
    """Whether a plain argument looks like state that was not partitioned: it has path and shape of a state leaf, as an
    optimizer's moments have; or it stands in one argument with such a tensor; or it is one number, as a step count is.
    """
    values = {given: node.meta["val"] for given, node in zip(program.arguments, program.placeholders)}
    leaves = {leaf.path: leaf.shape for layout in program.layouts.values() for leaf in layout.leaves if leaf.path}

    def has_place(given: Argument) -> bool:
        shapes = (leaves.get(path) for path in _ends(given.path))
        return given.bucket is None and any(shape == tuple(values[given].shape) for shape in shapes)

    def first(given: Argument) -> str:
        return given.path.partition(".")[0]

    siblings = (given for given in program.arguments if first(given) == first(argument))
    return is_number(program, argument) or any(map(has_place, siblings))


def is_number(program: Program, argument: Argument) -> bool:
    """Whether an argument is a 0-d tensor."""
    return not program.placeholders[program.arguments.index(argument)].meta["val"].ndim


def _ends(path: str) -> Iterable[str]:
    """`"1.mu.w" -> "1.mu.w", "mu.w", "w"`."""
    parts = path.split(".")
    return (".".join(parts[start:]) for start in range(len(parts)))


def _communicates(node: Node) -> bool:
    return node.op == "call_function" and record(node).moves is not None
