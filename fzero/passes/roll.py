"""The roll pass, in front of all others: the nodes of a traced turn become a loop."""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from fzero.base.placement import Host
from fzero.passes.order import find_changes, is_cast
from fzero.passes.rematerialize import recompute
from fzero.program import ops
from fzero.program.arguments import item_of, operand_of, position_of
from fzero.program.inference import infer
from fzero.program.kinds import Kind, Slice
from fzero.program.operation import Node
from fzero.program.ops import loops
from fzero.program.ops.transfers import copy_of
from fzero.program.program import Program
from fzero.program.records import body_of, is_call, record, storage
from fzero.program.signature import Argument, Result
from fzero.values.regions import Mark, Turn, get_mark, set_mark

_INS = (loops.carry, loops.row, loops.pick)
_OUTS = (loops.last, loops.stack, loops.collect)


def roll(program: Program) -> Program:
    """Replace the nodes of each turn by one `ops.loop`, in the program's own graph. Returns the program.

    The backward pass of a turn is a loop of its own, in the other direction. What it uses of the forward turn is
    collected there, turn by turn. Views and gathered values are made again instead, from what they are views and
    gathers of: a slice is kept, and what is gathered from the slice is not. So are the values of `remat` regions.

    Raises:
        FzeroError: where a value of a turn is used outside of the loop without being a result of it.
    """
    if not _find_turns(program.graph):
        return program
    changed = find_changes(program.graph)
    for turn in _find_turns(program.graph):
        _pass_by(program, turn, changed)
    if _find_backward(program.graph):
        recompute(program)
    kinds = infer(program)
    for turn in _find_turns(program.graph):
        _sink_casts(program, turn, kinds)
    for turn in _find_backward(program.graph):
        _keep_residuals(program, turn, kinds)
    for turn in _find_turns(program.graph):
        _roll_turn(program, turn, kinds)
    return program


def has_turns(program: Program) -> bool:
    """Whether a traced program has turns that become loops."""
    return bool(_find_turns(program.graph))


def _find_turns(graph: fx.Graph) -> list[Turn]:
    """The outermost turns, in order. A turn that computes nothing has borders only."""
    outermost = (mark.turns[0] if mark.turns else mark.port for mark in map(get_mark, graph.nodes))
    return list(dict.fromkeys(turn for turn in outermost if turn is not None))


def _find_backward(graph: fx.Graph) -> list[Turn]:
    """The outermost turns that are the backward pass of another."""
    return [turn for turn in _find_turns(graph) if turn.forward is not None]


def _find_members(graph: fx.Graph, turn: Turn) -> list[Node]:
    return [node for node in graph.nodes if get_mark(node).turns[:1] == (turn,) and node.op != "get_attr"]


def _find_marks(graph: fx.Graph, turn: Turn, targets: Sequence[Any]) -> list[Node]:
    marks = (node for node in graph.nodes if is_call(node, *targets))
    return [node for node in marks if loops.number_of(node) == turn.number]


def _pass_by(program: Program, turn: Turn, changed: Collection[Any]) -> None:
    """Let a turn, and what follows the loop, use a leaf of the carry that stays the same from in front of the loop. So
    the backward pass of the turn keeps no list of it. Leave leaves in `changed` memory alone."""
    carries, lasts = (_find_marks(program.graph, turn, [target]) for target in (loops.carry, loops.last))
    for end, carry in zip(lasts, carries):
        first = operand_of(carry)
        if operand_of(end) is carry and storage(first) not in changed:
            program.substitute_all({end: first, carry: first})


# casts of the leaves of layers and of their gradients


def _sink_casts(program: Program, turn: Turn, kinds: dict[Node, Kind]) -> None:
    """Cast leaves of a layer, and its gradients, in the turn, where the step casts those of all layers alike. Then a
    gather casts what it sends, a mean can be taken in the wider dtype, and there is one cast for all layers."""

    def cast(x: Node, before: Node, like: Node) -> Node:
        """The cast of a value of the turn, which has the value's kind."""
        with program.graph.inserting_before(before):
            made = program.emit(like.target, x, **like.kwargs)
        set_mark(made.meta, Mark(turns=(turn,), in_backward=turn.forward is not None))
        kinds[made] = kinds[x]
        return made

    for pick in _find_marks(program.graph, turn, [loops.pick]):
        casts = operand_of(pick)
        if _are_casts(casts):
            with program.graph.inserting_before(pick):
                item = program.emit(loops.pick, [operand_of(each) for each in casts], turn.number)
            kinds[item] = kinds[pick]  # that of all layers
            program.substitute(pick, cast(item, pick, casts[0]))
    for collect in _find_marks(program.graph, turn, [loops.collect]):
        casts = [user for item in collect.users for user in item.users]
        if _are_casts(casts) and len(set(map(operand_of, casts))) == turn.length:
            x, *how = collect.args
            wide = cast(x, collect, casts[0])
            with program.graph.inserting_before(collect):
                made = program.emit(loops.collect, wide, *how)
            kinds[made] = kinds[collect]
            for item in list(collect.users):
                with program.graph.inserting_before(item):
                    new = program.emit(operator.getitem, made, position_of(item))
                kinds[new] = kinds[item]
                program.substitute_all({**dict.fromkeys(item.users, new), item: new})
            program.graph.erase_node(collect)


