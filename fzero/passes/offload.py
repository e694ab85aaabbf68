"""The offload pass: state that lies on the host or on a disk is updated on the host, and copied to the device where the
device uses it."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from fzero.base.placement import Host, Placement
from fzero.passes.cut_rows import cut_rows, has_rows
from fzero.passes.order import find_changes, find_origins, reorder
from fzero.program import ops
from fzero.program.arguments import item_of, operand_of, sources_of, start_of
from fzero.program.inference import infer
from fzero.program.kinds import Kind, Slice
from fzero.program.operation import Node, nbytes
from fzero.program.ops.loops import Loop
from fzero.program.ops.transfers import COPIES
from fzero.program.places import CHAIN, Where, is_placed, is_wide, list_sources, runs_on_device, step_towards, where_of
from fzero.program.program import Program
from fzero.program.records import alias_of, body_of, find_writes, is_call, record, shares_memory, storage
from fzero.program.signature import Result

Away = dict[Node, Placement]
"""The nodes whose values lie elsewhere than on the device -> where."""


def offload(program: Program) -> Program:
    """Copy values between device, host and disk, so that each operation finds its operands where it runs.

    * An operation with a slice on the host or on a disk runs on the host: the update of that state. It takes its other
      operands by `to_host`, and slices on a disk by `read`. An operation that writes runs where the memory lies that it
      writes into.
    * A pointwise operation of which only the host uses the result runs on the host too, where that copies no more: a
      gradient leaves as soon as it is there, and is multiplied by the factor of clipping on the host.
    * Anything else runs on the device, and takes operands from the host by `to_device`: a slice in front of each
      all-gather, which is dropped behind it. A slice on a disk is read into the memory of the host first.
    * A result is copied to where the state lies that it replaces: into a file by `write`.
    * Numbers that follow from arguments alone, such as a step count, are computed and copied first, so that no update
      waits for them.

    A list operation is cut into one for the device and, on the host, one for each bucket. Same results, bit for bit,
    where the device is a CPU. A program with all state on the device stays as it is.
    """
    if not is_placed(program):
        return program
    program = program.take()
    _place_bodies(program)
    kinds = _cut_updates(program)
    away = _find_away(program, kinds)
    _cut_followers(program, away, kinds)
    _Transfers(program, away, kinds).insert()
    return program


def _place_bodies(program: Program) -> None:
    """Let the body of each loop take from the host or the disk what the loop is given there, and copy it in the turns
    that use it. A list with items in several places is taken from the host, with an item on the device from there."""
    away = _list_arguments(program)
    for node in program.graph.nodes:
        _note_place(node, away)
        if body_of(node) is None:
            continue
        given = Loop(*node.args)
        places = [_find_common_place(x, away) for x in given.operands]
        if any(places):
            body, count = given.body, len(given.carry)
            arguments = tuple(replace(x, place=place) for x, place in zip(body.arguments, places))
            carried = tuple(replace(x, place=place) for x, place in zip(body.results, places[:count]))
            body = replace(body, arguments=arguments, results=carried + body.results[count:])
            node.args = tuple(given._replace(body=offload(body)))


def _cut_updates(program: Program) -> dict[Node, Kind]:
    """Cut list operations, so that all leaves of a call are in one place, and on the host in one bucket. Returns the
    kinds of the nodes."""
    kinds, away = infer(program), _list_arguments(program)
    node = next(iter(program.graph.nodes))
    while node.op != "output":  # over what a cut inserts, too
        groups = _group_rows(node, away, kinds) if has_rows(node) else []
        if len(groups) > 1:
            node, *_ = cut_rows(program, node, groups)
        _note_place(node, away)
        node = node.next
    return infer(program)


def _group_rows(node: Node, away: Away, kinds: dict[Node, Kind]) -> list[list[int]]:
    """The leaves of a list operation by place, those on the host by bucket as well. An operation that writes runs where
    the memory lies that it writes into. Those of an update are in the order in which gradients are there."""
    groups: dict[Any, list[int]] = {}
    first = operand_of(node)
    lists = [first] if find_writes(node) else node.args
    columns = [arg for arg in lists if isinstance(arg, (list, tuple)) and len(arg) == len(first)]
    for row, x in enumerate(first):
        key: Any = any(column[row] in away for column in columns if isinstance(column[row], fx.Node))
        if key:
            key = _find_bucket(x, kinds) or key
        groups.setdefault(key, []).append(row)
    position = record(node).gradients
    if position is None:
        return list(groups.values())
    grads = node.args[position]
    return sorted(groups.values(), key=lambda rows: max(grads[row] for row in rows))


def _cut_followers(program: Program, away: Away, kinds: dict[Node, Kind]) -> None:
    """Cut the other list operations on the host by bucket as well, the last first: `kinds` does not know what a cut
    inserts."""
    for call in reversed(list(program.graph.nodes)):
        if call in away and has_rows(call):
            groups: dict[str | None, list[int]] = {}
            for row, x in enumerate(operand_of(call)):
                groups.setdefault(_find_bucket(x, kinds), []).append(row)
            if len(groups) > 1:
                new = cut_rows(program, call, list(groups.values()))
                items = [item for part in new for item in part.users]
                rows = [row for item in items if isinstance(item.meta["val"], (list, tuple)) for row in item.users]
                away.update(dict.fromkeys([*new, *items, *rows], Host()))


def _find_bucket(node: Node, kinds: dict[Node, Kind]) -> str | None:
    """The bucket whose slice a value is; None for any other value."""
    kind = kinds.get(node)
    return kind.bucket if isinstance(kind, Slice) else None


def _find_away(program: Program, kinds: dict[Node, Kind]) -> Away:
    """The nodes that run on the host, and the arguments that lie elsewhere than on the device."""
    away = _list_arguments(program)
    for node in program.graph.nodes:
        _note_place(node, away)
    for node in reversed(list(program.graph.nodes)):
        if node not in away and _may_follow(node, away, kinds):
            away[node] = Host()
            away.update((user, Host()) for user in node.users if is_call(user, operator.getitem))
    return away


def _list_arguments(program: Program) -> Away:
    """The arguments that lie elsewhere than on the device."""
    pairs = zip(program.placeholders, program.arguments)
    return {node: argument.place for node, argument in pairs if argument.place is not None}


def _find_common_place(operand: Any, away: Away) -> Placement | None:
    """Where a loop takes an operand from, a node or a list of nodes."""
    places = {away.get(x) for x in (operand if isinstance(operand, (list, tuple)) else [operand])}
    return places.pop() if len(places) == 1 else None if None in places else Host()


def _note_place(node: Node, away: Away) -> None:
    """Note where the value of a node lies whose operands have been looked at.

    A node that writes, or views, runs on the host where the memory that it writes into, or views, is elsewhere than on
    the device. Any other node does where some operand is a slice elsewhere than on the device, or where it takes the
    shape of a number there: that number is not copied.
    """
    if node.op != "call_function" or runs_on_device(node):
        return
    if record(node).to is not None or record(node).arrives:  # a saved value
        if record(node).to == "host" or (record(node).arrives and start_of(node) in away):
            away[node] = Host()
        return
    item = item_of(node)
    body = None if item is None else body_of(item.source)
    if item is not None and body is not None:
        place = body.results[item.position].place
    else:
        source = alias_of(node)
        memory = find_writes(node) or ([] if source is None else [source])
        takes = any(x in away and (is_wide(x) or record(node).takes_shape) for x in node.all_input_nodes)
        place = Host() if (all(x in away for x in memory) if memory else takes) else None
    if place is not None:
        away[node] = place


def _may_follow(node: Node, away: Away, kinds: dict[Node, Kind]) -> bool:
    """Whether a node may run on the host because only the host uses what it computes from slices."""
    if node.op != "call_function" or find_writes(node) or shares_memory(node) or runs_on_device(node):
        return False
    is_list = has_rows(node)
    items = list(node.users) if is_list else [node]
    users = {user for item in items for user in item.users}
    if any(record(user).to is not None for user in users):
        return False
    if not users or not users <= away.keys() or not (is_list or record(node).is_pointwise):
        return False
    wide = [x for x in node.all_input_nodes if is_wide(x)]
    own = [kinds[x] for x in (items if is_list else wide)]
    if not wide or not all(isinstance(kind, Slice) for kind in own):
        return False
    return sum(nbytes(x.meta["val"]) for x in wide if x not in away) <= nbytes(node.meta["val"])


class _Transfers:
    """The copies of a program's values, which `insert` puts into its graph."""

    def __init__(self, program: Program, away: Away, kinds: dict[Node, Kind]) -> None:
        self.program, self.graph, self.away, self.kinds = program, program.graph, away, kinds
        writes = ((storage(written), node) for node in program.graph.nodes for written in find_writes(node))
        self._changed = dict(writes)  # memory that some node writes into -> the last of these nodes
        self._origins = find_origins(program.graph, "scattered")
        self._copies: dict[tuple[Node, Where], Node] = {}  # of values that nothing writes into
        self._early = _find_early_numbers(program.graph)

    def insert(self) -> None:
        """Insert all copies."""
        for node in list(self.graph.nodes):
            if node.op == "call_function":
                sources = list_sources(node, self._find_where(node))
                away = [(x, where) for x, where in sources if where != self._find_where(x)]
                for there in CHAIN if away else ():
                    for x, copy in self._bring([x for x, where in away if where == there], node, there).items():
                        node.replace_input_with(x, copy)
                is_sized_by_disk = record(node).takes_shape and "disk" in map(self._find_where, node.all_input_nodes)
                if self._find_where(node) == "host" and (node.kwargs.get("device") is not None or is_sized_by_disk):
                    node.kwargs = {**node.kwargs, "device": torch.device("cpu")}
        self._return()
        starts = self.graph.find_nodes(op="call_function", target=ops.to_host)
        first = {*self._early, *(start for start in starts if self._early.issuperset(sources_of(start)))}
        if first:
            nodes = [node for node in self.graph.nodes if node.op == "placeholder" or node in first]
            reorder(self.graph, dict.fromkeys([*nodes, *self.graph.nodes]))

    def _find_where(self, node: Node) -> Where:
        return self.away[node].where if node in self.away else "device"

    def _bring(self, values: Sequence[Node], user: Node, there: Where, *, is_on_the_way: bool = False) -> Any:
        """Copies of these values at a place, for a user, by way of the places between. Copies on the host, and of
        numbers, serve later users too, unless they are on the way to another place."""
        copies = {x: self._copies[x, there] for x in values if (x, there) in self._copies and not is_on_the_way}
        rest = [x for x in dict.fromkeys(values) if x not in copies]
        between = {x: step_towards(self._find_where(x), there) for x in rest}
        far = [x for x in rest if between[x] != there]
        near = self._bring(far, user, between[far[0]], is_on_the_way=True) if far else {}
        groups = self._group(near.get(x, x) for x in rest)
        computed = [x for group in groups for x in group if x.op == "call_function" and is_wide(x)]
        made = dict[Node, Node]()
        for group in groups:
            is_kept = not any(storage(x) in self._changed for x in group)
            leaves = self._find_where(group[0]) == "device" and is_kept
            behind = [x for x in group if x.op != "placeholder"] or computed  # parameters leave with their gradients
            new = self._copy(group, max(behind).next if leaves and behind else user, user, there)
            made |= new
            if is_kept and not is_on_the_way:
                self._copies |= {(x, there): new[x] for x in group if there == "host" or not is_wide(x)}
        return copies | {x: made[near.get(x, x)] for x in rest}

    def _copy(self, values: Sequence[Node], at: Node, user: Node, there: Where, *into: str) -> dict[Node, Node]:
        """Start copies to the next place in front of `at`, and wait for them in front of `user`."""
        with self.graph.inserting_before(at):
            start = self.program.emit(COPIES[self._find_where(values[0]), there], list(values), *into)
        with self.graph.inserting_before(user):
            arrived = self.program.emit(ops.arrive, start)
            copies = {x: self.program.emit(operator.getitem, arrived, i) for i, x in enumerate(values)}
        self.kinds.update({copy: self.kinds[x] for x, copy in copies.items() if x in self.kinds})
        if there == "host":
            self.away.update(dict.fromkeys([start, arrived, *copies.values()], Host()))
        return copies

    def _group(self, values: Iterable[Node]) -> list[list[Node]]:
        """Values that are copied at once: slices that a collective made together, and otherwise slices of a bucket."""
        groups: dict[Any, list[Node]] = {}
        for x in dict.fromkeys(values):
            bucket = _find_bucket(x, self.kinds)
            key = self._find_where(x), self._origins.get(x), x.op, bucket, is_wide(x), x in self._early
            groups.setdefault(key, []).append(x)
        return list(groups.values())

    def _return(self) -> None:
        """Copy each result to where it belongs, right behind the operation that computes it."""
        returned, moved = list(self.program.returned), dict[Any, dict[Node, None]]()
        for result, node in zip(self.program.tensor_results, returned):
            if self._find_where(node) != where_of(result):
                moved.setdefault((result.place, *_name_files(result), _find_call(node)), {})[node] = None
        copies: dict[tuple[Node, Placement | None], Node] = {}
        for (place, *into, _), nodes in moved.items():
            made = self._send(list(nodes), "device" if place is None else place.where, into)
            copies |= {(node, place): copy for node, copy in made.items()}
        pairs = zip(self.program.tensor_results, returned)
        self.program.output.args = ([copies.get((node, result.place), node) for result, node in pairs],)

    def _send(self, nodes: list[Node], there: Where, into: Sequence[str]) -> dict[Node, Node]:
        """Copies of results at another place, by way of the places between. They start behind the last write."""
        last = max(nodes + [self._changed[storage(x)] for x in nodes if storage(x) in self._changed])
        at, copies, here = last.next, dict(zip(nodes, nodes)), self._find_where(nodes[0])
        while here != there:
            here = step_towards(here, there)
            made = self._copy(list(copies.values()), at, self.program.output, here, *(into if here == "disk" else ()))
            copies, at = {node: made[x] for node, x in copies.items()}, self.program.output
        return copies


def _name_files(result: Result) -> tuple[str, ...]:
    """The folder and the bucket of a result that is written into a file; nothing for another result."""
    if result.place is None or result.place.where != "disk":
        return ()
    bucket = result.kind.bucket if isinstance(result.kind, Slice) else result.bucket
    return (str(result.place.path), bucket or "")


def _find_early_numbers(graph: fx.Graph) -> set[Node]:
    """The nodes that compute numbers from numbers that are arguments."""
    early, changed = set[Node](), find_changes(graph)
    for node in graph.nodes:
        is_number = node.op == "call_function" and not is_wide(node) and not runs_on_device(node)
        known = all(x in early or (x.op == "placeholder" and not is_wide(x)) for x in node.all_input_nodes)
        if is_number and known and storage(node) not in changed and not record(node).draws:
            early.add(node)
    return early


def _find_call(node: Node) -> Node:
    """The call that a node is an item of, or the node itself."""
    while (item := item_of(node)) is not None:
        node = item.source
    return node
