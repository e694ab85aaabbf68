"""The fuse pass: the Adam update of all leaves in one call of torch's fused kernel."""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch import fx

from fzero.optim.kernels import scale_by_adam
from fzero.passes.order import restore_order
from fzero.program import ops
from fzero.program.operation import Node
from fzero.program.program import Program
from fzero.program.records import is_call

_aten = torch.ops.aten


class _Row(NamedTuple):
    """One leaf that `scale_by_adam` scales: what the fused kernel takes, and the results that it gives instead."""

    param: Node
    grad: Node
    mu: Node
    nu: Node
    rate: Any
    decay: float
    results: tuple[Node, Node, Node]  # new param, mu, nu


def fuse(program: Program) -> Program:
    """`scale_by_adam`, `add_decayed_weights`, `scale_by_learning_rate` and `apply_updates` become `ops.adamw`.

    One call for all leaves of one dtype, rate and decay. Same results up to the rounding of a few operations: the
    kernel decays the parameter first and adds the step to that. Leaves whose updates go anywhere else are left alone.
    """
    program = program.copy()
    for adam in program.graph.find_nodes(op="call_function", target=scale_by_adam.default):
        groups: dict[tuple[Any, ...], list[_Row]] = {}
        lists = _Lists()
        for row in filter(None, (_row(lists, adam, i) for i in range(len(adam.args[0])))):
            dtypes = {x.meta["val"].dtype for x in (row.param, row.mu, row.nu)}
            if len(dtypes) == 1:
                groups.setdefault((row.rate, row.decay, *dtypes), []).append(row)
        for (rate, decay, _), rows in groups.items():
            _call(program, adam, rate, decay, rows)
    restore_order(program.graph)
    return program


def _row(lists: _Lists, adam: Node, index: int) -> _Row | None:
    """The chain behind leaf `index` of a `scale_by_adam`, if every link of it is used once."""
    step, mu, nu = (lists.item(lists.item(adam, column), index) for column in range(3))
    grad, old_mu, old_nu = (adam.args[column][index] for column in range(3))
    decay, link = 0.0, _next(step)
    if link and link.target is _aten._foreach_add.List and lists.position(link, 0, step) is not None:
        decay = link.kwargs.get("alpha", 1)
        position = lists.position(link, 0, step)
        weight = link.args[1][position]
        step, link = lists.item(link, position), _next(lists.item(link, position))
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
    total = _next(step)
    position = lists.position(total, 1, step) if total and total.target is _aten._foreach_add.List else None
    if total is None or position is None:
        return None
    param, result = total.args[0][position], lists.item(total, position)
    if result is None or weight not in (None, param) or total.kwargs.get("alpha", 1) != 1:
        return None
    return _Row(param, grad, old_mu, old_nu, rate, decay, (result, mu, nu))


def _call(program: Program, adam: Node, rate: Any, decay: float, rows: list[_Row]) -> None:
    """One `ops.adamw` for these rows. Their chain multiplies by `rate`, which is minus the learning rate."""
    with program.graph.inserting_before(max(row.results[0] for row in rows).next):
        learning_rate = program.emit(_aten.neg.default, rate) if isinstance(rate, fx.Node) else -rate
        lists = [[row[column] for row in rows] for column in range(4)]
        call = program.emit(ops.adamw, *lists, adam.args[3], learning_rate, *adam.args[4:], decay)
        columns = [program.emit(operator.getitem, call, column) for column in range(3)]
        items = [[program.emit(operator.getitem, column, index) for column in columns] for index in range(len(rows))]
    results = (result for row in rows for result in row.results)
    program.substitute_all(dict(zip(results, (item for new in items for item in new))))


class _Lists:
    """Where the items of lists go and come from, looked up: the lists of an update are as long as there are leaves."""

    def __init__(self) -> None:
        self._items: dict[Node, dict[Any, list[Node]]] = {}
        self._positions: dict[tuple[Node, int], dict[Any, int]] = {}

    def item(self, node: Node | None, index: int | None) -> Node | None:
        """The one node that takes item `index` of a list's node."""
        if node not in self._items:
            taken: dict[Any, list[Node]] = {}
            self._items[node] = taken
            for user in node.users if node is not None else ():
                if is_call(user, operator.getitem):
                    taken.setdefault(user.args[1], []).append(user)
        users = self._items[node].get(index, [])
        return users[0] if len(users) == 1 else None

    def position(self, node: Node, argument: int, item: Node | None) -> int | None:
        """Where an item stands first in a list that a node is given; None where it does not."""
        if (node, argument) not in self._positions:
            given = node.args[argument]
            self._positions[node, argument] = {x: i for i, x in reversed(list(enumerate(given)))}
        return self._positions[node, argument].get(item)


def _next(node: Node | None) -> Node | None:
    return next(iter(node.users)) if node is not None and len(node.users) == 1 else None
