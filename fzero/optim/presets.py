"""Whole optimizers, as chains of stages. A `learning_rate` is a number, or a schedule (see `schedules`)."""

from __future__ import annotations

from fzero.optim.base import GradientTransformation, Mask, Schedule, chain, identity
from fzero.optim.transforms import add_decayed_weights, scale_by_adam, scale_by_learning_rate, trace


def sgd(
    learning_rate: float | Schedule, momentum: float | None = None, nesterov: bool = False
) -> GradientTransformation:
    """Gradient descent, with `momentum` where it is not None.

    Raises:
        FzeroError: as `trace`.
    """
    memory = identity() if momentum is None else trace(momentum, nesterov)
    return chain(memory, scale_by_learning_rate(learning_rate))


def adam(
    learning_rate: float | Schedule, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8
) -> GradientTransformation:
    """Adam (Kingma and Ba, https://arxiv.org/abs/1412.6980).

    Raises:
        FzeroError: as `scale_by_adam`.
    """
    return chain(scale_by_adam(b1, b2, eps), scale_by_learning_rate(learning_rate))


def adamw(
    learning_rate: float | Schedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 1e-4,
    mask: Mask | None = None,
) -> GradientTransformation:
    """Adam with decoupled weight decay (Loshchilov and Hutter, https://arxiv.org/abs/1711.05101).

    `mask(path, leaf)` chooses the leaves that decay; None chooses all. `update` needs the parameters.

    Raises:
        FzeroError: as `scale_by_adam` and `add_decayed_weights`.
    """
    return chain(
        scale_by_adam(b1, b2, eps),
        add_decayed_weights(weight_decay, mask),
        scale_by_learning_rate(learning_rate),
    )
