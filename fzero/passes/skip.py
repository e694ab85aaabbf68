"""The passes `defer` and `skip`: the fused update of a step that may be skipped takes the condition itself.

`optim.apply_if_finite` chooses between new and old values behind the optimizer. Behind the fused update of all leaves
that is one more pass over all state, and memory for a second copy; the kernel itself can leave everything as it is.

    defer   before `fuse`:   p + (u where c else -0.0)        becomes   p + u where c else p
    skip    behind `fuse`:   update(p, ...) where c else p    becomes   update(p, ..., where=c)
"""

from __future__ import annotations

import operator
from typing import Any

import torch

from fzero.optim import list_ops  # noqa: F401  defines the operations below
from fzero.passes.order import drop_dead_rows, find_changes, restore_order
from fzero.program.arguments import item_of, items_of, operand_of, position_of
from fzero.program.operation import Node
from fzero.program.program import Program
from fzero.program.records import alias_of, find_writes, is_call, record, storage

_ADD = torch.ops.aten._foreach_add.List
_NOT = torch.ops.aten.logical_not.default, torch.ops.aten.bitwise_not.default
_FILL = torch.ops.fzero._foreach_masked_fill.Scalar  # (tensors, mask, value)
_CHOOSE = torch.ops.fzero._foreach_masked_fill.List  # (old tensors, condition, new tensors)


def defer(program: Program) -> Program:
    """Choose between new and old parameters instead of between steps and zeros, so that `fuse` finds the optimizer.

    Same results, bit for bit, because `p + -0.0` is `p`. `skip` takes back what `fuse` did not need.
    """
    if not program.graph.find_nodes(op="call_function", target=_FILL):
        return program
    program = program.copy()
    changed = find_changes(program.graph)
    for fill in program.graph.find_nodes(op="call_function", target=_FILL):
        steps, mask, value = fill.args
        sums, mask = _find_sums(fill), _find_condition(mask)
        if is_call(mask, *_NOT) and str(value) == "-0.0" and sums is not None:
            items = {item: steps[position_of(item)] for item in fill.users}
            for add in sums:
                if not _has_changes(changed, fill, add, mask):
                    _defer(program, add, items, operand_of(mask))
    restore_order(program.graph)
    return program


def _has_changes(changed: set[Any], *nodes: Node) -> bool:
    """Whether the step writes into memory of an operand of these nodes, so that they must keep their places."""
    return any(storage(source) in changed for node in nodes for source in node.all_input_nodes)


def _find_condition(node: Node) -> Node:
    """The condition that `node` is, or is a view of: a value of every rank is used through a view."""
    source = alias_of(node)
    is_view = source is not None and not find_writes(node) and source.meta["val"].shape == node.meta["val"].shape
    return _find_condition(source) if source is not None and is_view else node


def _find_sums(fill: Node) -> list[Node] | None:
    """The additions of the items of `fill` to parameters; None where an item has another use."""
    uses = [(item, user) for item in fill.users for user in item.users]
    for item, user in uses:
        if not is_call(user, _ADD) or user.kwargs or item in operand_of(user) or len(item.users) > 1:
            return None
    return list(dict.fromkeys(user for _, user in uses))


def _defer(program: Program, add: Node, steps: dict[Node, Node], condition: Node) -> None:
    """Let `add` add the steps, which are the values of its keys before the choice, and choose behind it."""
    (olds, added), totals = add.args, items_of(add)
    rows = [i for i, step in enumerate(added) if step in steps and i in totals]
    if not rows or any(olds[i].meta["val"].dtype != totals[i].meta["val"].dtype for i in rows):
        return
    with program.graph.inserting_before(max(totals.values()).next):
        chosen = program.emit(_CHOOSE, [olds[i] for i in rows], condition, [totals[i] for i in rows])
        news = {totals[i]: program.emit(operator.getitem, chosen, at) for at, i in enumerate(rows)}
    add.args = (olds, [steps.get(step, step) for step in added])
    for total, new in news.items():
        total.replace_all_uses_with(new, delete_user_cb=lambda user: user is not chosen)


def skip(program: Program) -> Program:
    """Let a fused update take the condition by which all of its results are chosen, or else its operands.

    Same results, bit for bit. Parameters that are chosen behind another update, which has no fused form, are chosen
    before the addition again, where a step is one list operation less and needs no second copy.
    """
    if not program.graph.find_nodes(op="call_function", target=_CHOOSE):
        return program
    program = program.copy()
    changed = find_changes(program.graph)
    for call in list(program.graph.nodes):
        if call.op == "call_function" and record(call).takes_where and not call.kwargs:
            _skip(program, call, changed)
    drop_dead_rows(program.graph)
    for choice in program.graph.find_nodes(op="call_function", target=_CHOOSE):
        _take_back(program, choice, changed)
    restore_order(program.graph)
    return program


def _skip(program: Program, call: Node, changed: set[Any]) -> None:
    """Give `call` the condition of the choices behind all of its results."""
    results = {
        item: call.args[record(call).replaces[position_of(column)]][position_of(item)]
        for column in call.users
        for item in column.users
    }
    choices = {user for item in results for user in item.users}
    if not all(is_call(choice, _CHOOSE) for choice in choices) or _has_changes(changed, call, *choices):
        return
    chosen = {new: row for choice in choices for new, row in _list_rows(choice).items()}
    conditions = {_find_condition(condition) for _, condition, _ in (choice.args for choice in choices)}
    is_whole = all(item in chosen and chosen[item][0] is operand for item, operand in results.items())
    if len(conditions) == 1 and is_whole and all(len(item.users) == 1 for item in results):
        call.kwargs = {"where": conditions.pop()}
        program.substitute_all({chosen[item][1]: item for item in results})


def _list_rows(choice: Node) -> dict[Node, tuple[Node, Node]]:
    """New tensor -> the old tensor and what is chosen of the two, where that has one node."""
    items: dict[int, list[Node]] = {}
    for item in choice.users:
        items.setdefault(position_of(item), []).append(item)
    old, _, new = choice.args
    return {new[i]: (old[i], chosen[0]) for i, chosen in items.items() if len(chosen) == 1}


def _take_back(program: Program, choice: Node, changed: set[Any]) -> None:
    """The inverse of `_defer`, where a choice is one behind an addition."""
    olds, condition, news = choice.args
    items = [item for item in map(item_of, news) if item is not None]
    adds = {item.source for item in items}
    add = adds.pop() if len(adds) == 1 else None
    if add is None or not is_call(add, _ADD) or add.kwargs or _has_changes(changed, add, choice):
        return
    (given, added), rows = add.args, [item.position for item in items]
    is_whole = len(rows) == len(news) and all(len(new.users) == 1 for new in news)
    if not is_whole or any(given[row] is not old for row, old in zip(rows, olds)):
        return
    with program.graph.inserting_before(add):
        mask = program.emit(_NOT[0], condition)
        fill = program.emit(_FILL, [added[row] for row in rows], mask, -0.0)
        steps = {row: program.emit(operator.getitem, fill, at) for at, row in enumerate(rows)}
    add.args = (given, [steps.get(row, step) for row, step in enumerate(added)])
    program.substitute_all({item: news[position_of(item)] for item in choice.users})
