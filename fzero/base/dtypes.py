"""Dtypes: in which dtype sums are accumulated, and the words for dtypes."""

from __future__ import annotations

from typing import Any

import torch

_WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.complex32: torch.complex64}


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which torch's kernels add up elements of `dtype`, before they round the sum once: float32 for
    float16 and bfloat16, and `dtype` itself for most."""
    return _WIDER.get(dtype, dtype)


def name_dtype(dtype: torch.dtype) -> str:
    """The name of a dtype without its module: `"float32"`."""
    return str(dtype).removeprefix("torch.")


def describe_form(x: Any) -> str:
    """The dtype and shape of a value that has both: `"float32[2, 3]"`."""
    return f"{name_dtype(x.dtype)}{list(x.shape)}"
