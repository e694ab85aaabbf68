"""The reuse pass: the log-softmax of a loss, and its gradient, lie in the memory of the logits."""

from __future__ import annotations

from typing import Any

import torch

from fzero.passes.order import find_changes
from fzero.passes.owners import MemoryOwners
from fzero.program import ops
from fzero.program.arguments import operand_of
from fzero.program.operation import Node
from fzero.program.program import Program
from fzero.program.records import is_call, storage

_aten = torch.ops.aten


def reuse(program: Program) -> Program:
    """Overwrite logits [T, V] with their log-softmax, and a log-softmax with the gradient of `nll_loss` by the logits,
    some rows at a time, where nothing reads the operand later.

    Same results, bit for bit. A cross entropy has one tensor of the size of its logits alive instead of three.
    """
    softmaxes = program.graph.find_nodes(op="call_function", target=_aten._log_softmax.default)
    if not softmaxes:
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
    return program


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
