"""Cross entropies of large logits, in operations that a loop over classes can take by rows.

torch's `cross_entropy` is a softmax of all logits and a choice of one each, with kernels that want the logits whole. A
leaf that is used by rows makes a few columns of the logits at a time. From these follow the sums of a loss:

    loss of a token        logsumexp(logits) - (the sum over classes of the logit at the label, 0 elsewhere)
    gradient by its logits (exp(logits - logsumexp(logits)) - 1 at the label) * the gradient by the loss of the token

`fzero.tiled_cross_entropy` is a loop over tokens that has the head whole in each turn. Where the head is used by rows,
all tokens take some classes at a time instead. The gradients of the head and of `hidden` stand then where the step
first uses them, in one loop over the head.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import torch
from torch import fx

from fzero.base.dtypes import accumulator
from fzero.passes.order import restore_order
from fzero.passes.rows import follow_rows, is_carrier, list_reduction_dims
from fzero.program import ops
from fzero.program.arguments import items_of, operand_of, position_of
from fzero.program.operation import Node
from fzero.program.ops.loops import Loop, TiledLoss
from fzero.program.program import Program
from fzero.program.records import name_of, shares_memory

_aten = torch.ops.aten
MEAN = 1
"""torch's number for the reduction "mean"; 2 is "sum"."""


_PLAIN = TiledLoss(-100, 0.0, 0.0, (True, True, True))
"""A cross entropy of torch without smoothed labels. Its labels to ignore stand in its node."""


class _Sums(NamedTuple):
    """What a cross entropy and its gradient are made of: wide logits [T, V], their logsumexp [T, 1], and which logits
    are at no label [T, V]. Of each token [T]: its label, or another where the token does not count, whether it counts,
    and its loss, 0 where it does not count."""

    logits: Node
    lse: Node
    misses: Node
    labels: Node
    counts: Node
    losses: Node


class _Loss(NamedTuple):
    """The nodes of a cross entropy: the logits [T, V], their log-softmax, its sum over classes where labels are
    smoothed, and the loss. Then the gradient by the logits, those by the log-softmax that the gradient is made of: that
    of the loss, and where labels are smoothed one for all classes of a token [T, 1]."""

    logits: Node
    softmax: Node
    every: Node | None
    forward: Node
    gradient: Node | None
    backward: Node | None
    spread: Node | None


class _NllLoss(NamedTuple):
    """The arguments of `nll_loss_forward`, which are among those of `nll_loss_backward`."""

    log_softmax: Node
    labels: Node
    weight: Node | None
    reduction: int
    ignore_index: int


def open_loss(program: Program, product: Node, dim: int, rows: int) -> Node | None:
    """Replace the cross entropy whose logits a product gives, with the classes along `dim`, in the program's own graph.

    Returns the node that says which logits are at no label; None where the product has any other use.
    """
    loss = _find_loss(product, dim, rows)
    if loss is None:
        return None
    with program.graph.inserting_before(loss.forward):
        sums, parts, total = _emit_loss(program, loss)
    if loss.gradient is not None:
        with program.graph.inserting_before(loss.gradient):
            _emit_gradient(program, loss, sums, parts, total)
    for node in (loss.backward, loss.forward, loss.softmax):
        if node is not None:
            program.graph.erase_node(node)
    return sums.misses


def _find_loss(product: Node, dim: int, rows: int) -> _Loss | None:
    """The cross entropy of a product's logits, with one label for each token, and weights of classes or smoothed
    labels."""
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
    if len(by_name) < len(user.users) or logits.meta["val"].ndim != 2 or dim != 1:
        return None
    _, of_dim, is_wider = user.args
    every, forward = by_name.pop("sum", None), by_name.pop("nll_loss_forward", None)
    backward, gradient = by_name.pop("nll_loss_backward", None), by_name.pop("_log_softmax_backward_data", None)
    is_known = forward is not None and not by_name and (backward is None) == (gradient is None)
    if not is_known or of_dim not in (1, -1) or is_wider:
        return None
    if every is not None and (list_reduction_dims(every) != [1] or every < forward):  # it takes logsumexp from there
        return None
    of_tokens = _NllLoss(*forward.args)
    if of_tokens.labels.meta["val"].ndim != 1 or of_tokens.reduction not in (MEAN, 2):
        return None
    if gradient is None or backward is None:
        return _Loss(logits, user, every, forward, None, None, None)
    total = operand_of(gradient)
    spread = None if total is backward else _find_spread(total, backward)
    is_known = list(backward.users) == [gradient if total is backward else total]
    is_known = is_known and (spread is None) == (total is backward)
    return _Loss(logits, user, every, forward, gradient, backward, spread) if is_known else None


