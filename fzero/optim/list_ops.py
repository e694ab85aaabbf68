"""List operations that torch lacks, named as torch names its own, so that all that knows those knows these.

    _foreach_masked_fill(tensors, mask, value)    each tensor, filled with a number where the 0-d `mask` is true
    _foreach_masked_fill(tensors, mask, values)   each tensor where `mask` is false, the tensor of `values` else

`_foreach_masked_fill_` writes into `tensors`. A skipped step is made of these: a choice leaves out what was computed
for nothing, maybe from infinities. A factor of 0 would not, because 0 * inf is nan.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fzero.base import torch_private

Function = Callable[..., Any]
_LIBRARY = torch.library.Library("fzero", "FRAGMENT")


def _define(overload: str, value: str, function: Function, in_place: Function) -> None:
    """Define an overload of `_foreach_masked_fill` by its function, and by its function in place."""
    name, arguments = f"_foreach_masked_fill.{overload}", f"Tensor mask, {value} value"
    _LIBRARY.define(f"{name}(Tensor[] self, {arguments}) -> Tensor[]", tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fzero::{name}", lambda self, *_: [torch.empty_like(x) for x in self], lib=_LIBRARY)
    target = getattr(torch.ops.fzero._foreach_masked_fill, overload)
    _LIBRARY.impl(name, functools.partial(_differentiate, function, target), "Autograd")
    name = f"_foreach_masked_fill_.{overload}"
    _LIBRARY.define(f"{name}(Tensor(a!)[] self, {arguments}) -> ()", tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, in_place, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fzero::{name}", lambda self, *_: None, lib=_LIBRARY)


def _differentiate(function: Function, target: Function, tensors: list[Tensor], mask: Tensor, value: Any) -> Any:
    """The autograd kernel: operations on each tensor, which have derivatives, where something is differentiated."""
    given = [*tensors, *(value if isinstance(value, (list, tuple)) else ())]
    is_differentiated = torch.is_grad_enabled() and any(x.requires_grad for x in given)
    if is_differentiated or torch_private.in_forward_mode():
        return function(tensors, mask, value)
    with torch_private.below_autograd():
        return target(tensors, mask, value)


def _may_be_true(mask: Tensor) -> bool:
    """Whether a mask is true, as far as that is known without waiting for a GPU."""
    return mask.device.type != "cpu" or bool(mask)


def _fill(tensors: list[Tensor], mask: Tensor, value: float) -> list[Tensor]:
    return [x.masked_fill(mask, value) for x in tensors]


def _fill_(tensors: list[Tensor], mask: Tensor, value: float) -> None:
    for x in tensors if _may_be_true(mask) else ():
        x.masked_fill_(mask, value)


def _choose(tensors: list[Tensor], mask: Tensor, values: list[Tensor]) -> list[Tensor]:
    return [torch.where(mask, value, x) for x, value in zip(tensors, values)]


def _choose_(tensors: list[Tensor], mask: Tensor, values: list[Tensor]) -> None:
    for x, value in zip(tensors, values) if _may_be_true(mask) else ():
        torch.where(mask, value, x, out=x)


_define("Scalar", "Scalar", _fill, _fill_)
_define("List", "Tensor[]", _choose, _choose_)

masked_fill = torch.ops.fzero._foreach_masked_fill
"""`_foreach_masked_fill`, of lists of plain tensors or of `Sharded`."""
masked_fill_ = torch.ops.fzero._foreach_masked_fill_
"""The same in place. On a CPU it looks at the mask first, and does nothing where that is false."""
