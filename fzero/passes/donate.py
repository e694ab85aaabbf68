"""The donate pass: steps update state in place."""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from fzero.base.torch_private import overload_name
from fzero.passes.owners import MemoryOwners
from fzero.program import ops
from fzero.program.arguments import Item, item_of, items_of, operand_of, position_of, sources_of
from fzero.program.kinds import Slice
from fzero.program.operation import Node
from fzero.program.ops.loops import Loop
from fzero.program.ops.transfers import OVERWRITING, copy_of
from fzero.program.places import where_of
from fzero.program.program import Program
from fzero.program.records import body_of, find_calls, find_writes, name_of, record, storage
from fzero.program.signature import Argument

_TIMES_A_NUMBER = (
    torch.ops.aten.mul.Scalar,
    torch.ops.aten._foreach_mul.Scalar,
    torch.ops.aten._foreach_mul.ScalarList,
)
_NARROW = frozenset({torch.float16, torch.bfloat16})
"""The dtypes in which the in-place forms of `_TIMES_A_NUMBER` round the number first, on a CPU (torch 2.13): a learning
rate in bfloat16 would be off by up to 0.4 %, and one of 1e-8 in float16 would be 0."""


def donate(program: Program) -> Program:
    """Write each new state value into the memory of the state argument that it replaces, and mark the argument
    `donated`.

    Same results, bit for bit; no second copy of parameters or optimizer state. An operation works in place where

    * its first operand is a state argument and its result is state of the same leaf,
    * nothing reads the argument after the operation,
    * the operation reads no other view of the argument, and a list operation reads it for its own item alone.

    The carry of a loop is updated in place where all of its leaves can be: from turn to turn, and in the memory that
    the loop was given, or in a copy of it where the step uses that memory elsewhere.

    A step that has such a result is an update. The other state results of an update are copied into the arguments of
    the same path at the end of the step, when everything has been read. Lists of gradients are overwritten at their
    last use.
    """
    is_body = any(argument.kind is not None for argument in program.arguments)
    given, program = program, program.copy() if is_body else program.take()
    owners = MemoryOwners(program)
    _reuse_lists(program, owners)
    is_update = is_body or _is_update(
        program, owners
    )  # before results become arguments, which have no operands to look at
    donated = _work_in_place(program, owners, is_update)
    if is_update:
        donated |= _copy_back(program, owners, donated)
    arguments = tuple(
        replace(argument, donated=node in donated) for argument, node in zip(program.arguments, program.placeholders)
    )
    if is_body and not _keeps_its_carry(program, donated):
        return given
    return replace(program, arguments=arguments)


def _keeps_its_carry(program: Program, donated: set[Node]) -> bool:
    """Whether every carry of a loop's body is donated and is the result in its own place."""
    carries = [result for result in program.results if result.path.startswith("carry.")]
    pairs = list(zip(carries, program.placeholders, program.returned))
    return donated == {old for _, old, _ in pairs} and all(old is new for _, old, new in pairs)


def _list_state_results(program: Program) -> list[tuple[int, Any, Node]]:
    """`(position in the output, result, node)` of each result that is state, and of the results of a loop's body."""
    returned = zip(program.tensor_results, program.returned)
    return [
        (i, result, node)
        for i, (result, node) in enumerate(returned)
        if result.bucket is not None or result.kind is not None
    ]


def _matches(owners: MemoryOwners, placeholder: Node, result: Any, node: Node) -> bool:
    """Whether a state argument has the layout, leaf and dtype of a result. In a loop's body, whether the argument is
    the carry that the result is the next value of."""
    argument = owners.argument[placeholder]
    if argument.kind is not None:
        return bool(argument.path == result.path)
    same = (argument.bucket, argument.leaf) == (result.bucket, result.leaf)
    return same and placeholder.meta["val"].dtype == node.meta["val"].dtype


def _is_update(program: Program, owners: MemoryOwners) -> bool:
    """Whether some state result has the state argument of its leaf as first operand, as in `p + u`."""
    for _, result, node in _list_state_results(program):
        call = _follow_copies(node)
        path: list[int] = []
        while (item := item_of(call)) is not None:
            call, path = item.source, [item.position, *path]
        if call.op == "call_function" and record(call).in_place is not None:
            return True
        first = operand_of(call) if call.args else None
        if path and isinstance(first, (list, tuple)):
            first = dict(enumerate(first)).get(path[-1])
        first = _follow_copies(first) if isinstance(first, fx.Node) else None
        if first is not None and first.op == "placeholder" and _matches(owners, first, result, node):
            return True
    return False


