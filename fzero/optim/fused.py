"""torch's fused kernels: a step of an optimizer for many leaves in one call, in place.

A program does not call these kernels itself, because of what their schemas say about gradients. The schema of
`aten._fused_adamw_` marks the gradients as written (`Tensor(b!)[] grads`): with `grad_scale` the kernel overwrites them
with the unscaled ones. So passes would take gradients, which other nodes may read, for overwritten. The functional form
`aten._fused_adamw` returns new gradients as well (`Tensor[] grads_out`), one copy of all gradients too many. fzero has
no `grad_scale`: the kernels only read their gradients, and the operations of `fzero.program.ops.updates` say so.

Of all functions here: states have the parameters' dtype or a narrower one, to which new states are rounded. Gradients
may have any dtype, and are not written. A learning rate is a number or a 0-d tensor. A tensor that is not contiguous
costs a copy in and a copy out. With `where`, a 0-d bool, nothing changes unless it is true.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.base import torch_private
from fzero.optim.kernels import scale_by_adam, scale_by_rss

Lists = Sequence[Tensor]
CHUNK = 2**20
"""The elements that are updated at once where states are narrower than parameters: states are widened in scratch."""


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
    *,
    where: Tensor | None = None,
) -> None:
    """Update `params`, `mu` and `nu` in place by one step of AdamW. `count` is 0-d, and 1 at the first step.

    Up to rounding, equals `apply_updates` of `scale_by_adam`, `add_decayed_weights` and `scale_by_learning_rate`.
    """
    counts = [count.to(torch.float32)] * len(params)
    options: dict[str, Any] = {"beta1": b1, "beta2": b2, "eps": eps, "weight_decay": weight_decay, "amsgrad": False}
    _update(torch_private.fused_adamw_, params, grads, (mu, nu), ([], counts), learning_rate, where, options)


def make_update(numel: int) -> tuple[Callable[[], None], int]:
    """An update of `numel` elements on the host by AdamW's kernel, and the bytes that it reads and writes."""
    params, grads, mu, nu = ([torch.zeros(numel, device="cpu")] for _ in range(4))
    count = torch.ones((), dtype=torch.int32, device="cpu")

    def update() -> None:
        fused_adamw_(params, grads, mu, nu, count, 1e-3, 0.9, 0.95, 1e-8, 0.1)

    return update, 7 * params[0].nbytes  # reads all four, writes all but the gradients


def fused_sgd_(
    params: Lists, grads: Lists, learning_rate: float | Tensor, weight_decay: float, *, where: Tensor | None = None
) -> None:
    """Update `params` in place by `-learning_rate * (grads + weight_decay * params)`."""
    options = _SGD | {"momentum": 0.0, "nesterov": False, "weight_decay": weight_decay}
    _update(torch_private.fused_sgd_, params, grads, (), ([],), learning_rate, where, options)


