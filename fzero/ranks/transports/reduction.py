"""Reduction: what is taken over ranks, and how, where backends differ."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

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
"""How two ranks' values join; nan where one of them is."""


def is_extreme(x: Tensor, op: str) -> bool:
    """Whether this is a reduction in which backends treat nan differently."""
    return op in ("max", "min") and x.is_floating_point()


def extreme(x: Tensor, op: str, reduce_: Callable[[Tensor, str], None]) -> Tensor:
    """The elementwise "max" or "min", nan where a rank has one: nans travel beside."""
    sign = 1 if op == "max" else -1
    pair = torch.stack([x.nan_to_num(-sign * math.inf, math.inf, -math.inf), sign * x.isnan().to(x.dtype)])
    reduce_(pair, op)
    return torch.where(pair[1] != 0, math.nan, pair[0])


def divide_(total: Tensor, world: int) -> Tensor:
    """A sum over so many ranks to their mean, in place: by a product where that is exact."""
    return total.mul_(1 / world) if world & (world - 1) == 0 else total.div_(world)