def _follow_copies(node: Node) -> Node:
    """The value that a node is a copy of from another place, by way of any others; other nodes themselves."""
    while (original := _find_original(node)) is not None:
        node = original
    return node


def _work_in_place(program: Program, owners: MemoryOwners, is_update: bool) -> set[Node]:
    """Turn operations whose results replace their operands into their in-place forms. Returns the donated arguments."""
    wanted = {node: result for _, result, node in _list_state_results(program)}
    donated: set[Node] = set()
    for node in list(program.graph.nodes):
        if body_of(node) is not None:
            donated |= _replace_carry(program, owners, node, wanted)
        elif node.op == "call_function" and record(node).in_place is not None:
            donated |= _replace_columns(program, owners, node, wanted)
        elif name_of(node).startswith("_foreach_"):
            donated |= _replace_lists(program, owners, node, wanted)
        elif node in wanted:
            donated |= _replace_one(program, owners, node, wanted)
    return donated | _copy_into_arguments(program, owners, wanted, is_update)


def _replace_columns(program: Program, owners: MemoryOwners, call: Node, wanted: dict[Node, Any]) -> set[Node]:
    """Turn an operation whose record has an in-place form, and which replaces whole lists of operands, into that."""
    operation = record(call)
    columns = items_of(call)
    news: dict[Node, Node] = {}
    for index, argument in enumerate(operation.replaces):
        items = items_of(columns[index]) if index in columns else {}
        news.update({old: items.get(position) for position, old in enumerate(call.args[argument])})
    reads = owners.reads(call)

    def may_overwrite(old: Node, new: Node | None) -> bool:
        is_copy = _find_original(old) is not None and owners.dies_at(old, call)
        return reads[owners.owner[old]] == 1 and (is_copy or _replaces(owners, call, old, new, wanted))

    if not all(may_overwrite(old, new) for old, new in news.items()):
        return set()
    call.target, call.meta["val"] = operation.in_place, None
    for old, new in news.items():
        if new is not None:
            owners.join(old, new)
    program.substitute_all({new: old for old, new in news.items() if new is not None})
    for column in columns.values():
        program.graph.erase_node(column)
    return {old for old in news if old.op == "placeholder"}


def _find_original(node: Node) -> Node | None:
    """The value that a node is a copy of from the place before; None for any other node."""
    start = copy_of(node) if node.all_input_nodes else None  # an erased node has no operands
    return None if start is None else sources_of(start)[position_of(node)]


def _copy_into_arguments(program: Program, owners: MemoryOwners, wanted: dict[Node, Any], is_update: bool) -> set[Node]:
    """Let copies of new state overwrite the arguments that it replaces, where all copies of a start do: the state was
    computed in the memory of a copy of the argument, which nothing has read since. On a disk the argument of the same
    path serves too, in an update. Returns the arguments."""
    donated = set[Node]()
    by_path = {argument.path: node for node, argument in owners.argument.items() if is_update}

    def find(start: Node, new: Node, item: Node | None) -> Node | None:
        if item not in wanted:
            return None
        old, result = _find_argument(owners, new), wanted[item]
        if old is None and start.target is ops.write:
            old = by_path.get(result.path)
            old = old if old is not None and owners.dies_at(old, start) else None
        is_there = old is not None and owners.argument[old].place == result.place
        return old if is_there and _matches(owners, old, result, item) else None

    for start in [node for node in program.graph.nodes if node.target in OVERWRITING]:
        (arrived,) = start.users
        items, news = items_of(arrived), sources_of(start)
        olds = [find(start, new, items.get(i)) for i, new in enumerate(news)]
        if None not in olds and len({*olds} - donated) == len(olds):
            start.target, start.args, start.meta["val"] = OVERWRITING[start.target], (news, olds), None
            arrived.meta["val"] = None
            program.substitute_all({item: olds[i] for i, item in items.items()})
            donated.update(olds)
    return donated


def _find_argument(owners: MemoryOwners, new: Node) -> Node | None:
    """The argument that a value was copied from, whose memory `new` has: a copy of it, overwritten since. None where
    something reads the argument behind the copy."""
    for node in owners.nodes[owners.owner[new]]:
        original = _find_original(node)
        if original is not None and original.op == "placeholder":
            return original if owners.dies_at(original, Item(*node.args).source) else None
    return None


