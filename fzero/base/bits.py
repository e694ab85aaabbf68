"""Bits: tensors compared as they lie in memory, where nan equals itself and 0 is not -0."""

from __future__ import annotations

import torch
from torch import Tensor


def copy_bytes(x: Tensor) -> Tensor:
    """A copy of a tensor's bytes, [nbytes] uint8."""
    return x.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


def has_equal_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same shape, dtype and bits."""
    return (a.shape, a.dtype) == (b.shape, b.dtype) and torch.equal(copy_bytes(a), copy_bytes(b))


def format_values(x: Tensor) -> str:
    """The first four elements of a tensor, as a text."""
    values = (f"{value:.6g}" for value in x.reshape(-1)[:4].tolist())
    return f"[{', '.join(values)}{', ...' if x.numel() > 4 else ''}]"
