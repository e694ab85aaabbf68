"""Losses whose kernels in torch save results of a shape that depends on values.

ctc_loss            any -> as the operands   the loss of each example
ctc_loss_backward   any -> as the operands   the gradient of the log-probabilities; runs the forward kernel again
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fzero.program.kinds import Kind
from fzero.program.operation import Node
from fzero.program.records import register_for_tracing

if TYPE_CHECKING:
    from fzero.program.inference import Walk

_aten = torch.ops.aten
_OPERANDS = "Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths, int blank"


def _kind(walk: Walk, node: Node) -> Kind:
    return walk.join(node, node.all_input_nodes, pointwise=False)


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
    kind=_kind,
    perform=lambda program, node, rank: _run,
)
ctc_loss_backward = register_for_tracing(
    f"ctc_loss_backward(Tensor grad, {_OPERANDS}, bool zero_infinity) -> Tensor",
    lambda grad, log_probs, *_: torch.empty_like(log_probs),
    kind=_kind,
    perform=lambda program, node, rank: _run_backward,
)
