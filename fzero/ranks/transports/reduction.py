"""Reduction: the reductions over ranks, and what fzero does itself because backends differ."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from fzero.base.dtypes import accumulator

OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}


JOINS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}
"""How the values of two ranks join. The result is nan where one value is nan."""

PIECE = 512 << 10
"""Bytes that a rank sums at a time, so that they stay in a core's cache."""


def reduce(values: Sequence[Tensor], op: str) -> Tensor:
    """The values of all ranks to one, in rank order. float16 and bfloat16 are added up in float32 and rounded once."""
    first, *others = values
    total = functools.reduce(JOINS[op], others, first.to(accumulator(first.dtype)))
    total = total / len(values) if op == "avg" else total
    return total.to(first.dtype)


def average_(first: Tensor, others: Iterable[Tensor], world: int) -> None:
    """Turn `first`, the value of one rank, into the mean of the values of `world` ranks, in place.

    float16 and bfloat16 are added up in float32 and rounded once: four gradients of 20000 overflow float16, and a
    bfloat16 sum of 512 ones stops at 256.
    """
    total = first.to(accumulator(first.dtype))  # `first` itself, unless it is narrow
    for other in others:
        total.add_(other)
    first.copy_(divide_(total, world))


def _is_extreme(dtype: torch.dtype, op: str) -> bool:
    """Whether backends treat nan differently in this reduction: a max or min of floating-point numbers."""
    return op in ("max", "min") and dtype.is_floating_point


def pack_operand(x: Tensor, op: str) -> Tensor:
    """A new tensor that a backend may reduce over ranks in place of `x`. float16 and bfloat16 travel as float32, and
    nans of a "max" or "min" as a second row of numbers."""
    if not _is_extreme(x.dtype, op):
        return x.to(accumulator(x.dtype), memory_format=torch.contiguous_format, copy=True)
    sign = 1 if op == "max" else -1
    return torch.stack([x.nan_to_num(-sign * math.inf, math.inf, -math.inf), sign * x.isnan().to(x.dtype)])


def unpack_result(total: Tensor, op: str, dtype: torch.dtype) -> Tensor:
    """The reduction of tensors of this dtype, from that of what `pack_operand` makes of them. A "max" or "min" is nan
    where any rank has nan."""
    return torch.where(total[1] != 0, math.nan, total[0]) if _is_extreme(dtype, op) else total.to(dtype)


def divide_(total: Tensor, world: int) -> Tensor:
    """Turn a sum over `world` ranks into the mean, in place."""
    # for a power of two the product with 1 / world is exact, and cheaper than a division
    return total.mul_(1 / world) if world & (world - 1) == 0 else total.div_(world)
