"""The rematerialize pass: what `remat` has marked is computed again in the backward pass, not kept for it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, fx

from fzero.program.operation import Node
from fzero.program.program import Program
from fzero.program.records import find_writes, name_of, record, storage
from fzero.values.regions import Region, get_mark, set_mark


def rematerialize(program: Program) -> Program:
    """Values of a region of `remat` that the backward pass uses, other than those that are kept, are computed again in
    front of their first use there: once a region, all of them. Nested regions are so within what is computed again.

    Same results, bit for bit. No collective is repeated here: a gather gets more uses, for `release` to part. Kept are
    a region's inputs and whatever of it the forward pass uses, what its policy keeps, results of collectives, and
    memory that is written to from outside the region. Without regions it is `program` itself.
    """
    if not _outermost(program.graph):
        return program
    program = program.copy()
    while regions := _outermost(program.graph):
        writers = _writers(program.graph)
        for region, members in regions.items():
            _recompute(program, region, members, writers)
    program.graph.eliminate_dead_code()
    return program


def _outermost(graph: fx.Graph) -> dict[Region, list[Node]]:
    """The nodes of each region that is in no other, in order."""
    regions: dict[Region, list[Node]] = {}
    for node in graph.nodes:
        for region in get_mark(node).regions[:1]:
            regions.setdefault(region, []).append(node)
    return regions


def _writers(graph: fx.Graph) -> dict[Any, list[Node]]:
    """Memory that is written to -> the nodes that do."""
    writers: dict[Any, list[Node]] = {}
    for node in graph.nodes:
        for written in find_writes(node):
            writers.setdefault(storage(written), []).append(node)
    return writers


def _recompute(program: Program, region: Region, members: list[Node], writers: dict[Any, list[Node]]) -> None:
    """Give the backward pass its own copies of what it uses of a region. Unmarks the region."""
    lost = set(members) - _kept(region, members, writers)
    users = {user for node in lost for user in node.users if not _is_inside(user, region)}
    used = lost.intersection(node for user in users for node in user.all_input_nodes)
    needed = _find_needed(used, lost, writers)
    if users:
        with program.graph.inserting_before(min(users)):
            copies = _copies(program, [node for node in members if node in needed])
        for user in users:
            for node in used.intersection(user.all_input_nodes):
                user.replace_input_with(node, copies[node])
        program.refresh(copies[node] for node in used)
    for node in members:
        set_mark(node.meta, get_mark(node)._replace(regions=()))


def _is_inside(node: Node, region: Region) -> bool:
    return region in get_mark(node).regions


def _is_backward(node: Node, region: Region) -> bool:
    """Whether a node belongs to the backward pass of a region."""
    return get_mark(node).in_backward and not region.in_backward


def _kept(region: Region, members: list[Node], writers: dict[Any, list[Node]]) -> set[Node]:
    """The nodes of a region that are not computed again: kept values, and views of them and of the region's inputs,
    which cost nothing; and what could not be, since the memory that it reads or is in has changed meanwhile."""
    kept = {node for node in members if _is_used_forward(node, region) or _is_chosen(node, region)}
    inputs = {source for node in members for source in node.all_input_nodes if not _is_inside(source, region)}
    held = {storage(node) for node in kept | inputs}
    held |= {memory for memory, nodes in writers.items() if not all(_is_inside(node, region) for node in nodes)}
    while further := [
        node
        for node in members
        if node not in kept
        and (storage(node) in held or any(storage(x) in held and storage(x) in writers for x in node.all_input_nodes))
    ]:
        kept.update(further)
        held.update(map(storage, further))
    return kept


def _is_used_forward(node: Node, region: Region) -> bool:
    return any(not _is_inside(user, region) and not _is_backward(user, region) for user in node.users)


def _is_chosen(node: Node, region: Region) -> bool:
    """Whether a node's value is the result of a collective, or one that the region's policy keeps."""
    if node.op != "call_function" or record(node).moves is not None:
        return True
    value = node.meta.get("val")
    named = node.args[0] if name_of(node) == "getitem" else node
    return isinstance(value, Tensor) and region.keeps(name_of(named), value)


def _find_needed(values: Iterable[Node], lost: set[Node], writers: dict[Any, list[Node]]) -> set[Node]:
    """What of `lost` it takes to compute these values: what they are computed from, and what writes to that memory."""
    needed: set[Node] = set()
    stack = list(values)
    while stack:
        node = stack.pop()
        if node in lost and node not in needed:
            needed.add(node)
            touched = {storage(value) for value in (node, *node.all_input_nodes)}
            stack += [*node.all_input_nodes, *(writer for memory in touched for writer in writers.get(memory, ()))]
    return needed


def _copies(program: Program, nodes: list[Node]) -> dict[Node, Node]:
    """Copies of these nodes, at the graph's insert point, in the regions that are in the outermost."""
    copies: dict[Node, Node] = {}
    for node in nodes:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda source: copies.get(source, source))
        copies[node] = program.emit(node.target, *args, **kwargs)
        copies[node].meta = {**node.meta, "val": copies[node].meta["val"]}
        mark = get_mark(node)
        set_mark(copies[node].meta, mark._replace(regions=mark.regions[1:]))
    return copies
