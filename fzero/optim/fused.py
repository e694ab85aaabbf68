"""torch's fused kernels: a step of an optimizer for many leaves in one call, in place.

A program does not call these kernels itself, because of what their schemas say about gradients. The schema of
`aten._fused_adamw_` marks the gradients as written (`Tensor(b!)[] grads`): with `grad_scale` the kernel overwrites them
with the unscaled ones. So passes would take gradients, which other nodes may read, for overwritten. The functional form
`aten._fused_adamw` returns new gradients as well (`Tensor[] grads_out`), one copy of all gradients too many. fzero has
no `grad_scale`: the kernels only read their gradients, and the operations of `fzero.program.ops.updates` say so.

Of all functions here: parameters and states have one dtype. Gradients may have another, and are not written. A learning
rate is a number or a 0-d tensor. A tensor that is not contiguous costs a copy in and a copy out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fzero.base import torch_private

Lists = Sequence[Tensor]


def fused_adamw_(
    params: Lists,
    grads: Lists,
    mu: Lists,
    nu: Lists,
    count: Tensor,
    learning_rate: float | Tensor,
    b1: float,
    b2: float,
    eps: float,
    weight_decay: float,
) -> None:
    """Update `params`, `mu` and `nu` in place by one step of AdamW. `count` is 0-d, and 1 at the first step.

    Up to rounding, equals `apply_updates` of `scale_by_adam`, `add_decayed_weights` and `scale_by_learning_rate`.
    """
    if not params:
        return
    counts = [count.to(params[0].device, torch.float32)] * len(params)
    _update(
        lambda params, grads, mu, nu: torch_private.fused_adamw_(
            params,
            grads,
            mu,
            nu,
            [],
            counts,
            lr=_rate(learning_rate),
            beta1=b1,
            beta2=b2,
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=False,
            maximize=False,
        ),
        params,
        grads,
        mu,
        nu,
    )


def fused_sgd_(params: Lists, grads: Lists, learning_rate: float | Tensor, weight_decay: float) -> None:
    """Update `params` in place by `-learning_rate * (grads + weight_decay * params)`."""
    _descend(params, grads, (), learning_rate, 0.0, False, weight_decay)


def fused_momentum_(
    params: Lists,
    grads: Lists,
    traces: Lists,
    learning_rate: float | Tensor,
    momentum: float,
    nesterov: bool,
    weight_decay: float,
) -> None:
    """Update `params` and `traces` in place by one step of SGD with momentum.

    Up to rounding, equals `apply_updates` of `add_decayed_weights`, `trace` and `scale_by_learning_rate`.
    """
    _descend(params, grads, (traces,), learning_rate, momentum, nesterov, weight_decay)


def _descend(
    params: Lists,
    grads: Lists,
    states: Sequence[Lists],
    learning_rate: float | Tensor,
    momentum: float,
    nesterov: bool,
    weight_decay: float,
) -> None:
    _update(
        lambda params, grads, traces=(): torch_private.fused_sgd_(
            params,
            grads,
            list(traces),
            lr=_rate(learning_rate),
            momentum=momentum,
            nesterov=nesterov,
            weight_decay=weight_decay,
            dampening=0.0,
            maximize=False,
            is_first_step=False,
        ),
        params,
        grads,
        *states,
    )


def fused_adagrad_(
    params: Lists, grads: Lists, sums: Lists, learning_rate: float | Tensor, eps: float, weight_decay: float
) -> None:
    """Update `params` and `sums` on the CPU in place by one step of Adagrad.

    Up to rounding, equals `apply_updates` of `add_decayed_weights`, `scale_by_rss` and `scale_by_learning_rate`.
    """
    counts = [
        torch.ones((), device=param.device) for param in params
    ]  # for a decay of the rate, of which there is none
    _update(
        lambda params, grads, sums: torch_private.fused_adagrad_(
            params,
            grads,
            sums,
            counts,
            lr=float(learning_rate),
            lr_decay=0.0,
            weight_decay=weight_decay,
            eps=eps,
            maximize=False,
        ),
        params,
        grads,
        sums,
    )


@torch.no_grad()
def _update(kernel: Callable[..., None], params: Lists, grads: Lists, *states: Lists) -> None:
    """Call `kernel(params, grads, *states)`, which writes into all but the gradients."""
    if not params:
        return
    # torch's kernels walk memory and ignore strides (on CPU without a check): give them flat, contiguous tensors.
    columns = [[x.contiguous().view(-1) for x in column] for column in (params, *states)]
    flat_grads = [grad.to(param.dtype).contiguous().view(-1) for grad, param in zip(grads, params)]
    kernel(columns[0], flat_grads, *columns[1:])
    for column, results in zip((params, *states), columns):
        for target, result in zip(column, results):
            if not target.is_contiguous():
                target.copy_(result.view(target.shape))


def _rate(learning_rate: float | Tensor) -> Any:
    is_on_gpu = isinstance(learning_rate, Tensor) and learning_rate.device.type != "cpu"
    return learning_rate.to(torch.float32) if is_on_gpu else learning_rate  # kernels on a GPU read a float32
