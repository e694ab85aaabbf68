"""Laws of block-wise int8: what rounding takes, what it leaves, and how many bytes travel."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fzero.variants import fp8_gather
from fzero.variants.quantization import BLOCK, count_bytes, dequantize, quantize

ROUNDING = 1e-6
"""How far float32 moves a code or a scale, relative to a block's largest element."""


@st.composite
def random_rows(draw: st.DrawFn) -> Tensor:
    """[R, S] of any size, with a magnitude of its own for each row, and some blocks of zeros."""
    count, size = draw(st.integers(1, 4)), draw(st.integers(1, 3 * BLOCK + 1))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    rows = torch.randn(count, size, generator=generator)
    rows *= 10.0 ** torch.randint(-12, 12, (count, 1), generator=generator)
    rows[:, : draw(st.sampled_from([0, BLOCK, size]))] = 0
    return rows


def amax(rows: Tensor) -> Tensor:
    """[R, S] the largest magnitude in each element's block."""
    blocks = [block.abs().amax(1, keepdim=True).expand_as(block) for block in rows.split(BLOCK, 1)]
    return torch.cat(blocks, 1)


@given(random_rows())
def test_no_element_is_off_by_more_than_half_a_code(rows: Tensor) -> None:
    back = dequantize(quantize(rows), rows.shape[1])
    assert back.shape == rows.shape and back.dtype == torch.float32
    assert ((back - rows).abs() <= amax(rows) * (1 / 254 + ROUNDING)).all()


@given(random_rows())
def test_zeros_and_the_largest_element_of_a_block_stay(rows: Tensor) -> None:
    back, largest = dequantize(quantize(rows), rows.shape[1]), amax(rows)
    assert (back[rows == 0] == 0).all()
    is_largest = rows.abs() == largest
    torch.testing.assert_close(back[is_largest], rows[is_largest], rtol=ROUNDING, atol=0)


@given(random_rows())
def test_a_row_takes_a_byte_an_element_and_a_scale_a_block(rows: Tensor) -> None:
    packed, (count, size) = quantize(rows), rows.shape
    blocks = len(range(0, size, BLOCK))
    assert packed.dtype == torch.uint8 and packed.shape == (count, size + 4 * blocks)
    assert packed.shape[1] == count_bytes(size)


@given(random_rows())
def test_what_was_rounded_is_not_rounded_further(rows: Tensor) -> None:
    back = dequantize(quantize(rows), rows.shape[1])
    torch.testing.assert_close(dequantize(quantize(back), rows.shape[1]), back, rtol=ROUNDING, atol=0)


@given(random_rows())
def test_rows_do_not_mix(rows: Tensor) -> None:
    alone = [quantize(row[None]) for row in rows]
    assert torch.equal(quantize(rows), torch.cat(alone))


@given(random_rows())
def test_no_element_in_8_bits_of_floating_point_is_off_by_more_than_a_sixteenth_of_itself(rows: Tensor) -> None:
    packed = fp8_gather.compress(rows)
    assert packed.shape == (len(rows), count_bytes(rows.shape[1]))
    back = fp8_gather.decompress(packed, rows.shape[1])
    bound = torch.maximum(rows.abs() / 16, amax(rows) * 2.0**-18)
    assert ((back - rows).abs() <= bound + amax(rows) * ROUNDING).all() and (back[rows == 0] == 0).all()
