"""Tangents: whether forward mode differentiates by a value."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd.forward_ad import unpack_dual


def has_tangent(x: Any) -> bool:
    """Whether a tensor, or one among the items of lists and tuples, has a tangent in the running transform."""
    if isinstance(x, Tensor):
        return unpack_dual(x).tangent is not None
    return isinstance(x, (list, tuple)) and any(map(has_tangent, x))
