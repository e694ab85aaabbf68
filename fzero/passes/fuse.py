"""The fuse pass: a call of one of torch's fused kernels where a step updates parameters."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Set
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from fzero.optim.fused import KERNELS, Kernel
from fzero.passes.order import drop_dead_rows, find_changes, restore_order
from fzero.program import ops
from fzero.program.arguments import Item, operand_of, position_of
from fzero.program.operation import Node
from fzero.program.ops.updates import UPDATES
from fzero.program.program import Program
from fzero.program.records import is_call, name_of, record, storage

_aten = torch.ops.aten
_ADD = _aten._foreach_add.List
_MULTIPLY = (_aten._foreach_mul.Scalar, _aten._foreach_mul.Tensor)
_DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
"""The dtypes of torch's fused kernels."""
_NARROW = frozenset({torch.float16, torch.bfloat16})


class _Row(NamedTuple):
    """The update of one leaf by a fused kernel."""

    kernel: Kernel
    operands: tuple[Node, ...]  # param, gradient, states
    numbers: tuple[Any, ...]  # that stand before the rate
    rate: Any  # minus the learning rate
    options: tuple[Any, ...]  # that stand behind the rate
    results: tuple[Node, ...]  # new param, new states: what the call replaces
    path: Set[Node]  # the list operations from a new state to the new param

    @property
    def shared(self) -> tuple[Any, ...]:
        """What all rows of one call have in common."""
        return self.kernel, self.numbers, self.rate, self.options, self.operands[0].meta["val"].dtype


def fuse(program: Program) -> Program:
    """Turn updates of parameters into calls of torch's fused kernels.

    An update of an argument p is `p - rate * (direction + decay * p)`, by the list operations of `add_decayed_weights`,
    `scale_by_learning_rate` and `apply_updates`. The direction decides on the call:

    * that of `scale_by_adam`: `ops.adamw`
    * that of `scale_by_rss`, on a CPU and with no decay behind it: `ops.adagrad`, with a decay in front of it
    * that of `trace`, with no decay behind it: `ops.momentum`, with a decay in front of it
    * that of another stage that is an operation of fzero, alone or behind `trace`: none, for torch has no kernel
    * any other, such as a clipped gradient: `ops.sgd`

    The first three compute the new states as well. One call for all leaves of one dtype, rate and decay. Leaves whose
    updates have another use, or whose operands the step overwrites, keep their operations. Same results up to the
    rounding of a few operations, which depends on where slices are cut: a kernel rounds the last elements of a slice
    differently where they fill no vector register.
    """
    if not program.graph.find_nodes(op="call_function", target=_ADD):
        return program
    program = program.take()
    changed = find_changes(program.graph)
    on_host = {node for node, given in zip(program.placeholders, program.arguments) if given.place is not None}
    for total in program.graph.find_nodes(op="call_function", target=_ADD):
        groups: dict[tuple[Any, ...], list[_Row]] = {}
        for row in _choose_rows(total, changed, on_host):
            groups.setdefault(row.shared, []).append(row)
        for rows in groups.values():
            _emit_update(program, rows)
    drop_dead_rows(program.graph)  # of the list operations that calls replace for some of their leaves
    restore_order(program.graph)  # a call stands behind the last result that it replaces, so maybe behind its users
    return program


def _choose_rows(total: Node, changed: Set[Any], on_host: Set[Node]) -> Iterator[_Row]:
    """For each leaf that the list addition `total` updates, the row that computes most of the update."""
    lists, ancestors = _Lists(), set[Node]()
    replaced, read = set[Node](), set[Node]()

    def is_sound(row: _Row) -> bool:
        """Whether nothing that the call reads, in this row or in another, depends on what the call replaces."""
        is_last = all(ancestors & set(state.users) <= row.path for state in row.results[1:])
        is_apart = replaced.isdisjoint(row.operands) and (replaced | read).isdisjoint(row.results)
        return is_last and is_apart and not any(storage(x) in changed for x in row.operands)

    for index in range(len(operand_of(total))):
        tail = _find_tail(lists, total, index)
        if tail is None:
            continue
        ancestors = ancestors or _find_ancestors(total)
        rows = (match(lists, tail) for match in _MATCHES)
        row = next((row for row in rows if row is not None and _fits(row, on_host) and is_sound(row)), None)
        if row is not None:
            replaced.update(row.results)
            read.update(row.operands)
            yield row


class _Tail(NamedTuple):
    """The end of an update: `new == param + rate * (direction + decay * param)`."""

    new: Node
    param: Node
    rate: Any
    decay: float
    direction: Node
    user: Node  # the only list operation of the update that takes the direction
    product: Node  # the multiplication by the rate


