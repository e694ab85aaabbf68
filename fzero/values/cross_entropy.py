"""The cross entropy of a model's head, without the logits of all tokens."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from fzero.base import torch_private
from fzero.base.ambient import find_ambient
from fzero.base.arguments import check_arguments, is_of
from fzero.base.dtypes import accumulator
from fzero.base.errors import FzeroError
from fzero.base.torch_private_functions import requires_grad
from fzero.program.ops.loops import TiledLoss
from fzero.values.regions import current_mark
from fzero.values.tiles import gather, scan_parts

_WHERE = "tiled_cross_entropy"


class _Terms(NamedTuple):
    """What the loss of a token is made of."""

    ignore_index: int
    z_loss: float
    label_smoothing: float


@check_arguments
def tiled_cross_entropy(
    hidden: Tensor,
    head: Tensor,
    labels: Tensor,
    chunks: int,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    """The cross entropy of the logits `hidden @ head.T + bias`, from `chunks` parts of the tokens, one after the other.

        loss = fzero.tiled_cross_entropy(h, params["head"]["weight"], batch["labels"], chunks=16)

    `hidden` is [..., d], `head` [V, d] (a tied embedding, say), `bias` [V], and `labels` [...]. Each is a tensor or a
    leaf. The loss is that of `torch.nn.functional.cross_entropy`, plus `z_loss * logsumexp(logits) ** 2` for each token
    that counts. A token counts where its label is not `ignore_index`. With `reduction="sum"` the losses are added up
    and not divided by the number of tokens that count: `fzero.accumulate` takes such a sum. The loss is float32 or
    wider.

    The logits of one part are alive at a time: `ceil(tokens / chunks)` rows. The loss is one number, so its gradient is
    known up to a factor as soon as the logits are. The forward pass computes this gradient too, and the backward pass
    multiplies it by the factor. So logits are computed once, and a step gathers the head once and scatters its gradient
    once. The gradient of the head adds up in float32 or wider. All this holds outside of a step too.

    A head that the step streams (the option `chunk` of `fzero.shard`) is never whole. Each turn then takes all tokens
    and a part of the head, in at least as many parts, and a step gathers the head twice.

    Under vmap, forward mode and nested derivatives the parts are differentiated by torch, and the logits of all parts
    are alive.

    The idea is that of fused linear cross entropies, as in Liger Kernel (Hsu et al., 2024). The z-loss is that of PaLM
    (Chowdhery et al., 2022).

    Raises:
        FzeroError: for shapes and dtypes that do not fit; for `chunks` below 1 or above the number of tokens; for a
            `label_smoothing` outside of [0, 1]; for another `reduction`; on a CPU for a label outside of [0, V) that is
            not `ignore_index` (in a step the kernel refuses it); for the derivative of a gradient that was computed by
            autograd outside of torch.func.
    """
    hidden, head, labels, bias = map(gather, (hidden, head, labels, bias))
    terms = _Terms(ignore_index, z_loss, label_smoothing)
    _check(hidden, head, bias, labels, terms, reduction)
    targets = labels.flatten()
    total = _sum_losses(hidden.reshape(len(targets), hidden.shape[-1]), [head, bias], targets, chunks, terms)
    if reduction == "sum":
        return total
    count = (targets != ignore_index).sum()
    return torch.where(count == 0, math.nan, total / count.clamp(min=1))  # where nan, the gradient is 0


def _sum_losses(hidden: Tensor, weights: list[Any], labels: Tensor, chunks: int, terms: _Terms) -> Tensor:
    """The sum of the losses of all tokens. `weights` are the head and its bias, which may be None."""
    values = [hidden, *weights]
    zero = torch.zeros((), dtype=accumulator(hidden.dtype), device=hidden.device)
    if torch_private.in_vmap() or torch_private.in_forward_mode() or torch_private.in_second_order():

        def add(carry: list[Any], xs: list[Tensor]) -> tuple[list[Any], None]:
            return [carry[0] + _sum_plainly(xs[0], carry[1], carry[2], xs[1], terms), *carry[1:]], None

        return scan_parts(_WHERE, add, [zero, *weights], [hidden, labels], chunks)[0][0]
    wanted = [x is not None and torch.is_grad_enabled() and requires_grad(x) for x in values]
    head, bias = weights[0].detach(), None if weights[1] is None else weights[1].detach()
    outside = current_mark().turns

    def turn(carry: list[Any], xs: list[Tensor]) -> tuple[list[Any], Any]:
        for this in current_mark().turns[len(outside) :]:  # for the pass `stream`, which may cut the head instead
            this.loss = TiledLoss(*terms, wanted=(wanted[0], wanted[1], wanted[2]))
        loss, (by_rows, *by_weights) = _compute(xs[0], head, bias, xs[1], terms, wanted)
        sums = [None if new is None else old + new for old, new in zip(carry[1:], by_weights)]
        return [carry[0] + loss, *sums], by_rows

    with torch.no_grad():  # autograd follows none of this: the gradients are attached below
        sums = [zero.new_zeros(x.shape) if is_wanted else None for x, is_wanted in zip(weights, wanted[1:])]
        (total, *by_weights), by_rows = scan_parts(_WHERE, turn, [zero, *sums], [hidden.detach(), labels], chunks)
    followed = [x for x, is_wanted in zip(values, wanted) if is_wanted]
    gradients = [x for x in (by_rows, *by_weights) if x is not None]
    return _Attach.apply(total, *followed, *_Once.apply(len(followed), *gradients, *followed)) if followed else total


def _sum_plainly(hidden: Tensor, head: Tensor, bias: Tensor | None, labels: Tensor, terms: _Terms) -> Tensor:
    """The sum of the losses of some tokens."""
    logits = functional.linear(hidden, head, bias)
    logits = logits.to(accumulator(logits.dtype))
    squares = torch.where(labels != terms.ignore_index, logits.logsumexp(-1).square(), 0)
    loss = functional.cross_entropy(
        logits, labels, ignore_index=terms.ignore_index, label_smoothing=terms.label_smoothing, reduction="sum"
    )
    return loss + terms.z_loss * squares.sum()


def _compute(
    hidden: Tensor, head: Tensor, bias: Tensor | None, labels: Tensor, terms: _Terms, wanted: list[bool]
) -> tuple[Tensor, list[Tensor | None]]:
    """The sum of the losses of some tokens, and its gradients by `hidden`, `head` and `bias` where they are wanted.

    With p = softmax(logits) and lse = logsumexp(logits), the gradient by the logits of a token is
    p (1 + 2 z_loss lse) - label_smoothing / V, and -(1 - label_smoothing) more at the label.
    """
    _, z, smoothing = terms
    logits = functional.linear(hidden, head, bias)
    narrow, vocabulary = logits.dtype, logits.shape[1]
    x = logits.to(accumulator(narrow))
    del logits
    counts = (labels != terms.ignore_index)[:, None]  # [rows, 1], as all that follows
    at = torch.where(counts, labels[:, None], 0)
    most = x.amax(1, keepdim=True)
    x.sub_(most)  # in place, so that nothing of this size is made a second time
    losses = -(1 - smoothing) * x.gather(1, at)
    if smoothing:
        losses = losses - smoothing * x.mean(1, keepdim=True)
    sums = x.exp_().sum(1, keepdim=True)
    lse = most + sums.log()
    total = torch.where(counts, losses + sums.log() + z * lse.square(), 0).sum()
    if not any(wanted):
        return total, [None, None, None]
    x.mul_(torch.where(counts, (1 + 2 * z * lse) / sums, 0))
    if smoothing:
        x.sub_(counts.to(x.dtype) * (smoothing / vocabulary))
    x.scatter_add_(1, at, counts.to(x.dtype) * (smoothing - 1))
    by_bias, thin = x.sum(0) if wanted[2] else None, x.to(narrow)
    by_rows = (thin @ head).to(hidden.dtype) if wanted[0] else None
    if narrow != torch.float16:  # whose range is too small for a sum over rows that is not divided by their number
        x = thin
    by_head = x.T @ hidden.to(x.dtype) if wanted[1] else None
    return total, [by_rows, by_head, by_bias]


class _Attach(torch.autograd.Function):
    """`(total, *values, *gradients)` -> total, of which these are the gradients by the values."""

    @staticmethod
    def forward(total: Tensor, *given: Tensor) -> Tensor:
        return total.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        count = len(inputs) // 2
        ctx.dtypes = [x.dtype for x in inputs[1 : 1 + count]]
        ctx.save_for_backward(*inputs[1 + count :])

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Any, ...]:
        found = [(x * cotangent).to(dtype) for x, dtype in zip(ctx.saved_tensors, ctx.dtypes)]
        return None, *found, *(None for _ in found)


class _Once(torch.autograd.Function):
    """`(n, *gradients, *values)` -> the n gradients, which were computed from the values without autograd."""

    @staticmethod
    def forward(n: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tensors[:n]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.set_materialize_grads(False)
        ctx.count = len(inputs)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[None, ...]:
        if all(x is None for x in cotangents):
            return (None,) * ctx.count
        problem = "its gradient is differentiated again, by autograd outside of torch.func"
        raise FzeroError(_WHERE, problem, "nest fzero.grad or torch.func.grad")


def _check(hidden: Tensor, head: Tensor, bias: Any, labels: Tensor, terms: _Terms, reduction: str) -> None:
    shape, head_shape, label_shape = tuple(hidden.shape), tuple(head.shape), tuple(labels.shape)
    fits = len(shape) > 0 and len(head_shape) == 2 and head_shape[1] == shape[-1]
    is_tensor = is_of(terms.z_loss, Tensor)
    dtypes = {x.dtype for x in (hidden, head, bias) if x is not None}
    for where, is_right, problem, way_out in (
        ("head", fits, f"is {head_shape}, hidden is {shape}", "give [V, d], as nn.Linear has it, and [..., d]"),
        ("bias", bias is None or bias.shape == head_shape[:1], f"does not fit the head, {head_shape}", "give [V]"),
        (
            "head",
            len(dtypes) == 1 or find_ambient().autocast,
            f"is {head.dtype} beside others: {dtypes}",
            "cast with fzero.precision",
        ),
        ("hidden", hidden.is_floating_point(), f"is {hidden.dtype}", "give a floating dtype"),
        ("labels", label_shape == shape[:-1], f"is {label_shape}, hidden is {shape}", "give one for each token"),
        ("labels", labels.dtype == torch.int64, f"is {labels.dtype}", "give classes, as torch.int64"),
        ("label_smoothing", 0 <= terms.label_smoothing <= 1, f"is {terms.label_smoothing}", "give 0 to 1"),
        ("z_loss", is_tensor or 0 <= terms.z_loss < math.inf, f"is {terms.z_loss}", "give 0 or more"),
        ("reduction", reduction in ("mean", "sum"), f"is {reduction!r}", 'give "mean" or "sum"'),
    ):
        if not is_right:
            raise FzeroError(f"{_WHERE}: {where}", problem, way_out)
    has_values = not (torch_private.in_vmap() or torch_private.dispatch_modes() or torch.compiler.is_compiling())
    if labels.device.type == "cpu" and has_values:
        _check_labels(torch_private.unwrap(labels), len(head), terms.ignore_index)


def _check_labels(labels: Tensor, vocabulary: int, ignore_index: int) -> None:
    wrong = labels[(labels != ignore_index) & ((labels < 0) | (labels >= vocabulary))]
    if wrong.numel():
        problem = f"{wrong.numel()} of {labels.numel()} lie outside of 0 to {vocabulary - 1}, the first is {wrong[0]}"
        raise FzeroError(f"{_WHERE}: labels", problem, f"give classes, and {ignore_index} for a token to ignore")
