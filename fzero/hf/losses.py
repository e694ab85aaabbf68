"""Losses: that of a model of transformers for next tokens, of which each rank computes its own places."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers.loss.loss_utils import ForCausalLMLoss

from fzero import axis_size, psum
from fzero.hf.styles import Axis, noting, take_block

IGNORED = -100
"""The label of a place that has no loss."""


def is_of_next_tokens(model: Any) -> bool:
    """Whether the loss of a model is a mean over labels of next tokens, whose parts on ranks have a known sum."""
    return getattr(model, "loss_function", None) is ForCausalLMLoss


def shift_labels(labels: Tensor, ignored: int = IGNORED) -> Tensor:
    """For each place the label behind it. The last one has none."""
    return nn.functional.pad(labels, (0, 1), value=ignored)[..., 1:]


@contextmanager
def replace_loss(model: Any, compute: Callable[..., Tensor]) -> Iterator[None]:
    """Within this context the loss of a model is another function of logits and labels."""
    before = vars(model).get("_loss_function")
    model._loss_function = compute
    try:
        yield
    finally:
        del model._loss_function
        if before is not None:
            model._loss_function = before


def share_loss(model: Any, axis: Axis) -> Callable[..., Any]:
    """The forward of a model whose logits are gathered along an axis, or the same on its ranks: each rank computes the
    loss of its block of places, and the sum over ranks is that of all. Of logits that nobody reads besides, a rank gets
    those of its places alone."""
    forward = model.forward

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if axis_size(axis) == 1 or not is_of_next_tokens(model):
            return forward(*args, **kwargs)
        with noting() as take, replace_loss(model, functools.partial(_add_up, take, axis)):
            return forward(*args, **kwargs)

    return run


def _add_up(
    take: Callable[[Tensor, Axis, int], Tensor], axis: Axis, logits: Tensor, labels: Any, vocab_size: int, **how: Any
) -> Tensor:
    """The loss of all places, as the sum of those of ranks. Places that the ranks do not divide are not cut."""
    ignored, targets = how.get("ignore_index", IGNORED), how.get("shift_labels")
    targets = shift_labels(labels, ignored) if targets is None else targets
    if logits.ndim != 3 or logits.shape[:2] != targets.shape or logits.shape[1] % axis_size(axis):
        return ForCausalLMLoss(logits, labels, vocab_size, **how)
    if how.get("num_items_in_batch") is None:
        how["num_items_in_batch"] = (targets != ignored).sum()
    how["shift_labels"] = take_block(targets, axis, 1)
    return psum(ForCausalLMLoss(take(logits, axis, 1), None, vocab_size, **how), axis)
