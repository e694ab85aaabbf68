"""The accumulate pass: add up full gradients of microbatches, and scatter each leaf's sum once."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import fx

from fzero.passes.order import erase_dead, find_changes
from fzero.program import ops
from fzero.program.arguments import LeafMove, Reduction, item_of, items_of, operand_of, position_of
from fzero.program.inference import infer
from fzero.program.kinds import Slice
from fzero.program.operation import Node
from fzero.program.ops.loops import Loop
from fzero.program.ops.reductions import mean_over
from fzero.program.program import Program
from fzero.program.records import find_loops, is_call, mean_of, storage
from fzero.program.signature import Argument, Result

_aten = torch.ops.aten
_SUMS = (_aten.add.Tensor, _aten.sub.Tensor)
_SCALINGS = (_aten.mul.Tensor, _aten.mul.Scalar, _aten.div.Tensor, _aten.div.Scalar, _aten.neg.default)


def accumulate(program: Program, *, stage: int = 1) -> Program:
    """Turn sums of scattered gradients of one leaf into the scatter of the sum: k microbatches cost the communication
    of one.

    * A carry of a loop to which each turn adds a scattered gradient becomes a carry of full gradients, and is scattered
      behind the loop. This holds for loops with `sync="once"`, and at stages 0 and 1 for loops without `sync`.
    * On a mesh with replicas other loops scatter in each turn, and take the mean over replicas behind the loop, of the
      sums of slices.
    * At stage 1 a sum or multiple of scattered gradients becomes the scatter of the sum or multiple.

    Same results up to rounding, because sums over microbatches and means over ranks change places. Full gradients
    stay alive from the first microbatch to the last.
    """
    has_replicas = program.mesh.size() > program.mesh.size(program.mesh.shard_axis)
    found = find_loops(program.graph)
    loops = [node.name for node in found if has_replicas or _is_once(node, stage)]
    if stage > 1 and not loops:
        return program
    program = program.copy()
    for node in list(program.graph.nodes):
        if node.name in loops and _is_once(node, stage):
            _mean_behind(program, node)
        elif node.name in loops:
            _average_replicas_behind(program, node)
    if stage == 1:
        _scatter_sums(program)
    erase_dead(program.graph)
    return program


def _is_once(loop: Node, stage: int) -> bool:
    sync = Loop(*loop.args).sync
    return sync == "once" or (sync != "each" and stage <= 1)


def _scatter_sums(program: Program) -> None:
    for node in list(program.graph.nodes):
        if not is_call(node, *_SUMS, *_SCALINGS):
            continue
        scatters = [source for source in node.all_input_nodes if is_call(source, ops.scatter)]
        if scatters and _is_linear(node, scatters):
            _swap(program, node, scatters[0])


def _is_linear(node: Node, scatters: list[Node]) -> bool:
    """Whether a node is a sum or a multiple of scattered gradients of one leaf, and the only user of these."""
    if len(scatters) != len(node.all_input_nodes):
        return False
    if any(len(scatter.users) > 1 for scatter in scatters):
        return False
    if node.meta["val"].dtype != scatters[0].meta["val"].dtype:
        return False
    of_one_leaf = len({LeafMove(*scatter.args).key for scatter in scatters}) == 1
    given = sum(map(_is_scatter, node.args))
    return of_one_leaf and ((is_call(node, *_SCALINGS) and given == 1) or (is_call(node, *_SUMS) and given == 2))


def _swap(program: Program, node: Node, scatter: Node) -> None:
    """Replace `op(scatter(x), ...)` by `scatter(op(x, ...))`."""
    with program.graph.inserting_before(node):
        args = [LeafMove(*arg.args).value if _is_scatter(arg) else arg for arg in node.args]
        full = program.emit(node.target, *args, **node.kwargs)
        program.substitute(node, program.emit(ops.scatter, *LeafMove(*scatter.args)._replace(value=full)))


def _is_scatter(arg: Any) -> bool:
    return hasattr(arg, "op") and is_call(arg, ops.scatter)


# loops


class _Sum(NamedTuple):
    """A carry to which a turn adds the mean over ranks of a gradient, and the nodes that take the mean in order."""

    carry: int
    gradient: Node
    means: list[Node]
    dtype: torch.dtype


def _mean_behind(program: Program, loop: Node) -> None:
    """Let a loop add up the gradients of this rank, and take the means of the sums behind the loop."""
    given = Loop(*loop.args)
    body = given.body.copy()
    sums = _list_sums(body)
    if not sums:
        return
    kinds, carry = infer(body), list(given.carry)
    arguments, results = list(body.arguments), list(body.results)
    returned, means, taken = list(body.returned), dict[int, list[Node]](), defaultdict[Node, set[int]](set)
    for each in sums:
        i, kind, new = each.carry, kinds[each.gradient], _add_gradient(body, each)
        if (item := item_of(returned[i])) is not None:
            taken[item.source].add(item.position)
        returned[i], means[i] = new, each.means
        arguments[i], results[i] = Argument(f"carry.{i}", kind=kind), Result(f"carry.{i}", kind=kind)
        like = new.meta["val"]
        with program.graph.inserting_before(loop):
            carry[i] = program.emit(_aten.zeros.default, list(like.shape), dtype=like.dtype, device=like.device)
    body.output.args = (returned,)
    for call, positions in taken.items():
        _drop_rows(body, call, positions)
    erase_dead(body.graph)
    body = replace(body, arguments=tuple(arguments), results=tuple(results))
    loop.args = tuple(given._replace(body=body, carry=carry))
    program.refresh_with([loop])
    items = items_of(loop)
    for i, chain in means.items():
        if i in items:
            _take_means(program, items[i], given.carry[i], chain)


def _average_replicas_behind(program: Program, loop: Node) -> None:
    """Let a loop add up means over the shard axis, and take the means of the sums over other axes behind the loop."""
    mesh, given = program.mesh, Loop(*loop.args)
    body = given.body.copy()
    sums = _list_sums(body)
    arguments, results, behind = list(body.arguments), list(body.results), dict[int, tuple[str, Sequence[str]]]()
    for each in sums:
        i, kind = each.carry, body.arguments[each.carry].kind
        if isinstance(kind, Slice) and len(each.means) == 1:  # its scatter
            layout = body.layouts[kind.bucket]
            if not layout.replica_axes:
                continue
            behind[i] = layout.leaves[kind.leaf].path, layout.replica_axes
            each.means[0].kwargs = {"replicas": False}
            kind = replace(kind, over=frozenset(layout.replica_axes))
        elif isinstance(kind, frozenset):  # of a leaf that every rank holds
            behind[i] = each.means[0].kwargs["leaf"], mesh.replica_axes
            for mean in each.means:
                mean.args = tuple(Reduction(*mean.args)._replace(axis=mesh.shard_axis))
            kind |= frozenset(mesh.replica_axes)
        arguments[i], results[i] = replace(arguments[i], kind=kind), replace(results[i], kind=kind)
    if behind:
        body = replace(body, arguments=tuple(arguments), results=tuple(results))
        loop.args = tuple(given._replace(body=body))
        for item in list(loop.users):
            if position_of(item) in behind:
                _average(program, item, *behind[position_of(item)])


def _average(program: Program, total: Node, leaf: str, axes: Sequence[str]) -> None:
    """Replace a sum of gradients of a leaf by its mean over some axes."""
    users = list(total.users)
    with program.graph.inserting_before(total.next):
        mean = mean_over(program, total, axes, leaf)
    for user in users:
        user.replace_input_with(total, mean)


def _list_sums(body: Program) -> list[_Sum]:
    """The carries of a loop's body to which each turn adds the mean of a gradient that nothing overwrites."""
    changed = find_changes(body.graph)
    sums = (each for call in body.graph.nodes for each in _find_sums(body, call))
    return [each for each in sums if storage(each.gradient) not in changed]