def _are_casts(nodes: Sequence[Node]) -> bool:
    """Whether nodes cast values to one dtype and do nothing else."""
    return bool(nodes) and all(is_cast(node) and node.kwargs == nodes[0].kwargs for node in nodes)


# what the backward pass of a turn uses of the turn


def _keep_residuals(program: Program, turn: Turn, kinds: dict[Node, Kind]) -> None:
    """Let the backward pass of a turn use lists of what it uses of the turn, and copies of what costs nothing. Notes
    the kinds of new nodes."""
    forward: Any = turn.forward
    entered, changed = _find_marks(program.graph, forward, _INS), find_changes(program.graph)
    own = {*_find_members(program.graph, forward), *entered}
    members = _find_members(program.graph, turn)
    users = [node for node in members if own.intersection(node.all_input_nodes)]
    if not users:
        return
    made: dict[Node, Node] = {}
    end = min(_find_marks(program.graph, forward, _OUTS), default=None) or users[0]

    def emit(target: Any, *args: Any, **kwargs: Any) -> Node:
        with program.graph.inserting_before(members[0]):
            return program.emit(target, *args, **kwargs)

    def is_changed(node: Node) -> bool:
        """Whether the step writes into a slice of xs or the leaf of a layer, in the turn or behind the loop."""
        return not changed.isdisjoint(map(storage, (node, *node.all_input_nodes)))

    def make(node: Node) -> Node:
        """A node's value in the backward pass."""
        if node not in own:
            return node
        if node not in made:
            if _is_free(node, own, changed):
                with program.graph.inserting_before(members[0]):
                    made[node] = program.repeat(node, make)
                made[node].meta = {**node.meta, "val": made[node].meta["val"]}
                set_mark(made[node].meta, get_mark(members[0]))
            elif is_call(node, loops.row, loops.pick) and not is_changed(node):
                made[node] = emit(node.target, operand_of(node), turn.number)
            else:
                made[node] = emit(loops.pick, keep(node), turn.number)
            kinds[made[node]] = kinds[node]
        return made[node]

    def keep(node: Node) -> Node:
        """The list of a node's value in each turn."""
        buckets = _list_buckets(forward, kinds[node])
        with program.graph.inserting_before(end):
            made = program.emit(loops.collect, node, forward.number, forward.length, buckets)
        kinds[made] = [replace(kinds[node], bucket=bucket) for bucket in buckets] or [kinds[node]] * forward.length
        return made

    for user in users:
        user.args, user.kwargs = fx.map_arg((user.args, user.kwargs), make)


def _is_free(node: Node, own: set[Node], changed: set[Any]) -> bool:
    """Whether the backward pass makes a value of a turn again instead of keeping it: a view, what is gathered from a
    slice, the cast of a slice that is gathered."""
    if is_call(node, *_INS) or storage(node) in changed or record(node).writes(node) or len(node.all_input_nodes) != 1:
        return False
    (source,) = node.all_input_nodes
    if is_call(node, ops.gather) or (record(node).shares(node) and _is_view(node, own)):
        return True
    return _comes_from_leaf(source, own) and _moves_leaf(node)


def _is_view(node: Node, own: set[Node]) -> bool:
    """Whether a value in an operand's memory costs nothing to make again: a view of a tensor, and of an item of a list
    of views one whose tensor the turn does not have to keep for it, a leaf or a value from outside."""
    if node.target is not operator.getitem:
        return True
    base = source = operand_of(node)
    while base in own and record(base).shares(base) and len(base.all_input_nodes) == 1 and not is_call(base, *_INS):
        (base,) = base.all_input_nodes
    return base is not source and (base not in own or _comes_from_leaf(base, own))


def _comes_from_leaf(node: Node, own: set[Node]) -> bool:
    """Whether a value of a turn is a leaf of the layer, its cast, what is gathered from these, or a view of that."""
    while node in own and not is_call(node, loops.pick):
        if is_call(node, *_INS) or len(node.all_input_nodes) != 1 or not _moves_leaf(node):
            return False
        (node,) = node.all_input_nodes
    return True


def _moves_leaf(node: Node) -> bool:
    return is_call(node, ops.gather, torch.ops.aten._to_copy.default) or record(node).is_derived


def _list_buckets(turn: Turn, kind: Kind) -> Sequence[str]:
    """The bucket of a slice in each turn; none for other values."""
    if not isinstance(kind, Slice):
        return ()
    return turn.layers.get(kind.bucket, (kind.bucket,) * turn.length)


# loops


