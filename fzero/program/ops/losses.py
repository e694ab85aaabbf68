"""Losses that torch's kernels do not serve as they are.

ctc_loss            any -> as the operands   the loss of each example; torch's kernel saves results of any shape
ctc_loss_backward   any -> as the operands   the gradient of the log-probabilities; runs the forward kernel again
log_softmax_        overwrites logits [T, V] with their log-softmax, some rows at a time
nll_gradient_       overwrites a log-softmax [T, V] with the gradient of `nll_loss` by the logits, some rows at a time

The `reuse` pass emits the last two. torch's kernels make up to three tensors of the size of all logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fzero.program.operation import Node, Operation, Work, join_operands, nbytes, values_of
from fzero.program.records import register, register_for_tracing

if TYPE_CHECKING:
    from fzero.program.memory import Allocator

_aten = torch.ops.aten
_OPERANDS = "Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths, int blank"


def _run(log_probs: Tensor, targets: Tensor, inputs: Tensor, lengths: Tensor, blank: int) -> Tensor:
    return _aten._ctc_loss.Tensor(log_probs, targets, inputs, lengths, blank)[0]


def _run_backward(
    grad: Tensor, log_probs: Tensor, targets: Tensor, inputs: Tensor, lengths: Tensor, blank: int, zero_infinity: bool
) -> Tensor:
    operands = log_probs, targets, inputs, lengths
    loss, alpha = _aten._ctc_loss.Tensor(*operands, blank)
    return _aten._ctc_loss_backward.Tensor(grad, *operands, loss, alpha, blank, zero_infinity)


ctc_loss = register_for_tracing(
    f"ctc_loss({_OPERANDS}) -> Tensor",
    lambda log_probs, *_: log_probs.new_empty(log_probs.shape[1]),
    kind=join_operands,
    perform=lambda program, node, rank: _run,
)
ctc_loss_backward = register_for_tracing(
    f"ctc_loss_backward(Tensor grad, {_OPERANDS}, bool zero_infinity) -> Tensor",
    lambda grad, log_probs, *_: torch.empty_like(log_probs),
    kind=join_operands,
    perform=lambda program, node, rank: _run_backward,
)


# the cross entropy, some rows of its logits at a time

ROWS = 16
"""Rows are taken in multiples of so many, which keeps their alignment: the order of sums in a GPU's kernels depends on
that."""
PIECE = {"cpu": 512 << 10}
"""Bytes of the rows that are taken at a time, by type of device: those that stay in a core's cache."""
LEAST_PIECE, MOST_PIECES = 8 << 20, 16
"""On other devices, which start each kernel, pieces have so many bytes at least, and are so many at most."""


def count_rows(value: Tensor) -> int:
    """The rows of logits [T, V] that are taken at a time."""
    piece = PIECE.get(value.device.type) or max(LEAST_PIECE, value.nbytes // MOST_PIECES)
    return max(ROWS, piece // (value.shape[1] * value.element_size()) // ROWS * ROWS)


def _split_rows(value: Tensor) -> Iterator[slice]:
    size = count_rows(value)
    return (slice(start, start + size) for start in range(0, value.shape[0], size))


def log_softmax_(logits: Tensor) -> None:
    """Overwrite logits [T, V] with their log-softmax over V."""


def nll_gradient_(
    softmax: Tensor, grad: Tensor, labels: Tensor, weight: Tensor | None, reduction: int, ignored: int, total: Tensor
) -> None:
    """Overwrite a log-softmax [T, V] with the gradient by its logits. The other arguments are those of torch's
    `nll_loss_backward`."""


def _run_log_softmax(logits: Tensor) -> None:
    for rows in _split_rows(logits):
        logits[rows].copy_(_aten._log_softmax.default(logits[rows], 1, False))


def _run_nll_gradient(
    softmax: Tensor, grad: Tensor, labels: Tensor, weight: Tensor | None, reduction: int, ignored: int, total: Tensor
) -> None:
    for rows in _split_rows(softmax):
        own = softmax[rows], labels[rows], weight, reduction, ignored, total
        gradient = _aten.nll_loss_backward.default(grad if grad.ndim == 0 else grad[rows], *own)
        softmax[rows].copy_(_aten._log_softmax_backward_data.default(gradient, softmax[rows], 1, softmax.dtype))


def _list_writes(node: Node) -> list[Node]:
    return [node.args[0]]


def _work(node: Node) -> Work:
    """Operands are read once, and the first is written once: what lies in between stays in the cache."""
    return Work(0, nbytes(values_of(node.all_input_nodes)) + nbytes(node.args[0].meta["val"]))


def _memory(allocator: Allocator, node: Node) -> tuple[Any, ...]:
    value = node.args[0].meta["val"]
    kept = 1 if node.target is log_softmax_ else 2
    allocator.scratch[node] = kept * min(count_rows(value), value.shape[0]) * value.shape[1] * value.element_size()
    return (None,)


def _register(target: Callable[..., None], run: Callable[..., None]) -> None:
    register(
        Operation(
            name=target.__name__,
            target=target,
            fake=target,
            kind=join_operands,
            writes=_list_writes,
            work=_work,
            memory=_memory,
            perform=lambda program, node, rank: run,
        )
    )


_register(log_softmax_, _run_log_softmax)
_register(nll_gradient_, _run_nll_gradient)