def _find_spread(total: Node, backward: Node) -> Node | None:
    """The value [T, 1] for all classes of a token that is added to a gradient; None where another value is."""
    if name_of(total) != "add" or total.kwargs or backward not in total.args or len(total.users) > 1:
        return None
    other = next((x for x in total.args if isinstance(x, fx.Node) and x is not backward), None)
    if other is None or name_of(other) != "expand" or len(other.users) > 1:
        return None
    spread = operand_of(other)
    return spread if list(spread.meta["val"].shape[1:]) == [1] else None


def _emit_sums(program: Program, logits: Node, labels: Node, terms: TiledLoss) -> _Sums:
    """The sums of the cross entropy of logits."""
    emit, value = program.emit, logits.meta["val"]
    wide = accumulator(value.dtype)
    logits = logits if wide == value.dtype else emit(_aten._to_copy.default, logits, dtype=wide)
    is_ignored = emit(_aten.eq.Scalar, labels, terms.ignore_index)
    numbers = emit(_aten.arange.default, value.shape[1], dtype=torch.int64, device=value.device)
    label = emit(_aten.index_select.default, numbers, 0, emit(_aten.masked_fill.Scalar, labels, is_ignored, 0))
    misses = emit(_aten.ne.Tensor, emit(_aten.unsqueeze.default, label, 1), numbers)  # the line above refused others
    at_label = emit(_aten.masked_fill.Scalar, logits, misses, 0)
    lse = emit(_aten.logsumexp.default, logits, [1], True)
    chosen = emit(_aten.sum.dim_IntList, at_label, [1], True)
    if terms.label_smoothing:
        share = terms.label_smoothing / value.shape[1]
        every = emit(_aten.mul.Tensor, emit(_aten.sum.dim_IntList, logits, [1], True), share)
        chosen = emit(_aten.add.Tensor, emit(_aten.mul.Tensor, chosen, 1 - terms.label_smoothing), every)
    each = emit(_aten.sub.Tensor, lse, chosen)
    if terms.z_loss:
        square = emit(_aten.mul.Tensor, lse, lse)
        each = emit(_aten.add.Tensor, each, emit(_aten.mul.Tensor, square, terms.z_loss))
    losses = emit(_aten.masked_fill.Scalar, emit(_aten.squeeze.dim, each, 1), is_ignored, 0)
    return _Sums(logits, lse, misses, label, emit(_aten.logical_not.default, is_ignored), losses)


def _emit_gradient_of_sums(
    program: Program, sums: _Sums, by_share: Node, at_label: Node, every: Node | None = None
) -> Node:
    """The gradient by wide logits [T, V]: the softmax times `by_share`, plus `every`, minus `at_label` at the label.
    These three are [T, 1]."""
    emit = program.emit
    shares = emit(_aten.exp.default, emit(_aten.sub.Tensor, sums.logits, sums.lse))
    shares = emit(_aten.mul.Tensor, shares, by_share)
    shares = shares if every is None else emit(_aten.add.Tensor, shares, every)
    return emit(_aten.where.self, sums.misses, shares, emit(_aten.sub.Tensor, shares, at_label))