def _find_tail(lists: _Lists, total: Node, index: int) -> _Tail | None:
    """The end of the update of leaf `index`; None where it is another, or where one of its parts has another use."""
    param, step = (column[index] for column in total.args)
    new, product = lists.item(total, index), _find_list(step, *_MULTIPLY)
    is_simple = set(step.users) == {total} and total.kwargs.get("alpha", 1) == 1
    if new is None or product is None or not (is_simple and _is_parameter(param)):
        return None
    scaled, rate = product.args
    direction, decay, user = _split_decay(scaled[position_of(step)], {product}, param)
    return _Tail(new, param, rate, decay, direction, user or product, product)


def _is_parameter(node: Node) -> bool:
    """Whether a value is an argument of the step, or what an earlier update made of one."""
    column = _find_list(node, operator.getitem)
    is_updated = column is not None and record(operand_of(column)).gradients is not None
    return bool(node.op == "placeholder" or _find_list(node, _ADD) is not None or is_updated)


def _split_decay(node: Node, users: Set[Node], param: Node) -> tuple[Node, float, Node | None]:
    """`(g, decay, addition)` where `node` is `g + decay * param`, by an addition that only `users` use; else
    `(node, 0.0, None)`."""
    addition = _find_list(node, _ADD)
    if addition is None or set(node.users) != users:
        return node, 0.0, None
    given, decayed = (column[position_of(node)] for column in addition.args)
    return (given, addition.kwargs.get("alpha", 1), addition) if decayed is param else (node, 0.0, None)


def _match_stage(kernel: Kernel, lists: _Lists, tail: _Tail) -> _Row | None:
    """The direction is the result of the kernel's stage."""
    stage, at = _find_stage(tail, kernel.stage.default)
    states = [lists.state(stage, 1 + i, at) for i in range(kernel.states)]
    is_elsewhere = kernel.is_for_cpu and tail.param.meta["val"].device.type != "cpu"
    if stage is None or None in states or is_elsewhere or (kernel.decays_gradient and tail.decay):
        return None
    grads, *others = stage.args
    olds, others = others[: kernel.states], others[kernel.states :]
    grad, decay = grads[at], tail.decay
    if kernel.decays_gradient:
        grad, decay, _ = _split_decay(grad, {stage}, tail.param)
    operands = (tail.param, grad, *(old[at] for old in olds))
    numbers, options = tuple(others[: kernel.counts]), (*others[kernel.counts :], decay)
    return _Row(kernel, operands, numbers, tail.rate, options, (tail.new, *states), frozenset())


def _match_momentum(lists: _Lists, tail: _Tail) -> _Row | None:
    """The new trace is `grad + decay * trace`. The direction is the new trace, or `grad + decay * new trace`."""
    new, addition = tail.direction, _find_list(tail.direction, _ADD)
    if addition is None or tail.decay:
        return None
    grad, trace = (column[position_of(new)] for column in addition.args)
    momentum, path, inner = addition.kwargs.get("alpha", 1), {addition, tail.product}, _find_list(trace, _ADD)
    is_nesterov = False
    if inner is not None and inner.kwargs.get("alpha", 1) == momentum and set(new.users) == {tail.user}:
        given, before = (column[position_of(trace)] for column in inner.args)
        is_nesterov = given is grad
        new, trace = (trace, before) if is_nesterov else (new, trace)
        path.update([inner] if is_nesterov else [])
    is_state = not set(new.users) <= path
    if not momentum or not is_state or _is_of_stage(grad):
        return None
    grad, decay, _ = _split_decay(grad, path - {tail.product}, tail.param)
    options = (momentum, is_nesterov, decay)
    return _Row(
        KERNELS["momentum"], (tail.param, grad, trace), (), tail.rate, options, (tail.new, new), frozenset(path)
    )


def _match_any(lists: _Lists, tail: _Tail) -> _Row | None:
    if _is_of_stage(tail.direction):
        return None
    return _Row(KERNELS["sgd"], (tail.param, tail.direction), (), tail.rate, (tail.decay,), (tail.new,), frozenset())


_MATCHES: tuple[Callable[[_Lists, _Tail], _Row | None], ...] = (
    *(partial(_match_stage, kernel) for kernel in KERNELS.values() if kernel.stage is not None),
    _match_momentum,
    _match_any,
)


