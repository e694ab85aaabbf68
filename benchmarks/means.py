"""Means over ranks, for ranks of any library: torch alone."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor


def mean(loss: Tensor) -> float:
    """The mean of a loss over ranks."""
    total = loss.detach().double().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()
