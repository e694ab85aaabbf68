"""The dtype of sums is the one in which torch's kernels add up."""

from __future__ import annotations

import pytest
import torch

from fzero.base.dtypes import accumulator


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
def test_torch_adds_up_in_the_accumulator_and_rounds_once(dtype: torch.dtype) -> None:
    x = torch.full((1000,), 1.001).to(dtype)
    wide = x.to(accumulator(dtype))
    assert torch.equal(x.sum(), wide.sum().to(dtype))
    assert torch.equal(x.mean(), wide.mean().to(dtype))
    assert torch.equal(x.norm(), wide.norm().to(x.norm().dtype))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.bool, torch.float32, torch.complex128])
def test_other_dtypes_stay(dtype: torch.dtype) -> None:
    assert accumulator(dtype) == dtype
