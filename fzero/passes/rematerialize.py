"""The rematerialize pass: compute the values of `remat` regions again in the backward pass, or move them to the host,
instead of keeping them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx

from fzero.base.torch_private import OpOverload
from fzero.base.torch_private_functions import HigherOrderOperator
from fzero.passes.move_to_host import LEAST_BYTES, move_to_host
from fzero.passes.order import erase_dead
from fzero.program.arguments import call_of, item_of
from fzero.program.operation import AGAIN, Node, values_of
from fzero.program.program import Program
from fzero.program.records import comm_of, find_writes, record, storage
from fzero.values.regions import Region, Turn, get_mark, set_mark

_DETACH = torch.ops.aten.detach.default
_CLONE = torch.ops.aten.clone.default


def rematerialize(program: Program, *, least: int = LEAST_BYTES) -> Program:
    """Compute the values of a `remat` region that the backward pass uses again, together, once, before their first use
    there. Nested regions likewise, within the values that are computed again. A region in one with the policy "local"
    decides by itself.

    Same results, bit for bit. A region keeps, and does not compute again:

    * its inputs, and its values that the forward pass uses outside of the region;
    * the values that its policy keeps;
    * the results of collectives: a gather of parameters gets another use, and `release` decides whether to gather
      again. Those along model axes, with their views and copies, are computed again if the policy has them repeat;
    * values in memory that is written to from outside the region.

    Kept values of at least `least` bytes that the region's policy moves to the host are copied there and back
    (`move_to_host`).

    Returns `program` itself where there is no region.
    """
    if not _find_first(program.graph):
        return program
    program = program.take()
    recompute(program, least)
    erase_dead(program.graph)
    return program


def recompute(program: Program, least: int = LEAST_BYTES) -> None:
    """Do what `rematerialize` does in the program's own graph, and leave what is dead then."""
    moved, again = dict[Node, None](), set[Node]()
    while regions := _find_first(program.graph):
        writers = _find_writers(program.graph)
        for region, members in regions.items():
            kept, on_host = _find_residuals(program, region, members, writers)
            again |= _recompute(program, region, members, set(members) - kept, writers)
            moved |= dict.fromkeys(node for node in members if node in on_host)
    move_to_host(program, [node for node in moved if node not in again], again, least)


def _find_first(graph: fx.Graph) -> dict[Region, list[Node]]:
    """Region -> its nodes in order, for each region that lies in no other but such as keep what a rank computes by
    itself. These come last, for what lies in them may be computed again all the same."""
    regions: dict[Region, list[Node]] = {}
    for node in graph.nodes:
        marked = get_mark(node).regions
        for region in sorted(marked, key=lambda region: region.is_local)[:1]:
            regions.setdefault(region, []).append(node)
    others = {region: nodes for region, nodes in regions.items() if not region.is_local}
    return others or regions


def _find_writers(graph: fx.Graph) -> dict[Any, list[Node]]:
    """Memory -> the nodes that write to it."""
    writers: dict[Any, list[Node]] = {}
    for node in graph.nodes:
        for written in find_writes(node):
            writers.setdefault(storage(written), []).append(node)
    return writers


def _recompute(
    program: Program, region: Region, members: list[Node], lost: set[Node], writers: dict[Any, list[Node]]
) -> set[Node]:
    """Give the backward pass copies of the `lost` values of a region that it uses. Takes the region out of all marks.
    Returns the copies of all nodes that compute these values."""
    copies: dict[Node, Node] = {}
    users = {user for node in lost for user in node.users if not _is_inside(user, region)}
    used = lost.intersection(node for user in users for node in user.all_input_nodes)
    needed = _find_dependencies(used, lost, writers)
    if users:
        with program.graph.inserting_before(min(users)):
            turns = get_mark(min(users)).turns
            copies = _copy_nodes(program, region, [node for node in members if node in needed], turns)
        for user in users:
            for node in used.intersection(user.all_input_nodes):
                user.replace_input_with(node, copies[node])
        program.refresh(copies[node] for node in used)
    for node in members:
        marked = get_mark(node).regions
        set_mark(node.meta, get_mark(node)._replace(regions=marked[: marked.index(region)]))
    return set(copies.values())


def _is_inside(node: Node, region: Region) -> bool:
    return region in get_mark(node).regions


def _is_backward(node: Node, region: Region) -> bool:
    """Whether a node belongs to the backward pass of a region."""
    return get_mark(node).in_backward and not region.in_backward