def _roll_turn(program: Program, turn: Turn, kinds: dict[Node, Kind]) -> None:
    _pass_by(program, turn, ())  # nothing looks at the leaf later than the loop now
    members = _find_members(program.graph, turn)
    carries, rows, picks = (_find_marks(program.graph, turn, [target]) for target in _INS)
    lasts, stacks, lists = (_find_marks(program.graph, turn, [target]) for target in _OUTS)
    loops.check_users([*members, *carries, *rows, *picks], {*members, *lasts, *stacks, *lists})
    ends, own = [*lasts, *stacks, *lists], {*members, *carries, *rows, *picks}
    used = [*(source for node in members for source in node.all_input_nodes), *map(operand_of, ends)]
    constants = [node for node in dict.fromkeys(used) if node not in own]
    if ends:
        body = _make_body(program, [carries, rows, picks, constants], members, [lasts, stacks, lists], kinds)
        carry, xs, items_of_turns = (list(map(operand_of, nodes)) for nodes in (carries, rows, picks))
        loop = loops.Loop(
            body, turn.length, carry, xs, items_of_turns, constants, turn.sync,
            is_reversed=turn.forward is not None, kept=len(lists), layers=turn.layers,
            loss=turn.loss,
        )  # fmt: skip
        with program.graph.inserting_before(min(ends)):
            call = program.emit(ops.loop, *loop)
            items = [program.emit(operator.getitem, call, i) for i in range(len(ends))]
        call.stack_trace = ends[0].stack_trace
        kinds |= {item: kinds[end] for end, item in zip(ends, items)}
        program.substitute_all(dict(zip(ends, items)))
    for node in reversed([*carries, *rows, *picks, *members]):
        program.graph.erase_node(node)


def _make_body(
    program: Program,
    given: list[list[Node]],
    inner: list[Node],
    ends: list[list[Node]],
    kinds: dict[Node, Kind],
) -> Program:
    """The program of a turn. A result has memory of its own, and all of it: neither that of an argument nor of another
    result, nor a part of a larger tensor."""
    paths = {node: argument.path for node, argument in zip(program.placeholders, program.arguments)}
    graph, values, arguments = fx.Graph(), dict[Node, Node](), list[Argument]()
    for name, nodes in zip(("carry", "xs", "list", "constant"), given):
        for i, node in enumerate(nodes):
            path = paths.get(_find_source(node), f"{name}.{i}") if name in ("list", "constant") else f"{name}.{i}"
            values[node] = graph.placeholder(f"{name}_{i}")
            values[node].meta["val"] = node.meta["val"]
            bucket, leaf = _find_leaf(kinds[node])
            place = Host() if name == "list" and _is_on_host(operand_of(node)) else None
            arguments.append(Argument(path, bucket, leaf, kind=kinds[node], place=place))
    for node in inner:
        values[node] = graph.node_copy(node, values.__getitem__)
        mark = get_mark(node)
        set_mark(values[node].meta, mark._replace(turns=mark.turns[1:]))
    results, returned, taken = list[Result](), list[Node](), set(map(storage, values.values())) - _own(inner)
    body = replace(program.begin_body(graph), arguments=tuple(arguments))
    for name, nodes in zip(("carry", "y", "list"), ends):
        for i, end in enumerate(nodes):
            node = values[operand_of(end)]
            if storage(node) in taken or _is_part(node):
                node = body.emit(torch.ops.aten.clone.default, node)
            taken.add(storage(node))
            returned.append(node)
            kind = arguments[i].kind if name == "carry" else kinds[operand_of(end)]
            bucket, leaf = _find_leaf(kind)
            place = Host() if name == "list" and _is_on_host(end) else None
            results.append(Result(f"{name}.{i}", bucket, leaf, kind=kind, place=place))
    graph.output(returned)
    return roll(replace(body, results=tuple(results)))


def _is_part(node: Node) -> bool:
    """Whether a value is a part of a larger tensor, which the value would keep alive over all turns."""
    value = node.meta["val"]
    return bool(value.untyped_storage().nbytes() > value.numel() * value.element_size())


def _find_source(node: Node) -> Node:
    """The node in front of the trace's first operation on a value: for a leaf of layers that of the first layer."""
    rows = operand_of(node) if is_call(node, loops.pick) else None
    source: Node = rows[0] if isinstance(rows, (list, tuple)) else node
    while is_call(source, torch.ops.aten._to_copy.default):
        source = operand_of(source)
    return source


def _is_on_host(rows: Any) -> bool:
    """Whether a list has saved values of turns, which were copied to the host."""
    if not isinstance(rows, fx.Node):
        return False
    if is_call(rows, loops.collect):
        start = copy_of(operand_of(rows))
        return start is not None and is_call(start, ops.to_host)
    item = item_of(rows)
    body = None if item is None else body_of(item.source)
    return item is not None and body is not None and body.results[item.position].place is not None


def _own(inner: Sequence[Node]) -> set[Any]:
    """The memory that the nodes of a turn make."""
    made = {storage(node) for node in inner}
    given = {storage(source) for node in inner for source in node.all_input_nodes if source not in set(inner)}
    return made - given


def _find_leaf(kind: Kind) -> tuple[str | None, int]:
    """The bucket and leaf of a slice; none for other kinds."""
    return (kind.bucket, kind.leaf) if isinstance(kind, Slice) else (None, 0)