def _replace_lists(program: Program, owners: MemoryOwners, call: Node, wanted: dict[Node, Any]) -> set[Node]:
    """Turn a `_foreach_` operation into its in-place form, where every item replaces the operand at its position."""
    in_place = _find_in_place(call)
    if in_place is None:
        return set()
    items, olds = items_of(call), list(operand_of(call))
    if not all(_replaces(owners, call, old, items.get(i), wanted) for i, old in enumerate(olds)):
        return set()
    if not _are_apart(owners, call):
        return set()
    _overwrite(program, owners, call, in_place)
    return set(olds)


def _replace_one(program: Program, owners: MemoryOwners, call: Node, wanted: dict[Node, Any]) -> set[Node]:
    """Put the in-place form of an operation behind it, where the result replaces the first operand."""
    in_place, old = _find_in_place(call), operand_of(call) if call.args else None
    if in_place is None or not isinstance(old, fx.Node):
        return set()
    views = [x for x in call.all_input_nodes if owners.owner[x] == owners.owner[old]]
    if views != [old] or not _replaces(owners, call, old, call, wanted):  # it may be given twice, as in `p * p`
        return set()
    with program.graph.inserting_after(call):
        program.emit(in_place, *call.args, **call.kwargs)
    owners.join(old, call)
    program.substitute(call, old)
    return {old}


def _replace_carry(program: Program, owners: MemoryOwners, loop: Node, wanted: dict[Node, Any]) -> set[Node]:
    """Let a loop whose body updates its carry in place write into state arguments that the results replace, into
    temporaries that nothing else reads, and otherwise into copies."""
    donated, news = set[Node](), dict[Node, Node]()
    items = items_of(loop)
    reads = owners.reads(loop)
    fixed = {owners.owner[node] for node in program.placeholders + program.graph.find_nodes(op="get_attr")}
    given = Loop(*loop.args)
    carry = list(given.carry)
    for i, (argument, old) in enumerate(zip(given.body.arguments, carry)):
        if not argument.donated:
            continue
        new, memory = items.get(i), owners.owner[old]
        if new is not None and storage(new) == storage(old):
            continue  # another pass has made the loop so
        if new is not None and reads[memory] == 1 and _replaces(owners, loop, old, new, wanted):
            donated.add(old)
        elif (
            memory in fixed or reads[memory] > 1 or not owners.dies_at(old, loop) or not old.meta["val"].is_contiguous()
        ):
            with program.graph.inserting_before(loop):
                carry[i] = _clone(program, old, argument)
            owners.add(carry[i], loop)
            reads[memory] -= 1
        if new is not None:
            owners.join(carry[i], new)
            news[new] = carry[i]
    if any(argument.donated for argument in given.body.arguments):
        loop.args = tuple(given._replace(carry=carry))
        program.refresh_with([loop])
        program.substitute_all(news)
    return donated


def _clone(program: Program, old: Node, argument: Argument) -> Node:
    """A copy of a loop's operand, which lies where the operand lies."""
    if argument.place is None or argument.place.where != "disk":
        return program.emit(torch.ops.aten.clone.default, old)
    assert isinstance(argument.kind, Slice)  # nothing else lies on a disk
    for start, *into in ((ops.read,), (ops.write, str(argument.place.path), argument.kind.bucket)):
        arrived = program.emit(ops.arrive, program.emit(start, [old], *into))
        old = program.emit(operator.getitem, arrived, 0)
    return old


def _replaces(owners: MemoryOwners, call: Node, old: Node, new: Node | None, wanted: dict[Node, Any]) -> bool:
    """Whether `new`, which `call` computes from the argument `old`, is the state that replaces it, and nothing reads
    the argument later."""
    return (
        new in wanted
        and old.op == "placeholder"
        and _matches(owners, old, wanted[new], new)
        and owners.dies_at(old, call)
    )


def _are_apart(owners: MemoryOwners, call: Node) -> bool:
    """Whether each item of a list operation can overwrite its first operand: no other item reads that memory."""
    olds, *lists = call.args
    lists += call.kwargs.values()
    columns = [[*zip(column, olds)] if isinstance(column, (list, tuple)) else [(column, None)] for column in lists]
    beside = [x for column in columns for x, old in column if isinstance(x, fx.Node) and x is not old]
    written = {owners.owner[old] for old in olds}
    return len(written) == len(olds) and written.isdisjoint(owners.owner[x] for x in beside)