def _emit_loss(program: Program, loss: _Loss) -> tuple[_Sums, Node, Node]:
    """The sums of a loss of torch, in whose place their total or mean is, the weight of each token, 0 where it does not
    count, and the sum of these."""
    emit, (_, labels, weights, reduction, ignored) = program.emit, loss.forward.args
    dtype = loss.logits.meta["val"].dtype
    sums = _emit_sums(program, loss.logits, labels, _PLAIN._replace(ignore_index=ignored))
    wide = sums.logits.meta["val"].dtype
    parts, losses = emit(_aten._to_copy.default, sums.counts, dtype=wide), sums.losses
    if weights is not None:
        parts = emit(_aten.mul.Tensor, parts, emit(_aten.index_select.default, weights, 0, sums.labels))  # [T]
        losses = emit(_aten.mul.Tensor, losses, parts)
    total, result = (emit(_aten.sum.dim_IntList, x, [0]) for x in (parts, losses))
    result = emit(_aten.div.Tensor, result, total) if reduction == MEAN else result
    result = result if wide == dtype else emit(_aten._to_copy.default, result, dtype=dtype)
    if loss.every is not None:
        logits = emit(_aten.sum.dim_IntList, sums.logits, [1], True)
        every = emit(_aten.sub.Tensor, logits, emit(_aten.mul.Tensor, sums.lse, loss.logits.meta["val"].shape[1]))
        value = loss.every.meta["val"]
        every = emit(_aten._to_copy.default, emit(_aten.view.default, every, list(value.shape)), dtype=value.dtype)
        program.substitute(loss.every, every)
    for item in list(loss.forward.users):
        program.substitute(item, (result, total)[position_of(item)])
    return sums, parts, total


def _emit_gradient(program: Program, loss: _Loss, sums: _Sums, parts: Node, total: Node) -> None:
    """The gradient by the logits [T, V] of a loss of torch."""
    emit, gradient, of_loss, wide = program.emit, loss.gradient, loss.backward, sums.logits.meta["val"].dtype
    assert gradient is not None and of_loss is not None  # the caller has looked
    cotangent, *of_tokens, _ = of_loss.args
    nll = _NllLoss(*of_tokens)
    factor = emit(_aten._to_copy.default, cotangent, dtype=wide)
    factor = emit(_aten.div.Tensor, factor, total) if nll.reduction == MEAN else factor
    zero = emit(_aten.zeros.default, [], dtype=wide, device=factor.meta["val"].device)
    factor = emit(_aten.where.self, sums.counts, factor, zero)
    if nll.weight is not None:
        factor = emit(_aten.mul.Tensor, factor, parts)
    factor = emit(_aten.unsqueeze.default, factor, 1)  # [T, 1]
    if loss.spread is None:
        result = _emit_gradient_of_sums(program, sums, factor, factor)
    else:
        spread = emit(_aten._to_copy.default, loss.spread, dtype=wide)
        of_all = emit(_aten.mul.Tensor, spread, loss.logits.meta["val"].shape[1])
        result = _emit_gradient_of_sums(program, sums, emit(_aten.sub.Tensor, factor, of_all), factor, spread)
    dtype: Any = gradient.meta["val"].dtype
    if result.meta["val"].dtype != dtype:
        result = emit(_aten._to_copy.default, result, dtype=dtype)
    joined = operand_of(gradient)
    program.substitute(gradient, result)
    if loss.spread is not None:
        program.graph.erase_node(joined)


# tiled cross entropies


class Opened(NamedTuple):
    """The values [T, V] of tiled cross entropies that turns over the head compute, by name. The head has at least so
    many `parts` as the step has of its tokens: so as few logits are alive at a time as the step asks for."""

    names: frozenset[str] = frozenset()
    parts: int = 1


def open_tiles(program: Program, gathers: Collection[Node]) -> Opened:
    """Replace the loops of `fzero.tiled_cross_entropy` whose head these gathers give by the cross entropy of all
    tokens, in the program's own graph. Returns what was opened."""
    names, parts = set[str](), 1
    for node in program.graph.find_nodes(op="call_function", target=ops.loop):
        loop = Loop(*node.args)
        product = None if loop.loss is None else _find_product(loop)
        if product is None or _find_source(product[0]) not in gathers:
            continue
        logits, misses = _open_tile(program, node, loop, *product)
        names |= {logits.name, misses.name}
        parts = max(parts, loop.length)
    if names:
        restore_order(program.graph)  # views of gradients stand in front of these now
    return Opened(frozenset(names), parts)


