"""The offload pass: state that lies on the host is updated there, and copied to the device where the device uses it."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from fzero.base.placement import Host
from fzero.passes.cut_rows import cut_rows, has_rows
from fzero.passes.order import find_changes, find_origins, reorder
from fzero.program import ops
from fzero.program.inference import infer
from fzero.program.kinds import Kind, Slice
from fzero.program.operation import Node, nbytes
from fzero.program.ops.loops import Loop
from fzero.program.places import Where, is_placed, is_wide, list_sources, runs_on_device, where_of
from fzero.program.program import Program
from fzero.program.records import body_of, find_writes, is_call, record, shares_memory, storage


def offload(program: Program) -> Program:
    """Copy values between device and host, so that each operation finds its operands where it runs.

    * An operation with a slice on the host runs on the host: the update of the host's state. It takes its other
      operands by `to_host`.
    * A pointwise operation of which only the host uses the result runs on the host too, where that copies no more: a
      gradient leaves as soon as it is there, and is multiplied by the factor of clipping on the host.
    * Anything else runs on the device, and takes operands from the host by `to_device`: a slice in front of each
      all-gather, which is dropped behind it.
    * A result is copied to where the state lies that it replaces.
    * Numbers that follow from arguments alone, such as a step count, are computed and copied first, so that no update
      waits for them.

    A list operation is cut into one for the host and one for the device, and an update on the host into one for each
    bucket. Same results, bit for bit, where the device is a CPU. A program without state on the host stays as it is.
    """
    if not is_placed(program):
        return program
    program = program.copy()
    _place_bodies(program)
    kinds = _cut_updates(program)
    _Transfers(program, _find_host(program, kinds), kinds).insert()
    return program


def _place_bodies(program: Program) -> None:
    """Let the body of each loop take from the host what the loop is given there, and copy it in the turns that use it.
    A list with items in several places is taken from the device."""
    on_host = _list_arguments(program)
    for node in program.graph.nodes:
        if _runs_on_host(node, on_host):
            on_host.add(node)
        if body_of(node) is None:
            continue
        given = Loop(*node.args)
        operands = (*given.carry, *given.xs, *given.lists, *given.constants)
        places = [Host() if _is_on_host(x, on_host) else None for x in operands]
        if any(places):
            body, count = given.body, len(given.carry)
            arguments = tuple(replace(x, place=place) for x, place in zip(body.arguments, places))
            carried = tuple(replace(x, place=place) for x, place in zip(body.results, places[:count]))
            body = replace(body, arguments=arguments, results=carried + body.results[count:])
            node.args = tuple(given._replace(body=offload(body)))


def _cut_updates(program: Program) -> dict[Node, Kind]:
    """Cut list operations, so that all leaves of a call are in one place, and all leaves that an update takes from the
    host in one bucket. Returns the kinds of the nodes."""
    kinds, on_host = infer(program), _list_arguments(program)
    node = next(iter(program.graph.nodes))
    while node.op != "output":  # over what a cut inserts, too
        groups = _group_rows(node, on_host, kinds) if has_rows(node) else []
        if len(groups) > 1:
            node, *_ = cut_rows(program, node, groups)
        if _runs_on_host(node, on_host):
            on_host.add(node)
        node = node.next
    return infer(program)


def _group_rows(node: Node, on_host: set[Node], kinds: dict[Node, Kind]) -> list[list[int]]:
    """The leaves of a list operation by place, those of an update on the host by bucket as well, in the order in which
    gradients are there."""
    groups: dict[Any, list[int]] = {}
    columns = [arg for arg in node.args if isinstance(arg, (list, tuple)) and len(arg) == len(node.args[0])]
    for row in range(len(node.args[0])):
        key: Any = any(column[row] in on_host for column in columns if isinstance(column[row], fx.Node))
        if key and record(node).gradients is not None:
            kind = kinds.get(node.args[0][row])
            key = kind.bucket if isinstance(kind, Slice) else key
        groups.setdefault(key, []).append(row)
    position = record(node).gradients
    if position is None:
        return list(groups.values())
    grads = node.args[position]
    return sorted(groups.values(), key=lambda rows: max(grads[row] for row in rows))


def _find_host(program: Program, kinds: dict[Node, Kind]) -> set[Node]:
    """The nodes that run on the host, and the arguments that lie there."""
    on_host = _list_arguments(program)
    for node in program.graph.nodes:
        if _runs_on_host(node, on_host):
            on_host.add(node)
    for node in reversed(list(program.graph.nodes)):
        if node not in on_host and _may_follow(node, on_host, kinds):
            on_host.add(node)
            on_host.update(user for user in node.users if is_call(user, operator.getitem))
    return on_host


def _list_arguments(program: Program) -> set[Node]:
    """The arguments on the host."""
    pairs = zip(program.placeholders, program.arguments)
    return {node for node, argument in pairs if where_of(argument) == "host"}


def _is_on_host(operand: Any, on_host: set[Node]) -> bool:
    """Whether an operand of a loop, a node or a list of nodes, lies on the host."""
    return all(x in on_host for x in (operand if isinstance(operand, (list, tuple)) else [operand]))


def _runs_on_host(node: Node, on_host: set[Node]) -> bool:
    """Whether a node, whose operands have been looked at, runs on the host: some operand is a slice there, and each
    operand that it writes into."""
    if node.op != "call_function" or runs_on_device(node):
        return False
    if record(node).to is not None:  # a saved value
        return record(node).to == "host"
    if record(node).arrives:
        return node.args[0] in on_host
    body = body_of(node.args[0]) if is_call(node, operator.getitem) else None
    if body is not None:
        return where_of(body.results[node.args[1]]) == "host"
    takes = any(x in on_host and is_wide(x) for x in node.all_input_nodes)
    return takes and all(x in on_host for x in find_writes(node))


def _may_follow(node: Node, on_host: set[Node], kinds: dict[Node, Kind]) -> bool:
    """Whether a node may run on the host because only the host uses what it computes from slices."""
    if node.op != "call_function" or find_writes(node) or shares_memory(node) or runs_on_device(node):
        return False
    is_list = has_rows(node)
    items = list(node.users) if is_list else [node]
    users = {user for item in items for user in item.users}
    if any(record(user).to is not None for user in users):
        return False
    if not users or not users <= on_host or not (is_list or record(node).is_pointwise):
        return False
    wide = [x for x in node.all_input_nodes if is_wide(x)]
    own = [kinds[x] for x in (items if is_list else wide)]
    if not wide or not all(isinstance(kind, Slice) for kind in own):
        return False
    return sum(nbytes(x.meta["val"]) for x in wide if x not in on_host) <= nbytes(node.meta["val"])


class _Transfers:
    """The copies of a program's values, which `insert` puts into its graph."""

    def __init__(self, program: Program, on_host: set[Node], kinds: dict[Node, Kind]) -> None:
        self.program, self.graph, self.on_host, self.kinds = program, program.graph, on_host, kinds
        self._changed = find_changes(program.graph)
        self._origins = find_origins(program.graph, "scattered")
        self._copies: dict[Node, Node] = {}  # of values that nothing writes into
        self._early = _find_early_numbers(program.graph)

    def insert(self) -> None:
        """Insert all copies."""
        for node in list(self.graph.nodes):
            if node.op == "call_function":
                here: Where = "host" if node in self.on_host else "device"
                away = [x for x, where in list_sources(node, here) if (x in self.on_host) != (where == "host")]
                if away:
                    self._bring(away, node, here == "host")
                if here == "host" and node.kwargs.get("device") is not None:
                    node.kwargs = {**node.kwargs, "device": torch.device("cpu")}
        self._return()
        starts = self.graph.find_nodes(op="call_function", target=ops.to_host)
        first = {*self._early, *(start for start in starts if self._early.issuperset(start.args[0]))}
        if first:
            nodes = [node for node in self.graph.nodes if node.op == "placeholder" or node in first]
            reorder(self.graph, dict.fromkeys([*nodes, *self.graph.nodes]))

    def _bring(self, values: Sequence[Node], user: Node, to_host: bool) -> None:
        """Give a user copies of these operands. Copies to the host, and of numbers, serve later users too."""
        copies = {x: self._copies[x] for x in values if x in self._copies}
        groups = self._group(x for x in values if x not in copies)
        computed = [x for group in groups for x in group if x.op == "call_function" and is_wide(x)]
        for group in groups:
            is_kept = not any(storage(x) in self._changed for x in group)
            behind = [x for x in group if x.op == "call_function"] or computed  # parameters leave with their gradients
            at = max(behind).next if to_host and is_kept and behind else user
            made = self._copy(group, at, user, to_host)
            copies |= made
            if is_kept:
                self._copies |= {x: copy for x, copy in made.items() if to_host or not is_wide(x)}
        user.args, user.kwargs = fx.map_arg((user.args, user.kwargs), lambda x: copies.get(x, x))

    def _copy(self, values: Sequence[Node], at: Node, user: Node, to_host: bool) -> dict[Node, Node]:
        """Start copies in front of `at`, and wait for them in front of `user`."""
        with self.graph.inserting_before(at):
            start = self.program.emit(ops.to_host if to_host else ops.to_device, list(values))
        with self.graph.inserting_before(user):
            arrived = self.program.emit(ops.arrive, start)
            return {x: self.program.emit(operator.getitem, arrived, i) for i, x in enumerate(values)}

    def _group(self, values: Iterable[Node]) -> list[list[Node]]:
        """Values that are copied at once: slices that a collective made together, and otherwise slices of a bucket."""
        groups: dict[Any, list[Node]] = {}
        for x in dict.fromkeys(values):
            kind = self.kinds.get(x)
            bucket = kind.bucket if isinstance(kind, Slice) else None
            groups.setdefault((self._origins.get(x), x.op, bucket, is_wide(x), x in self._early), []).append(x)
        return list(groups.values())

    def _return(self) -> None:
        """Copy each result to where it belongs, right behind the operation that computes it."""
        returned, moved = list(self.program.output.args[0]), dict[Any, dict[Node, Node]]()
        for result, node in zip(self.program.tensor_results, returned):
            to_host = where_of(result) == "host"
            if (node in self.on_host) != to_host:
                moved.setdefault((to_host, _find_call(node)), {})[node] = node
        copies: dict[tuple[Node, bool], Node] = {}
        for (to_host, _), nodes in moved.items():
            made = self._copy(list(nodes), max(nodes).next, self.program.output, to_host)
            copies |= {(node, to_host): copy for node, copy in made.items()}
        self.program.output.args = (
            [
                copies.get((node, where_of(result) == "host"), node)
                for result, node in zip(self.program.tensor_results, returned)
            ],
        )


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
    while is_call(node, operator.getitem):
        node = node.args[0]
    return node