def _fits(row: _Row, on_host: Set[Node]) -> bool:
    """Whether the kernel takes these operands: of one shape, and of one dtype unless it casts, as states behind
    `optim.cast_state`. And whether its results, which are like the operands that they replace, are like those of the
    operations."""
    param, grad, *states = (node.meta["val"] for node in row.operands)
    if any(_describe(x) != _describe(node.meta["val"]) for x, node in zip((param, *states), row.results)):
        return False
    kept = [row.results[0].meta["val"], *([] if row.kernel.casts else [grad, *states])]
    is_alike = all(x.dtype == param.dtype for x in kept) and all(x.shape == param.shape for x in (grad, *states))
    is_alike &= all(x.dtype in _DTYPES and torch.promote_types(x.dtype, param.dtype) == param.dtype for x in states)
    is_of_cpu = param.device.type == "cpu" or not on_host.isdisjoint(row.operands)
    is_wrong = row.kernel.is_wrong_if_narrow and param.dtype in _NARROW and is_of_cpu
    return is_alike and param.dtype in _DTYPES and not is_wrong


def _describe(value: Tensor) -> tuple[Any, ...]:
    return value.shape, value.stride(), value.dtype, value.device


def _emit_update(program: Program, rows: list[_Row]) -> None:
    """Emit one call for these rows, and replace their results."""
    kernel, numbers, rate, options, _ = rows[0].shared
    with program.graph.inserting_before(max(row.results[0] for row in rows).next):
        learning_rate = program.emit(_aten.neg.default, rate) if isinstance(rate, fx.Node) else -rate
        lists = [list(column) for column in zip(*(row.operands for row in rows))]
        values = [[result.meta["val"] for result in column] for column in zip(*(row.results for row in rows))]
        call = program.emit_as(tuple(values), UPDATES[kernel.name][0], *lists, *numbers, learning_rate, *options)
        columns = [program.emit_as(value, operator.getitem, call, at) for at, value in enumerate(values)]
        news = {
            row.results[at]: program.emit_as(values[at][index], operator.getitem, column, index)
            for index, row in enumerate(rows)
            for at, column in enumerate(columns)
        }
    program.substitute_all(news)


class _Lists:
    """Lookups of the items of list operations, cached: the lists of an update have an item for each leaf, so that
    searching a list for each of its items would take quadratic time."""

    def __init__(self) -> None:
        self._items: dict[Node, dict[Any, list[Node]]] = {}

    def item(self, node: Node | None, index: int | None) -> Node | None:
        """The node that takes item `index` of the list `node`; None where there are several such nodes, or none."""
        if node not in self._items:
            taken: dict[Any, list[Node]] = {}
            self._items[node] = taken
            for user in node.users if node is not None else ():
                if is_call(user, operator.getitem):
                    taken.setdefault(position_of(user), []).append(user)
        users = self._items[node].get(index, [])
        return users[0] if len(users) == 1 else None

    def state(self, stage: Node | None, column: int, index: int) -> Node | None:
        """The new state of a leaf, from the lists that a stage returns."""
        return self.item(self.item(stage, column), index)


def _find_list(item: Node, *targets: Any) -> Node | None:
    """The call of one of these list operations that `item` is an item of."""
    call = operand_of(item) if is_call(item, operator.getitem) else None
    return call if call is not None and is_call(call, *targets) else None


def _find_stage(tail: _Tail, target: Any) -> tuple[Node | None, int]:
    """The call of a stage that the direction comes from, if nothing else uses the direction, and the leaf's index."""
    updates = _find_list(tail.direction, operator.getitem)
    if updates is None or position_of(updates) != 0 or set(tail.direction.users) != {tail.user}:
        return None, 0
    return _find_list(updates, target), position_of(tail.direction)


def _is_of_stage(item: Node) -> bool:
    """Whether a value is the result of a stage that is no `_foreach_` operation, maybe behind such operations, or a
    view of such a result."""
    while is_call(item, operator.getitem, _aten.view.default):
        if is_call(item, _aten.view.default):
            item = operand_of(item)
            continue
        call, index = Item(*item.args)
        if is_call(call, operator.getitem):
            call = operand_of(call)
        if not name_of(call).startswith("_foreach_"):
            is_of_torch = getattr(call.target, "namespace", "") == "aten"
            return not is_of_torch and not is_call(call, ops.all_reduce_list)  # which gives gradients of whole leaves
        item = operand_of(call)[index]
    return False


def _find_ancestors(node: Node) -> set[Node]:
    """All nodes that a node depends on."""
    found, waiting = set[Node](), [node]
    while waiting:
        new = [source for source in waiting.pop().all_input_nodes if source not in found]
        found.update(new)
        waiting.extend(new)
    return found