def _find_product(loop: Loop) -> tuple[Node, Node | None] | None:
    """The head and its bias, whose product with the tokens the turns of a tiled cross entropy compute. None where turns
    cast one of these."""
    placeholders = loop.body.placeholders
    given = dict(zip(placeholders[-len(loop.constants) :], loop.constants))
    hidden = placeholders[len(loop.carry)]
    for user in hidden.users:
        name, operands = name_of(user), list(user.args)
        bias = operands.pop(0) if name == "addmm" else None
        if name in ("mm", "addmm") and operands[0] is hidden and name_of(operands[1]) == "t":
            head = given.get(operand_of(operands[1]))
            is_known = head is not None and (bias is None or bias in given)
            return (head, None if bias is None else given[bias]) if is_known else None
    return None


def _find_source(node: Node) -> Node:
    """The node that a value is a cast of, or the value in another shape."""
    while is_carrier(node) and len(node.all_input_nodes) == 1:
        node = node.all_input_nodes[0]
    return node


def _open_tile(program: Program, node: Node, loop: Loop, head: Node, bias: Node | None) -> tuple[Node, Node]:
    """The logits of all tokens, and which of these are at no label. They, their loss and their gradients take the place
    of a loop."""
    emit, terms = program.emit, loop.loss
    assert terms is not None  # the caller has looked
    items = items_of(node)
    with program.graph.inserting_before(node):
        hidden, labels = (emit(_aten.view.default, x, [-1, *x.meta["val"].shape[2:]]) for x in loop.xs)
        turned = emit(_aten.t.default, head)
        logits = (
            emit(_aten.mm.default, hidden, turned) if bias is None else emit(_aten.addmm.default, bias, hidden, turned)
        )
        sums = _emit_sums(program, logits, labels, terms)
        total = emit(_aten.add.Tensor, loop.carry[0], emit(_aten.sum.dim_IntList, sums.losses, [0]))
    news = {0: total}
    if any(items):
        with program.graph.inserting_before(min(_find_first_use(item) for at, item in items.items() if at)):
            news |= _emit_gradients_of_tile(program, sums, hidden, head, loop, logits.meta["val"].dtype)
    for at, item in items.items():
        program.substitute(item, news[at])
    program.graph.erase_node(node)
    return logits, sums.misses


def _find_first_use(node: Node) -> Node:
    """The first node that uses a value or a view of the value, and makes no view."""
    uses = (_find_first_use(user) if shares_memory(user) else user for user in node.users)
    return min(uses, default=node)


def _emit_gradients_of_tile(
    program: Program, sums: _Sums, hidden: Node, head: Node, loop: Loop, narrow: torch.dtype
) -> dict[int, Node]:
    """The gradients that the turns of a tiled cross entropy returned, by position. Products are of the dtype
    `narrow`."""
    emit, terms, wide = program.emit, loop.loss, sums.logits.meta["val"].dtype
    assert terms is not None

    def cast(x: Node, dtype: torch.dtype) -> Node:
        return x if x.meta["val"].dtype == dtype else emit(_aten._to_copy.default, x, dtype=dtype)

    smoothing, counts = terms.label_smoothing, emit(_aten._to_copy.default, sums.counts, dtype=wide)
    by_share = counts = emit(_aten.unsqueeze.default, counts, 1)
    if terms.z_loss:
        grown = emit(_aten.add.Tensor, emit(_aten.mul.Tensor, sums.lse, 2 * terms.z_loss), 1)
        by_share = emit(_aten.mul.Tensor, counts, grown)
    every = emit(_aten.mul.Tensor, counts, -smoothing / sums.logits.meta["val"].shape[1]) if smoothing else None
    at_label = emit(_aten.mul.Tensor, counts, 1 - smoothing)
    by_logits = _emit_gradient_of_sums(program, sums, by_share, at_label, every)
    news, thin, position = dict[int, Node](), cast(by_logits, narrow), 1
    of_hidden, of_head, of_bias = terms.wanted
    if of_head:
        within = wide if narrow == torch.float16 else narrow  # its range is too small for a sum of many tokens
        turned = emit(_aten.t.default, cast(by_logits, within))
        news[position] = cast(emit(_aten.mm.default, turned, cast(hidden, within)), wide)
        position += 1
    if of_bias:
        news[position] = emit(_aten.sum.dim_IntList, by_logits, [0])
    if of_hidden:
        by_hidden = cast(emit(_aten.mm.default, thin, head), hidden.meta["val"].dtype)
        news[len(loop.carry)] = emit(_aten.view.default, by_hidden, list(loop.xs[0].meta["val"].shape))
    return news
