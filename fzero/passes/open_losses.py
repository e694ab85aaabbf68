"""Cross entropies of large logits, in operations that a loop over classes can take by rows.

torch's `cross_entropy` is a softmax of all logits and a choice of one each, with kernels that want the logits whole. A
leaf that is used by rows makes a few columns of the logits at a time. From these follow the sums of a loss:

    loss of a token        logsumexp(logits) - (the sum over classes of the logit at the label, 0 elsewhere)
    gradient by its logits (exp(logits - logsumexp(logits)) - 1 at the label) * the gradient by the loss of the token
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from fzero.base.dtypes import accumulator
from fzero.passes.rows import follow_rows, is_carrier
from fzero.program.operation import Node
from fzero.program.program import Program
from fzero.program.records import name_of

_aten = torch.ops.aten
MEAN = 1
"""torch's number for the reduction "mean"; 2 is "sum"."""


class _Loss(NamedTuple):
    """The nodes of a cross entropy: the logits [T, V], their log-softmax, the loss, and the gradient by the logits."""

    logits: Node
    softmax: Node
    forward: Node
    backward: Node | None
    gradient: Node | None


def open_loss(program: Program, product: Node, dim: int, rows: int) -> Node | None:
    """Replace the cross entropy whose logits a product gives, with the classes along `dim`, in the program's own graph.

    Returns the node that says which logits are at no label; None where the product has any other use.
    """
    loss = _find_loss(product, dim, rows)
    if loss is None:
        return None
    with program.graph.inserting_before(loss.forward):
        logits, lse, misses, counts, total = _emit_loss(program, loss)
    if loss.gradient is not None and loss.backward is not None:
        with program.graph.inserting_before(loss.gradient):
            _emit_gradient(program, loss, logits, lse, misses, counts, total)
        program.graph.erase_node(loss.backward)
    for node in (loss.forward, loss.softmax):
        program.graph.erase_node(node)
    return misses


def _find_loss(product: Node, dim: int, rows: int) -> _Loss | None:
    """The cross entropy of a product's logits, with one label for each token and no weights of classes."""
    logits = product
    while len(logits.users) == 1:
        (user,) = logits.users
        if user.op == "call_function" and name_of(user) == "_log_softmax":
            break
        found = follow_rows(user, logits, dim, rows) if user.op == "call_function" and is_carrier(user) else None
        if found is None:
            return None
        logits, dim = user, found[0]
    else:
        return None
    by_name = {name_of(each): each for each in user.users if each.op == "call_function"}
    forward, backward = by_name.pop("nll_loss_forward", None), by_name.pop("nll_loss_backward", None)
    gradient = by_name.pop("_log_softmax_backward_data", None)
    is_known = forward is not None and not by_name and len(user.users) == 1 + 2 * (backward is not None)
    if not is_known or logits.meta["val"].ndim != 2 or dim != 1 or user.args[1] not in (1, -1) or user.args[2]:
        return None
    if forward.args[1].meta["val"].ndim != 1 or forward.args[2] is not None or forward.args[3] not in (MEAN, 2):
        return None
    if backward is not None and (gradient is None or list(backward.users) != [gradient]):
        return None
    return _Loss(logits, user, forward, backward, gradient)


def _emit_loss(program: Program, loss: _Loss) -> tuple[Node, Node, Node, Node, Node]:
    """The loss, and what its gradient needs: wide logits, their logsumexp [T, 1], which logits are at no label [T, V],
    which tokens count [T], and how many."""
    emit, (_, labels, _, reduction, ignored) = program.emit, loss.forward.args
    value = loss.logits.meta["val"]
    wide = accumulator(value.dtype)
    logits = loss.logits if wide == value.dtype else emit(_aten._to_copy.default, loss.logits, dtype=wide)
    is_ignored = emit(_aten.eq.Scalar, labels, ignored)
    numbers = emit(_aten.arange.default, value.shape[1], dtype=torch.int64, device=value.device)
    label = emit(_aten.index_select.default, numbers, 0, emit(_aten.masked_fill.Scalar, labels, is_ignored, 0))
    misses = emit(_aten.ne.Tensor, emit(_aten.unsqueeze.default, label, 1), numbers)  # the line above refused others
    at_label = emit(_aten.masked_fill.Scalar, logits, misses, 0)
    lse = emit(_aten.logsumexp.default, logits, [1], True)
    chosen = emit(_aten.sum.dim_IntList, at_label, [1], True)
    each = emit(_aten.squeeze.dim, emit(_aten.sub.Tensor, lse, chosen), 1)
    counts = emit(_aten.logical_not.default, is_ignored)
    total = emit(_aten.sum.dim_IntList, emit(_aten._to_copy.default, counts, dtype=wide), [0])
    result = emit(_aten.sum.dim_IntList, emit(_aten.masked_fill.Scalar, each, is_ignored, 0), [0])
    result = emit(_aten.div.Tensor, result, total) if reduction == MEAN else result
    if wide != value.dtype:
        result = emit(_aten._to_copy.default, result, dtype=value.dtype)
    for item in list(loss.forward.users):
        program.substitute(item, (result, total)[item.args[1]])
    return logits, lse, misses, counts, total


def _emit_gradient(
    program: Program, loss: _Loss, logits: Node, lse: Node, misses: Node, counts: Node, total: Node
) -> None:
    """The gradient by the logits [T, V]."""
    emit, gradient, of_loss = program.emit, loss.gradient, loss.backward
    assert gradient is not None and of_loss is not None  # the caller has looked
    cotangent, reduction = of_loss.args[0], of_loss.args[4]
    factor = emit(_aten._to_copy.default, cotangent, dtype=logits.meta["val"].dtype)
    factor = emit(_aten.div.Tensor, factor, total) if reduction == MEAN else factor
    zero = emit(_aten.zeros.default, [], dtype=factor.meta["val"].dtype, device=factor.meta["val"].device)
    factor = emit(_aten.unsqueeze.default, emit(_aten.where.self, counts, factor, zero), 1)  # [T, 1]
    shares = emit(_aten.exp.default, emit(_aten.sub.Tensor, logits, lse))
    by_logits = emit(_aten.where.self, misses, shares, emit(_aten.sub.Tensor, shares, 1))
    result = emit(_aten.mul.Tensor, by_logits, factor)
    dtype: Any = gradient.meta["val"].dtype
    if result.meta["val"].dtype != dtype:
        result = emit(_aten._to_copy.default, result, dtype=dtype)
    program.substitute(gradient, result)
