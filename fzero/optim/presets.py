"""Whole optimizers, as chains of stages. A `learning_rate` is a number, or a schedule (see `schedules`).

Formulas and defaults are those of torch.optim where it has the optimizer, and the paper's otherwise. A rate that the
paper leaves open has no default. Where torch adds `weight_decay * params` to the gradients, so do these. `mask(path,
leaf)` chooses the leaves that decay; None chooses all.

All raise an FzeroError for hyperparameters that their stages refuse. `update` of an optimizer that decays weights, of
`lamb` and of `adafactor` needs the parameters.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from fzero.base.errors import FzeroError
from fzero.optim.adaptive import (
    scale_by_amsgrad,
    scale_by_lion,
    scale_by_nadam,
    scale_by_rms,
    scale_by_rss,
    scale_by_stddev,
)
from fzero.optim.base import (
    GradientTransformation,
    Mask,
    Schedule,
    chain,
    check_choice,
    check_decay,
    check_not_negative,
    identity,
    is_zero,
)
from fzero.optim.blocks import scale_by_param_block_rms, scale_by_trust_ratio
from fzero.optim.clipping import clip_by_block_rms
from fzero.optim.factored import scale_by_factored_rms
from fzero.optim.transforms import add_decayed_weights, scale_by_adam, scale_by_learning_rate, scale_by_schedule, trace


def sgd(
    learning_rate: float | Schedule = 1e-3,
    momentum: float | None = None,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    mask: Mask | None = None,
) -> GradientTransformation:
    """Gradient descent, with `momentum` where it is not None or 0. Defaults are those of torch.optim.SGD."""
    return chain(
        *_decay_gradients("sgd", weight_decay, mask),
        _sum_gradients("sgd", momentum, nesterov),
        scale_by_learning_rate(learning_rate),
    )


def adam(
    learning_rate: float | Schedule = 1e-3,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    mask: Mask | None = None,
) -> GradientTransformation:
    """Adam (Kingma and Ba, https://arxiv.org/abs/1412.6980). Defaults are those of torch.optim.Adam."""
    return chain(
        *_decay_gradients("adam", weight_decay, mask),
        scale_by_adam(b1, b2, eps),
        scale_by_learning_rate(learning_rate),
    )


def adamw(
    learning_rate: float | Schedule = 1e-3,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    mask: Mask | None = None,
) -> GradientTransformation:
    """Adam with decoupled weight decay (Loshchilov and Hutter, https://arxiv.org/abs/1711.05101).

    Defaults are those of torch.optim.AdamW; optax's decay is 1e-4.
    """
    return chain(
        scale_by_adam(b1, b2, eps),
        add_decayed_weights(weight_decay, mask),
        scale_by_learning_rate(learning_rate),
    )


def amsgrad(
    learning_rate: float | Schedule = 1e-3,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    decoupled: bool = False,
    mask: Mask | None = None,
) -> GradientTransformation:
    """Adam with the largest mean of squares so far (Reddi et al., https://arxiv.org/abs/1904.09237).

    Defaults are those of torch.optim.Adam with `amsgrad=True`. With `decoupled` weights decay as in `adamw`.
    """
    adapt = scale_by_amsgrad(b1, b2, eps)
    return _chain_with_decay("amsgrad", adapt, learning_rate, weight_decay, decoupled, mask)


def nadam(
    learning_rate: float | Schedule = 2e-3,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    momentum_decay: float = 4e-3,
    weight_decay: float = 0.0,
    decoupled: bool = False,
    mask: Mask | None = None,
) -> GradientTransformation:
    """Adam with Nesterov's momentum (Dozat, ICLR 2016 workshop). Defaults are those of torch.optim.NAdam.

    With `decoupled` weights decay as in `adamw`.
    """
    adapt = scale_by_nadam(b1, b2, eps, momentum_decay)
    return _chain_with_decay("nadam", adapt, learning_rate, weight_decay, decoupled, mask)


def adagrad(
    learning_rate: float | Schedule = 1e-2,
    lr_decay: float = 0.0,
    initial_accumulator_value: float = 0.0,
    eps: float = 1e-10,
    weight_decay: float = 0.0,
    mask: Mask | None = None,
) -> GradientTransformation:
    """Adagrad (Duchi et al., https://jmlr.org/papers/v12/duchi11a.html). Defaults are those of torch.optim.Adagrad.

    The rate of a step is divided by `1 + lr_decay * steps so far`.
    """
    check_not_negative("adagrad", "lr_decay", lr_decay)
    schedule = _make_schedule(learning_rate)

    def decayed(count: Tensor) -> Tensor:
        return schedule(count) / (1 + lr_decay * count.to(torch.float64))

    return chain(
        *_decay_gradients("adagrad", weight_decay, mask),
        scale_by_rss(initial_accumulator_value, eps),
        scale_by_learning_rate(learning_rate if is_zero(lr_decay) else decayed),
    )


def rmsprop(
    learning_rate: float | Schedule = 1e-2,
    decay: float = 0.99,
    eps: float = 1e-8,
    centered: bool = False,
    momentum: float | None = None,
    weight_decay: float = 0.0,
    mask: Mask | None = None,
) -> GradientTransformation:
    """RMSprop (Hinton), with `centered` after Graves (https://arxiv.org/abs/1308.0850).

    Defaults are those of torch.optim.RMSprop, whose name for `decay` is `alpha`; optax's decay is 0.9.
    """
    return chain(
        *_decay_gradients("rmsprop", weight_decay, mask),
        scale_by_stddev(decay, eps) if centered else scale_by_rms(decay, eps),
        _sum_gradients("rmsprop", momentum),
        scale_by_learning_rate(learning_rate),
    )


def lion(
    learning_rate: float | Schedule,
    b1: float = 0.9,
    b2: float = 0.99,
    weight_decay: float = 0.0,
    mask: Mask | None = None,
) -> GradientTransformation:
    """Lion (Chen et al., https://arxiv.org/abs/2302.06675), with the paper's decay rates.

    The paper advises a rate 3 to 10 times smaller than AdamW's, and a decay as many times larger.
    """
    return chain(
        scale_by_lion(b1, b2),
        add_decayed_weights(weight_decay, mask),
        scale_by_learning_rate(learning_rate),
    )


def lamb(
    learning_rate: float | Schedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-6,
    weight_decay: float = 0.01,
    mask: Mask | None = None,
    *,
    bounds: tuple[float, float] = (0.0, math.inf),
    corrects: Literal["moments", "rate", "nothing"] = "moments",
) -> GradientTransformation:
    """LAMB (You et al., https://arxiv.org/abs/1904.00962): AdamW, each leaf's step as long as its parameter times the
    rate. Defaults are those of the paper's BERT runs.

    The ratio of both lengths lies within `bounds`. The bias of Adam's means is corrected in the means, in the rate, or
    not at all. DeepSpeed's FusedLamb has the bounds 0.01 and 10, and corrects the rate.
    """
    check_choice("lamb", "corrects", corrects, ("moments", "rate", "nothing"))
    schedule = _make_schedule(learning_rate)

    def corrected(count: Tensor) -> Tensor:
        step = count.to(torch.float64) + 1
        return schedule(count) * torch.sqrt(1 - b2**step) / (1 - b1**step)

    return chain(
        scale_by_adam(b1, b2, eps, corrects=corrects == "moments"),
        add_decayed_weights(weight_decay, mask),
        scale_by_trust_ratio(bounds=bounds),
        scale_by_learning_rate(corrected if corrects == "rate" else learning_rate),
    )


def adafactor(
    learning_rate: float | Schedule = 1e-2,
    decay_rate: float = 0.8,
    eps: tuple[float | None, float] = (None, 1e-3),
    clipping_threshold: float = 1.0,
    weight_decay: float = 0.0,
    mask: Mask | None = None,
) -> GradientTransformation:
    """Adafactor (Shazeer and Stern, https://arxiv.org/abs/1804.04235). Defaults are those of torch.optim.Adafactor,
    whose `beta2_decay` is `-decay_rate`, and whose `d` is `clipping_threshold`.

    The rate of step t is the smaller of `learning_rate` and `1 / sqrt(t)`, times the root mean square of the leaf's
    parameter, which counts as at least `eps[1]`. `eps[0]` is that of `scale_by_factored_rms`.
    """
    if not (isinstance(eps, (tuple, list)) and len(eps) == 2):
        raise FzeroError("adafactor", f"eps is {eps!r}", "give two: that of gradients or None, and that of parameters")
    schedule = _make_schedule(learning_rate)

    def relative_rate(count: Tensor) -> Tensor:
        """What `schedule` is multiplied by, where it is larger than the rate of the step."""
        return (1 / (schedule(count) * (count.to(torch.float64) + 1).sqrt())).clamp(max=1.0)

    return chain(
        scale_by_factored_rms(decay_rate, eps[0]),
        clip_by_block_rms(clipping_threshold),
        scale_by_param_block_rms(eps[1]),
        scale_by_schedule(relative_rate),
        *_decay_gradients("adafactor", weight_decay, mask),
        scale_by_learning_rate(learning_rate),
    )


def _chain_with_decay(
    where: str,
    adapt: GradientTransformation,
    learning_rate: float | Schedule,
    weight_decay: float,
    decoupled: bool,
    mask: Mask | None,
) -> GradientTransformation:
    """The stage `adapt` and the rate; the decay stands behind `adapt` where it is decoupled, else in front."""
    decay = _decay_gradients(where, weight_decay, mask)
    stages = (adapt, *decay) if decoupled else (*decay, adapt)
    return chain(*stages, scale_by_learning_rate(learning_rate))


def _decay_gradients(where: str, weight_decay: float, mask: Mask | None) -> list[GradientTransformation]:
    """The stage that adds `weight_decay * params`; none for a decay of 0."""
    check_not_negative(where, "weight_decay", weight_decay)
    return [] if is_zero(weight_decay) else [add_decayed_weights(weight_decay, mask)]


def _sum_gradients(where: str, momentum: float | None, nesterov: bool = False) -> GradientTransformation:
    """The stage of momentum, which does nothing where it is None or 0."""
    if momentum is None or is_zero(momentum):
        return identity()
    check_decay(where, "momentum", momentum)
    return trace(momentum, nesterov)


def _make_schedule(learning_rate: float | Schedule) -> Schedule:
    """A schedule for a learning rate that may be a number."""
    return learning_rate if callable(learning_rate) else lambda count: learning_rate
