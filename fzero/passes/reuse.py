"""The reuse pass: values lie in the memory of values that nothing reads any more."""

from __future__ import annotations

from typing import Any

import torch

from fzero.passes.order import find_changes
from fzero.passes.owners import MemoryOwners
from fzero.program import ops
from fzero.program.arguments import operand_of
from fzero.program.operation import Node
from fzero.program.program import Program
from fzero.program.records import averages_alone, is_call, record, storage

_aten = torch.ops.aten


def reuse(program: Program) -> Program:
    """Overwrite logits [T, V] with their log-softmax, and a log-softmax with the gradient of `nll_loss` by the logits,
    some rows at a time, where nothing reads the operand later. Overwrite likewise the gradients of leaves that are
    split over n ranks with 1 / n of them, where they are the slices of these leaves.

    Same results, bit for bit. A cross entropy has one tensor of the size of its logits alive instead of three.
    """
    softmaxes = program.graph.find_nodes(op="call_function", target=_aten._log_softmax.default)
    if not softmaxes and not any(_is_divided(program, node) for node in _find_scatters(program)):
        return program
    program = program.take()
    owners, changed = MemoryOwners(program), find_changes(program.graph)
    fixed = {owners.owner[node] for node in program.placeholders + program.graph.find_nodes(op="get_attr")}
    for softmax in program.graph.find_nodes(op="call_function", target=_aten._log_softmax.default):
        logits, dim, is_cast = softmax.args
        if is_cast or dim not in (1, -1) or not _is_matrix(logits):
            continue
        gradient = _find_gradient(softmax)
        if gradient is not None and owners.dies_at(softmax, gradient):
            backward = operand_of(gradient)
            if changed.isdisjoint(map(storage, backward.all_input_nodes)):
                cotangent, _, *of_loss = backward.args
                _overwrite(program, owners, gradient, ops.nll_gradient_, softmax, cotangent, *of_loss)
                program.graph.erase_node(backward)
        is_own = owners.owner[logits] not in fixed and storage(logits) not in changed
        if is_own and owners.dies_at(logits, softmax):
            _overwrite(program, owners, softmax, ops.log_softmax_, logits)
    for scatter in [x for x in _find_scatters(program) if _is_divided(program, x) and _has_own(owners, x, fixed)]:
        _divide(program, scatter)
    return program


def _find_scatters(program: Program) -> list[Node]:
    """The scatters of several leaves at once."""
    return program.graph.find_nodes(op="call_function", target=record(ops.scatter).together)


def _has_own(owners: MemoryOwners, scatter: Node, fixed: set[Any]) -> bool:
    """Whether each leaf of a scatter lies in memory that no other leaf, nothing `fixed` and no later node has."""
    fulls, *_ = scatter.args
    memory = [owners.owner[full] for full in fulls]
    is_own = len({*memory}) == len(memory) and fixed.isdisjoint(memory)
    return is_own and all(owners.is_left_to(scatter, full) for full in fulls)


def _divide(program: Program, scatter: Node) -> None:
    """Divide the leaves of a scatter where they lie, in front of it."""
    fulls, *others = scatter.args
    with program.graph.inserting_before(scatter):
        divided = [program.emit(_aten.div_.Scalar, x, program.layout_of(scatter).splits) for x in fulls]
    scatter.args = (divided, *others)
    scatter.kwargs = {**scatter.kwargs, "divided": True}


def _is_divided(program: Program, scatter: Node) -> bool:
    """Whether the slices of a scatter are the parts of its leaves, by which they are divided."""
    return averages_alone(program, scatter) and program.layout_of(scatter).splits > 1


def _is_matrix(node: Node) -> bool:
    """Whether a value is [T, V], and dense."""
    value = node.meta["val"]
    return value.ndim == 2 and value.stride() == (value.shape[1], 1)


def _find_gradient(softmax: Node) -> Node | None:
    """The gradient of `nll_loss` by the logits, where that is all that the gradient by a log-softmax is made of."""
    for gradient in softmax.users:
        if is_call(gradient, _aten._log_softmax_backward_data.default):
            backward, output, dim, dtype = gradient.args
            of_loss = backward.args if is_call(backward, _aten.nll_loss_backward.default) else (None, None)
            _, of_softmax, *_ = of_loss
            is_of_loss = output is softmax and of_softmax is softmax
            if is_of_loss and len(backward.users) == 1 and dim in (1, -1) and dtype == softmax.meta["val"].dtype:
                return gradient
    return None


def _overwrite(program: Program, owners: MemoryOwners, call: Node, target: Any, old: Node, *others: Any) -> None:
    """Let `target` write the result of a call over `old`."""
    with program.graph.inserting_before(call):
        program.emit(target, old, *others)
    owners.join(old, call)
    program.substitute(call, old)
