"""Largest: the values that are alive at the peak of a program, and all values over its nodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, fx

from fzero.layout.layout import representative_ranks
from fzero.program.arguments import name_in
from fzero.program.memory import Allocator, list_changes, select_rank
from fzero.program.operation import Node
from fzero.program.records import body_of, name_of
from fzero.program.refusals import line_of

if TYPE_CHECKING:
    from fzero.program.program import Program


WITHIN = "within one operation"
"""The group of bytes that an operation needs while it runs."""


class Alive(NamedTuple):
    """A value that is alive at the peak: its bytes, and what it is."""

    nbytes: int
    what: str


def list_largest(program: Program, count: int) -> list[Alive]:
    """The `count` largest values at the peak of a program, largest first, on the rank whose peak is largest.

    All tensors of an argument of the step count as one value. At a peak inside of a loop these are the values around
    the loop and those of the turn."""
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
    here = [key for key in alive if allocator.where(key) == "device"]
    nbytes = max(sizes, key=lambda of_rank: sum(of_rank[key] for key in here))
    names = {node: argument.path for node, argument in zip(program.placeholders, program.arguments)}
    paths = {key: _find_argument(key, names) for key in here}
    given: dict[str, list[Any]] = {}
    for key, path in paths.items():
        if path is not None:
            given.setdefault(path.partition(".")[0], []).append(key)
    found = [_add_up(keys, nbytes, names) for keys in given.values()]
    found += [Alive(nbytes[key], _describe(key)) for key, path in paths.items() if path is None]
    body = body_of(at)
    if body is not None:
        inside = list_largest(body, count + len(body.arguments))  # arguments of a body lie around the loop
        found += [
            Alive(value.nbytes, f"{value.what}, in each turn of {at.name}")
            for value in inside
            if not value.what.startswith("argument")
        ]
    return sorted(found, key=lambda value: (-value.nbytes, value.what))[:count]


def list_alive(program: Program, name: Callable[[Node | None, str], str]) -> dict[str, list[int]]:
    """Group of values -> the bytes that are alive during each node on the device, on the rank whose peak is largest.
    `name` gives the group of what a node makes, or of the argument of a path; what constants hold has no node."""
    ranks = representative_ranks(program.layouts.values())
    allocator = Allocator(program, ranks)
    changes = list(list_changes(program.graph, allocator.keys))
    paths = {node: argument.path for node, argument in zip(program.placeholders, program.arguments)}
    groups = {
        key: name(node if isinstance(node := _find_node(key), fx.Node) else None, _find_argument(key, paths) or "")
        for key in allocator.nbytes
        if allocator.where(key) == "device"
    }
    best: dict[str, list[int]] = {}
    for rank in range(len(ranks)):
        nbytes, more = select_rank(allocator.nbytes, rank), select_rank(allocator.scratch, rank)
        found = _add_groups(program, changes, {key: nbytes[key] for key in groups}, groups, more)
        if not best or max(map(sum, zip(*found.values()))) > max(map(sum, zip(*best.values()))):
            best = found
    return best


def _add_groups(
    program: Program,
    changes: list[tuple[list[Any], list[Any]]],
    nbytes: dict[Any, int],
    groups: dict[Any, str],
    more: dict[Any, int],
) -> dict[str, list[int]]:
    """Group -> bytes that are alive during each node, of storages of these sizes; `more` are free again behind it."""
    alive = dict.fromkeys(groups.values(), 0) | {WITHIN: 0}
    found: dict[str, list[int]] = {group: [] for group in alive}
    for node, (made, freed) in zip(program.graph.nodes, changes):
        for key in made:
            if key in nbytes:
                alive[groups[key]] += nbytes[key]
        alive[WITHIN] = more.get(node, 0)
        for group, total in alive.items():
            found[group].append(total)
        for key in freed:
            if key in nbytes:
                alive[groups[key]] -= nbytes[key]
    return {group: totals for group, totals in found.items() if any(totals)}


def _find_argument(key: Any, names: dict[Any, str]) -> str | None:
    """The path of the argument that lies in a storage, the first of several; None for what the program computes."""
    nodes = key[1:] if isinstance(key, tuple) and key[0] == "block" else (_find_node(key),)
    return next((names[node] for node in nodes if node in names), None)


def _add_up(keys: list[Any], nbytes: dict[Any, int], names: dict[Any, str]) -> Alive:
    """The tensors of an argument of the step, which lie in these storages, as one value."""
    count = sum(len(key) - 1 if isinstance(key, tuple) and key[0] == "block" else 1 for key in keys)
    path = _find_argument(keys[0], names) or ""
    what = f"argument {path}" if count == 1 else f"argument {path.partition('.')[0]}, {count} tensors"
    return Alive(sum(nbytes[key] for key in keys), what)


def _find_node(key: Any) -> Any:
    """The node whose value lies in a storage; for a constant its name."""
    while isinstance(key, tuple):
        key = key[0] if isinstance(key[0], (tuple, fx.Node)) else key[1]
    return key


def _describe(key: Any) -> str:
    node = _find_node(key)
    if not isinstance(node, fx.Node):
        return f"constant {node}"
    value = node.meta.get("val")
    shape = f" {list(value.shape)}" if isinstance(value, Tensor) else ""
    name = name_in(node)
    return f"{name_of(node)}{'' if name is None else f' of {name}'}{shape}{line_of(node)}"