def _find_residuals(
    program: Program, region: Region, members: list[Node], writers: dict[Any, list[Node]]
) -> tuple[set[Node], set[Node]]:
    """The nodes of a region that are not computed again: values that the region keeps, views of these and of the
    region's inputs, which cost nothing, and values whose memory or operands have changed by then. Beside them those
    that the region's policy moves to the host."""
    chosen, on_host = _choose_results(program, members, region)
    kept = {node for node in members if node in chosen or _is_used_forward(node, region)}
    inputs = {source for node in members for source in node.all_input_nodes if not _is_inside(source, region)}
    alive = {storage(node) for node in kept | inputs}
    alive |= {memory for memory, nodes in writers.items() if not all(_is_inside(node, region) for node in nodes)}
    while further := [
        node
        for node in members
        if node not in kept
        and (storage(node) in alive or any(storage(x) in alive and storage(x) in writers for x in node.all_input_nodes))
    ]:
        kept.update(further)
        alive.update(map(storage, further))
    return kept, on_host


def _is_used_forward(node: Node, region: Region) -> bool:
    return any(not _is_inside(user, region) and not _is_backward(user, region) for user in node.users)


def _choose_results(program: Program, members: list[Node], region: Region) -> tuple[set[Node], set[Node]]:
    """The tensors among the results of a region that are results of collectives which do not repeat, or that it or its
    policy keeps, and those of them that its policy moves to the host.

    The policy is asked once for each operation, in order: a policy may count.
    """
    chosen, on_host, repeated = set[Node](), set[Node](), set[Node]()
    for node in members:
        number = get_mark(node).number
        if node.op != "call_function" or number in region.kept | region.moved or _is_sent_once(program, node, region):
            chosen.add(node)
            on_host.update([node] if number in region.moved else [])
        elif record(node).moves is not None or _is_copy(node, repeated):
            repeated.add(node)
        elif (item := item_of(node)) is not None:
            chosen.update([node] if item.source in chosen else [])
            on_host.update([node] if item.source in on_host else [])
        else:
            target, args = call_of(node) if record(node).draws else (record(node).stands_for or node.target, node.args)
            if _is_asked(target):
                where, (args, kwargs) = node.stack_trace or node.name, values_of((args, node.kwargs))
                fate = region.decide(node.name, where, target, args, kwargs, node.meta.get("val"))
                chosen.update([node] if fate != "again" else [])
                on_host.update([node] if fate == "host" else [])
    kept = {node for node in chosen if node.op != "call_function" or isinstance(node.meta.get("val"), Tensor)}
    return kept, kept & on_host


def _is_sent_once(program: Program, node: Node, region: Region) -> bool:
    """Whether a node is a collective that does not repeat: of parameters, along a data axis, or in a loop."""
    if record(node).moves is None:
        return False
    if not region.repeats_collectives or record(node).body is not None:
        return True
    of_models = {*program.model_axes}
    return any(
        sent.bucket or not of_models.issuperset(program.mesh.split(sent.axis)) for sent in comm_of(program, node)
    )


def _is_copy(node: Node, values: set[Node]) -> bool:
    """Whether a node is a view, or a copy, of one of these values."""
    sources = node.all_input_nodes
    if len(sources) != 1 or sources[0] not in values:
        return False
    return node.target is _CLONE or storage(node) == storage(sources[0])


def _is_asked(target: Any) -> bool:
    """Whether torch asks a policy about an operation. `detach` is a view, which torch never keeps."""
    if isinstance(target, HigherOrderOperator):
        return True
    return isinstance(target, OpOverload) and target.namespace != "fzero" and target is not _DETACH


def _find_dependencies(values: Iterable[Node], lost: set[Node], writers: dict[Any, list[Node]]) -> set[Node]:
    """The nodes of `lost` that these values depend on: their operands, and the nodes that write to the same memory."""
    needed: set[Node] = set()
    stack = list(values)
    while stack:
        node = stack.pop()
        if node in lost and node not in needed:
            needed.add(node)
            touched = {storage(value) for value in (node, *node.all_input_nodes)}
            stack += [*node.all_input_nodes, *(writer for memory in touched for writer in writers.get(memory, ()))]
    return needed


def _copy_nodes(program: Program, region: Region, nodes: list[Node], turns: tuple[Turn, ...]) -> dict[Node, Node]:
    """Node -> its copy, at the graph's insert point, in these turns. The mark of a copy lacks `region`, and regions
    that repeat collectives alone: what came again is used soon."""
    copies: dict[Node, Node] = {}
    for node in nodes:
        copies[node] = program.repeat(node, lambda source: copies.get(source, source))
        copies[node].meta = {**node.meta, "val": copies[node].meta["val"], AGAIN: True}
        mark = get_mark(node)
        inner = tuple(each for each in mark.regions if each is not region and not each.is_local)
        set_mark(copies[node].meta, mark._replace(regions=inner, turns=turns))
    return copies
