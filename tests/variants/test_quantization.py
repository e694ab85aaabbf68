"""Block-wise int8 by hand, and at the edges. The laws are property tests."""

from __future__ import annotations

import pytest
import torch

from fzero.variants.quantization import count_bytes, dequantize, quantize


@pytest.mark.parametrize(("size", "nbytes"), [(0, 0), (1, 5), (255, 259), (256, 260), (257, 265), (512, 520)])
def test_bytes_by_hand(size: int, nbytes: int) -> None:
    assert count_bytes(size) == nbytes


def test_a_block_by_hand() -> None:
    rows = torch.tensor([[0.0, 1.0, -2.0, 254.0]])  # a code is worth 2
    assert quantize(rows)[0, :4].view(torch.int8).tolist() == [0, 0, -1, 127]  # 0.5 rounds to the even code
    assert dequantize(quantize(rows), 4).tolist() == [[0.0, 0.0, -2.0, 254.0]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_floating_dtypes_are_rounded_from_float32(dtype: torch.dtype) -> None:
    rows = torch.linspace(-3, 3, 300).to(dtype)[None]
    assert torch.equal(quantize(rows), quantize(rows.float()))


def test_slices_without_elements() -> None:
    assert dequantize(quantize(torch.empty(4, 0)), 0).shape == (4, 0)


@pytest.mark.parametrize("size", [1, 3, 255, 257])
def test_one_row_of_a_size_that_no_scale_is_aligned_to(size: int) -> None:
    row = torch.full((1, size), 2.0)
    assert torch.equal(dequantize(quantize(row), size), row)