def fused_momentum_(
    params: Lists,
    grads: Lists,
    traces: Lists,
    learning_rate: float | Tensor,
    momentum: float,
    nesterov: bool,
    weight_decay: float,
    *,
    where: Tensor | None = None,
) -> None:
    """Update `params` and `traces` in place by one step of SGD with momentum.

    Up to rounding, equals `apply_updates` of `add_decayed_weights`, `trace` and `scale_by_learning_rate`.
    """
    options = _SGD | {"momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay}
    _update(torch_private.fused_sgd_, params, grads, (traces,), (), learning_rate, where, options)


_SGD: dict[str, Any] = {"dampening": 0.0, "is_first_step": False}


def fused_adagrad_(
    params: Lists,
    grads: Lists,
    sums: Lists,
    learning_rate: float | Tensor,
    eps: float,
    weight_decay: float,
    *,
    where: Tensor | None = None,
) -> None:
    """Update `params` and `sums`, which lie on a CPU, in place by one step of Adagrad.

    Up to rounding, equals `apply_updates` of `add_decayed_weights`, `scale_by_rss` and `scale_by_learning_rate`.
    """
    counts = [torch.ones(())] * len(params)  # for a decay of the rate, of which there is none
    options = {"lr_decay": 0.0, "eps": eps, "weight_decay": weight_decay}
    _update(torch_private.fused_adagrad_, params, grads, (sums,), (counts,), float(learning_rate), where, options)


@torch.no_grad()
def _update(
    kernel: Callable[..., None],
    params: Lists,
    grads: Lists,
    states: Sequence[Lists],
    others: Sequence[Lists],
    learning_rate: float | Tensor,
    where: Tensor | None,
    options: dict[str, Any],
) -> None:
    """Call `kernel(params, grads, *states, *others)`, which writes into params and states."""
    if not params:
        return
    if isinstance(learning_rate, Tensor) and learning_rate.device.type != "cpu":
        learning_rate = learning_rate.to(torch.float32)  # which kernels on a GPU read
    # torch's kernels walk memory and ignore strides (on CPU without a check): give them flat, contiguous tensors.
    columns = [[x.contiguous().view(-1) for x in column] for column in (params, *states)]
    flat_grads = [grad.contiguous().view(-1) for grad in grads]
    found_inf = None if where is None else (~where).to(torch.float32)
    for leaves, *parts, leaf_grads, more in _list_calls([*columns, flat_grads], others):
        wide = [_cast(part, leaves) for part in parts]
        kernel(
            leaves,
            _cast(leaf_grads, leaves),
            *wide,
            *more,
            lr=learning_rate,
            maximize=False,
            found_inf=found_inf,
            **options,
        )
        _copy(parts, wide)
    _copy((params, *states), columns)


def _list_calls(columns: Sequence[Lists], others: Sequence[Lists]) -> Iterator[Any]:
    """`(*columns, others)` of each call of a kernel, where `columns` are params, states and gradients, flat: one call
    for all leaves whose states have the parameter's dtype, and one for each piece of another leaf."""
    rows = list(zip(*columns))
    narrow = [any(x.dtype != param.dtype for x in states) for param, *states, _ in rows]
    if not all(narrow):
        alike = [i for i, is_narrow in enumerate(narrow) if not is_narrow]
        yield *([column[i] for i in alike] for column in columns), [[x[i] for i in alike] if x else x for x in others]
    for i, row in enumerate(rows):
        for piece in zip(*(x.split(CHUNK) for x in row)) if narrow[i] else ():
            yield *([x] for x in piece), [[x[i]] if x else x for x in others]


def _cast(tensors: Lists, likes: Lists) -> list[Tensor]:
    return [x.to(like.dtype) for x, like in zip(tensors, likes)]


def _copy(targets: Sequence[Lists], results: Sequence[Lists]) -> None:
    """Copy each result into its target, unless it lies there."""
    for column, news in zip(targets, results):
        for target, new in zip(column, news):
            if target.data_ptr() != new.data_ptr():
                target.copy_(new.view(target.shape))


class Kernel(NamedTuple):
    """What passes know of a kernel, `run(params, grads, *states, *numbers)`, which writes into params and states."""

    name: str
    run: Callable[..., None]
    states: int  # the lists of states
    stage: Any = None  # the stage of `fzero.optim.kernels` whose result the kernel computes, and subtracts
    counts: int = 0  # the arguments of the stage between its states and its options
    decays_gradient: bool = False  # whether the stage takes the decayed gradient, or else its result is decayed
    is_for_cpu: bool = False  # whether the kernel is for CPUs alone
    casts: bool = False  # whether the gradient may have any dtype, and states a narrower one
    is_wrong_if_narrow: bool = False
    """Whether it returns wrong numbers on CPUs in float16 and bfloat16, for 16 elements or more (torch 2.13)."""


KERNELS = {
    kernel.name: kernel
    for kernel in (
        Kernel("adamw", fused_adamw_, 2, stage=scale_by_adam, counts=1, casts=True),
        Kernel("adagrad", fused_adagrad_, 1, stage=scale_by_rss, decays_gradient=True, is_for_cpu=True),
        Kernel("momentum", fused_momentum_, 1, is_wrong_if_narrow=True),
        Kernel("sgd", fused_sgd_, 0, is_wrong_if_narrow=True),
    )
}