def _reuse_lists(program: Program, owners: MemoryOwners) -> None:
    """Turn list operations into their in-place forms where the operands are temporaries in memory of their own that
    nothing reads later."""
    given = {owners.owner[node] for node in program.placeholders + program.graph.find_nodes(op="get_attr")}
    for call in find_calls(program.graph, lambda known: known.name.startswith("_foreach_")):
        in_place = _find_in_place(call)
        if in_place is None:
            continue
        olds = list(operand_of(call))
        apart = _are_apart(owners, call) and given.isdisjoint(owners.owner[old] for old in olds)
        pairs = zip(olds, call.meta["val"])
        fits = all(_has_distinct_elements(old) and old.meta["val"].dtype == new.dtype for old, new in pairs)
        if apart and fits and all(owners.dies_at(old, call) for old in olds):
            _overwrite(program, owners, call, in_place)


def _has_distinct_elements(node: Node) -> bool:
    """Whether each element of a node's value has memory of its own. The elements of an expanded view have not."""
    return 0 not in [stride for size, stride in zip(node.meta["val"].shape, node.meta["val"].stride()) if size > 1]


def _find_in_place(call: Node) -> Any:
    """The in-place overload of a node's operation: `_foreach_mul_.Scalar` for `_foreach_mul.Scalar`, `add_.Tensor` for
    `add.Tensor`. None where torch has none or one of other bits, or where the operation is not pointwise."""
    name = name_of(call)
    if call.target in _TIMES_A_NUMBER:
        given = operand_of(call)
        given = given if isinstance(given, (list, tuple)) else [given]
        if any(x.meta["val"].dtype in _NARROW for x in given):
            return None
    if not name.startswith("_foreach_") and torch.Tag.pointwise not in getattr(call.target, "tags", ()):
        return None
    packet = getattr(getattr(torch.ops, call.target.namespace), name + "_", None)
    return getattr(packet, overload_name(call.target), None)


def _overwrite(program: Program, owners: MemoryOwners, call: Node, in_place: Any) -> None:
    """Make `call` write into its first list. The nodes of that list take the place of the items of the result."""
    olds = {item: operand_of(call)[position_of(item)] for item in call.users}
    for item, old in olds.items():
        owners.join(old, item)
    program.substitute_all(olds)
    call.target, call.meta["val"] = in_place, None


def _copy_back(program: Program, owners: MemoryOwners, donated: set[Node]) -> set[Node]:
    """Copy the other state results of an update into the arguments of the same path: on the device in one operation at
    the end, on the host bucket by bucket, as soon as the arguments have been read and their new values written.

    Returns the arguments that are written to.
    """
    returned = list(program.returned)
    kept = {owners.owner[node] for node in returned}
    free = {
        argument.path: node
        for node, argument in zip(program.placeholders, program.arguments)
        if (argument.bucket is not None or argument.kind is not None)
        and node not in donated
        and owners.owner[node] not in kept
        and where_of(argument) != "disk"
    }
    pairs: dict[Any, list[tuple[Node, Node]]] = {}
    for position, result, node in _list_state_results(program):
        into = free.get(result.path)
        if into is not None and node.op != "placeholder" and _matches(owners, into, result, node):
            place = owners.argument[into].place
            pairs.setdefault((place, place and result.bucket), []).append((into, node))
            returned[position] = into
    written = _find_last_writes(program, owners) if any(place is not None for place, _ in pairs) else {}
    for (place, _), of_group in pairs.items():
        end = program.output if place is None else _find_end(program, owners, written, of_group)
        with program.graph.inserting_before(end):
            program.graph.call_function(torch.ops.aten._foreach_copy_.default, tuple(map(list, zip(*of_group))))
    program.output.args = (returned,)
    return {into for of_group in pairs.values() for into, _ in of_group}


def _find_last_writes(program: Program, owners: MemoryOwners) -> dict[Any, int]:
    """Memory -> the position of the last node that writes into it."""
    calls = [(node, owners.position.get(node, 0)) for node in program.graph.nodes if node.op == "call_function"]
    return {owners.owner.get(written): at for node, at in calls for written in find_writes(node)}


def _find_end(program: Program, owners: MemoryOwners, written: dict[Any, int], pairs: list[tuple[Node, Node]]) -> Node:
    """The first node behind the last read of these arguments, behind their new values, and behind `written`, the
    positions of the last writes into memory."""
    read = [owners.last_read[owners.owner[into]] for into, _ in pairs]
    made = [max(owners.position[node], written.get(owners.owner[node], 0)) for _, node in pairs]
    last = max(read + made)
    return next(node for node in program.graph.nodes if owners.position.get(node, 0) > last)
