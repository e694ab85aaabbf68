"""The fuse pass: one call of torch's fused AdamW kernel for the updates of all leaves."""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch import fx

from fzero.optim.kernels import scale_by_adam
from fzero.passes.order import find_changes, restore_order
from fzero.program import ops
from fzero.program.operation import Node
from fzero.program.program import Program
from fzero.program.records import is_call, storage

_aten = torch.ops.aten


class _Row(NamedTuple):
    """One leaf that `scale_by_adam` scales: the operands of the fused kernel, and the results that the kernel
    replaces."""

    param: Node
    grad: Node
    mu: Node
    nu: Node
    rate: Any
    decay: float
    results: tuple[Node, Node, Node]  # new param, mu, nu


def fuse(program: Program) -> Program:
    """Turn `scale_by_adam`, `add_decayed_weights`, `scale_by_learning_rate` and `apply_updates` into `ops.adamw`.

    One call for all leaves of one dtype, rate and decay. Leaves whose updates have another use, or whose operands the
    step overwrites, keep their operations.
    Same results up to the rounding of a few operations: the kernel decays the parameter before it adds the step.
    """
    program = program.copy()
    changed = find_changes(program.graph)
    for adam in program.graph.find_nodes(op="call_function", target=scale_by_adam.default):
        groups: dict[tuple[Any, ...], list[_Row]] = {}
        lists = _Lists()
        for row in filter(None, (_match_row(lists, adam, i) for i in range(len(adam.args[0])))):
            dtypes = {x.meta["val"].dtype for x in (row.param, row.mu, row.nu)}
            if len(dtypes) == 1 and not any(storage(x) in changed for x in row[:4]):
                groups.setdefault((row.rate, row.decay, *dtypes), []).append(row)
        for (rate, decay, _), rows in groups.items():
            _emit_update(program, adam, rate, decay, rows)
    restore_order(program.graph)  # a call stands behind the last result that it replaces, so maybe behind its users
    return program


def _match_row(lists: _Lists, adam: Node, index: int) -> _Row | None:
    """The chain of operations behind leaf `index` of a `scale_by_adam`, where each link has one user: add the decayed
    weight (optional), multiply by minus the rate, add to the parameter. None for any other chain."""
    step, mu, nu = (lists.item(lists.item(adam, column), index) for column in range(3))
    grad, old_mu, old_nu = (adam.args[column][index] for column in range(3))
    decay, link = 0.0, _find_only_user(step)
    if link and link.target is _aten._foreach_add.List and lists.position(link, 0, step) is not None:
        decay = link.kwargs.get("alpha", 1)
        position = lists.position(link, 0, step)
        weight = link.args[1][position]
        step, link = lists.item(link, position), _find_only_user(lists.item(link, position))
    else:
        weight = None
    if (
        link is None
        or link.target not in (_aten._foreach_mul.Scalar, _aten._foreach_mul.Tensor)
        or mu is None
        or nu is None
    ):
        return None
    rate, step = link.args[1], lists.item(link, lists.position(link, 0, step))
    total = _find_only_user(step)
    position = lists.position(total, 1, step) if total and total.target is _aten._foreach_add.List else None
    if total is None or position is None:
        return None
    param, result = total.args[0][position], lists.item(total, position)
    if result is None or weight not in (None, param) or total.kwargs.get("alpha", 1) != 1:
        return None
    return _Row(param, grad, old_mu, old_nu, rate, decay, (result, mu, nu))


def _emit_update(program: Program, adam: Node, rate: Any, decay: float, rows: list[_Row]) -> None:
    """Emit one `ops.adamw` for these rows, and replace their results. `rate` is minus the learning rate."""
    with program.graph.inserting_before(max(row.results[0] for row in rows).next):
        learning_rate = program.emit(_aten.neg.default, rate) if isinstance(rate, fx.Node) else -rate
        lists = [[row[column] for row in rows] for column in range(4)]
        call = program.emit(ops.adamw, *lists, adam.args[3], learning_rate, *adam.args[4:], decay)
        columns = [program.emit(operator.getitem, call, column) for column in range(3)]
        items = [[program.emit(operator.getitem, column, index) for column in columns] for index in range(len(rows))]
    results = (result for row in rows for result in row.results)
    program.substitute_all(dict(zip(results, (item for new in items for item in new))))


class _Lists:
    """Lookups of the items of list operations, cached: the lists of an update have an item for each leaf, so that
    searching a list for each of its items would take quadratic time."""

    def __init__(self) -> None:
        self._items: dict[Node, dict[Any, list[Node]]] = {}
        self._positions: dict[tuple[Node, int], dict[Any, int]] = {}

    def item(self, node: Node | None, index: int | None) -> Node | None:
        """The node that takes item `index` of the list `node`; None where there are several such nodes, or none."""
        if node not in self._items:
            taken: dict[Any, list[Node]] = {}
            self._items[node] = taken
            for user in node.users if node is not None else ():
                if is_call(user, operator.getitem):
                    taken.setdefault(user.args[1], []).append(user)
        users = self._items[node].get(index, [])
        return users[0] if len(users) == 1 else None

    def position(self, node: Node, argument: int, item: Node | None) -> int | None:
        """The first position of `item` in the list that is argument `argument` of `node`, None where it has none."""
        if (node, argument) not in self._positions:
            given = node.args[argument]
            self._positions[node, argument] = {x: i for i, x in reversed(list(enumerate(given)))}
        return self._positions[node, argument].get(item)


def _find_only_user(node: Node | None) -> Node | None:
    """The user of a node that has exactly one, else None."""
    return next(iter(node.users)) if node is not None and len(node.users) == 1 else None
