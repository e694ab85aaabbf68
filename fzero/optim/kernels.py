"""Adam on lists of tensors.

* `scale_by_adam` is an operation of our own, `fzero::scale_by_adam`: one node of a traced program. It is pure.
* `fused_adamw_` calls torch's fused AdamW kernel, which writes in place.

A program does not call torch's kernel itself, because of what the kernel's schema says about gradients. The schema of
`aten._fused_adamw_` marks the gradients as written (`Tensor(b!)[] grads`): with `grad_scale` the kernel overwrites them
with the unscaled ones. So passes would take gradients, which other nodes may read, for overwritten. The functional form
`aten._fused_adamw` returns new gradients as well (`Tensor[] grads_out`), one copy of all gradients too many. fzero has
no `grad_scale`: the kernel only reads its gradients, and `ops.adamw` and `ops.adamw_` say so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from fzero.base import torch_private
from fzero.base.errors import FzeroError

Lists = tuple[list[Tensor], list[Tensor], list[Tensor]]

_LIBRARY = torch.library.Library("fzero", "FRAGMENT")


def _scale_by_adam(
    updates: list[Tensor], mu: list[Tensor], nu: list[Tensor], count: Tensor, b1: Any, b2: Any, eps: Any
) -> Lists:
    """The kernel. Returns new tensors and writes into no argument.

    Arithmetic is in float32 or wider. `mu` and `nu` keep their dtypes.
    """
    if not updates:
        return [], [], []
    dtypes = _update_dtypes(updates, mu)
    wide = [torch.promote_types(dtype, torch.float32) for dtype in dtypes]
    grads = _cast_each(updates, wide)
    means: list[Tensor] | tuple[Tensor, ...] = _cast_each(mu, wide)
    squares = torch._foreach_mul(_cast_each(nu, wide), b2)
    if isinstance(b1, Tensor):  # the scalars below would be read on the host
        means = torch._foreach_add(torch._foreach_mul(means, b1), torch._foreach_mul(grads, 1 - b1))
        torch._foreach_add_(squares, torch._foreach_mul(torch._foreach_mul(grads, grads), 1 - b2))
    else:
        means = torch._foreach_lerp(means, grads, 1 - b1)
        torch._foreach_addcmul_(squares, grads, grads, 1 - b2)
    scaled = torch._foreach_div(means, bias_correction(b1, count, wide))
    roots = torch._foreach_div(squares, bias_correction(b2, count, wide))
    torch._foreach_sqrt_(roots)
    torch._foreach_add_(roots, eps)
    torch._foreach_div_(scaled, roots)
    return (
        _cast_each(scaled, dtypes),
        _cast_each(means, [m.dtype for m in mu]),
        _cast_each(squares, [n.dtype for n in nu]),
    )


def _scale_by_adam_fake(updates: list[Tensor], mu: list[Tensor], nu: list[Tensor], *_: Any) -> Lists:
    scaled = [torch.empty_like(m, dtype=dtype) for m, dtype in zip(mu, _update_dtypes(updates, mu))]
    return scaled, [torch.empty_like(m) for m in mu], [torch.empty_like(n) for n in nu]


def _refuse_backward(context: Any, *cotangents: Any) -> NoReturn:
    raise FzeroError(
        "scale_by_adam", "has no derivative", "update outside the differentiated function, or use sgd, which has one"
    )


for _overload, _type in (("", "float"), (".tensors", "Tensor")):
    _LIBRARY.define(
        f"scale_by_adam{_overload}(Tensor[] updates, Tensor[] mu, Tensor[] nu, Tensor count, {_type} b1, {_type} b2,"
        f" {_type} eps) -> (Tensor[], Tensor[], Tensor[])",
        tags=(torch.Tag.pt2_compliant_tag,),
    )
    _LIBRARY.impl(f"scale_by_adam{_overload}", _scale_by_adam, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fzero::scale_by_adam{_overload}", _scale_by_adam_fake, lib=_LIBRARY)
    torch.library.register_autograd(f"fzero::scale_by_adam{_overload}", _refuse_backward, lib=_LIBRARY)

scale_by_adam = torch.ops.fzero.scale_by_adam
"""`scale_by_adam(updates, mu, nu, count, b1, b2, eps) -> (updates, mu, nu)`; `count` is 1 at the first step.

The last three are numbers, or all of them 0-d tensors, as behind `inject_hyperparams`. `fuse` finds numbers only.
This is the overload packet, because the rules of `Sharded` know a function by its name, and the name of the packet's
`.default` overload is "scale_by_adam.default".
"""


@torch.no_grad()
def fused_adamw_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    mu: Sequence[Tensor],
    nu: Sequence[Tensor],
    count: Tensor,
    learning_rate: float | Tensor,
    b1: float,
    b2: float,
    eps: float,
    weight_decay: float,
    *,
    where: Tensor | None = None,
) -> None:
    """Update `params`, `mu` and `nu` in place by one step of AdamW, in one call of `torch._fused_adamw_`.

    Up to rounding, equals `apply_updates` of `scale_by_adam`, `add_decayed_weights` and `scale_by_learning_rate`.

    Parameters and state have one dtype; gradients may have another, and are not written. `count` is 0-d, and 1 at the
    first step. `learning_rate` is a number, or a 0-d tensor, which is cast to float32. A tensor that is not contiguous
    costs a copy in and a copy out. With `where`, a 0-d bool, nothing changes unless it is true.
    """
    if not params:
        return
    # torch's kernel walks memory and ignores strides (on CPU without a check): give it flat, contiguous tensors.
    targets = [*params, *mu, *nu]
    flat = [tensor.contiguous().view(-1) for tensor in targets]
    size = len(params)
    rate: Any = learning_rate.to(torch.float32) if isinstance(learning_rate, Tensor) else learning_rate
    torch_private.fused_adamw_(
        flat[:size],
        [grad.to(param.dtype).contiguous().view(-1) for grad, param in zip(grads, params)],
        flat[size : 2 * size],
        flat[2 * size :],
        [],
        [count.to(params[0].device, torch.float32)] * size,
        lr=rate,
        beta1=b1,
        beta2=b2,
        eps=eps,
        weight_decay=weight_decay,
        amsgrad=False,
        maximize=False,
        found_inf=None if where is None else (~where).to(torch.float32),
    )
    for tensor, result in zip(targets, flat):
        if not tensor.is_contiguous():
            tensor.copy_(result.view(tensor.shape))


def _update_dtypes(updates: list[Tensor], mu: list[Tensor]) -> list[torch.dtype]:
    return [torch.promote_types(update.dtype, mean.dtype) for update, mean in zip(updates, mu)]


def _cast_each(tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    return [tensor.to(dtype) for tensor, dtype in zip(tensors, dtypes)]


def bias_correction(decay: float | Tensor, count: Tensor, dtypes: Sequence[torch.dtype]) -> Tensor:
    """`1 - decay ** count`, 0-d: the factor by which a running mean that starts at 0 is too small."""
    # In float32 the rounding of 0.999, 3e-8, would be 3e-5 of the difference 1e-3.
    widest = torch.float64 if torch.float64 in dtypes else torch.float32
    return (1 - decay ** count.to(torch.float64)).to(widest)
