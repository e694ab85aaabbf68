"""The CTC loss in a step. torch's own saves a result whose shape depends on the longest target."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from fzero.base.errors import FzeroError
from fzero.base.user_line import current_user_line
from fzero.program import ops
from fzero.values.sharded import Sharded


def ctc_loss(
    func: Callable[..., Any],
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor | Sequence[int],
    target_lengths: Tensor | Sequence[int],
    blank: int = 0,
    reduction: str | int = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """`torch.nn.functional.ctc_loss`, and `torch.ctc_loss`, which takes the reduction as a number."""
    log_probs, targets = _gather(log_probs), _gather(targets)
    if torch.is_autocast_enabled(log_probs.device.type) and log_probs.dtype != torch.float64:
        log_probs = log_probs.float()
    inputs, lengths = (_gather(torch.as_tensor(x)) for x in (input_lengths, target_lengths))
    is_batch = log_probs.ndim == 3
    if not is_batch:
        log_probs, inputs, lengths = log_probs.unsqueeze(1), inputs.reshape(1), lengths.reshape(1)
    loss = _CTC.apply(log_probs, targets, inputs, lengths, blank, zero_infinity)
    if zero_infinity:
        loss = torch.where(loss == torch.inf, torch.zeros_like(loss), loss)
    if reduction in ("mean", 1):
        return (loss / lengths.clamp_min(1).to(loss)).mean()
    if reduction in ("sum", 2):
        return loss.sum()
    return loss if is_batch else loss.squeeze(0)


def _gather(x: Any) -> Any:
    return x.full_tensor() if isinstance(x, Sharded) else x


class _CTC(torch.autograd.Function):
    """The CTC loss of each example. Without `zero_infinity`, which is about gradients here."""

    @staticmethod
    def forward(*args: Any) -> Tensor:
        return ops.ctc_loss(*args[:5])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:4])
        ctx.numbers = inputs[4:]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return _CTCBackward.apply(grad, *ctx.saved_tensors, *ctx.numbers), None, None, None, None, None


class _CTCBackward(torch.autograd.Function):
    """The gradient of the log-probabilities, which torch does not differentiate again."""

    @staticmethod
    def forward(*args: Any) -> Tensor:
        return ops.ctc_loss_backward(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> NoReturn:
        raise FzeroError(current_user_line(), "ctc_loss has no second derivative in torch", "differentiate it once")
