"""Dtypes: in which dtype sums are accumulated."""

from __future__ import annotations

import torch

_WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.complex32: torch.complex64}


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which torch's kernels add up elements of `dtype`, before they round the sum once: float32 for
    float16 and bfloat16, and `dtype` itself for most."""
    return _WIDER.get(dtype, dtype)