def _find_sums(body: Program, call: Node) -> list[_Sum]:
    """The carries to which a sum, or a list operation of sums, adds means."""
    if call.kwargs.get("alpha", 1) != 1:
        return []
    if is_call(call, _aten.add.Tensor):
        rows = [(call, *call.args)]
    elif is_call(call, _aten._foreach_add.List):
        items = items_of(call)
        rows = [(items.get(i), *pair) for i, pair in enumerate(zip(*call.args))]
    else:
        return []
    found = [_find_sum(body, *row) or _find_sum(body, row[0], *row[:0:-1]) for row in rows]
    return [each for each in found if each is not None]


def _drop_rows(body: Program, call: Node, positions: Collection[int]) -> None:
    """Replace a list operation by one of its other rows alone."""
    rest = [i for i in range(len(operand_of(call))) if i not in positions]
    if not rest:
        return
    with body.graph.inserting_before(call):
        new = body.emit(call.target, *([column[i] for i in rest] for column in call.args), **call.kwargs)
        at = {i: body.emit(operator.getitem, new, place) for place, i in enumerate(rest)}
    for i, item in items_of(call).items():
        if i in at:
            body.substitute(item, at[i])


def _find_sum(body: Program, new: Node | None, old: Any, added: Any) -> _Sum | None:
    """`new = old + added`, where `old` is a carry, `new` its next value, and `added` the mean of a gradient."""
    returned = body.returned
    if new is None or not isinstance(added, fx.Node) or old not in body.placeholders:
        return None
    at = body.placeholders.index(old)
    if at >= len(returned) or returned[at] is not new or len(old.users) > 1 or len(new.users) > 1:
        return None
    means = list[Node]()
    while len(added.users) == 1 and (is_call(added, _aten._to_copy.default) or mean_of(body, added) is not None):
        if mean_of(body, added) is not None:
            means.insert(0, added)
        elif means:
            return None  # a cast between means
        added = operand_of(added)
    return _Sum(at, added, means, new.meta["val"].dtype) if means else None


def _add_gradient(body: Program, each: _Sum) -> Node:
    """The sum of a full gradient, right behind the gradient, which then dies. Its carry becomes full."""
    full, carry = each.gradient, body.placeholders[each.carry]
    value = full.meta["val"]
    with body.fake_mode:
        carry.meta["val"] = torch.empty(value.shape, dtype=each.dtype, device=value.device)
    with body.graph.inserting_after(full):
        added = body.emit(_aten._to_copy.default, full, dtype=each.dtype) if value.dtype != each.dtype else full
    with body.graph.inserting_after(added):
        return body.emit(_aten.add.Tensor, carry, added)


def _take_means(program: Program, total: Node, before: Node, means: list[Node]) -> None:
    """Replace a sum of full gradients by the mean of it, added to what the loop was given."""
    users = list(total.users)
    with program.graph.inserting_before(total.next):
        mean = total
        for node in means:
            _, *how = node.args
            mean = program.emit(node.target, mean, *how, **node.kwargs)
        new = program.emit(_aten.add.Tensor, before, mean)
    for user in users:
        user.replace_input_with(total, new)
