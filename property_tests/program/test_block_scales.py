"""Laws of scales that are codes, for any scales and ranges."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fzero.program.block_scales import GROUP, read_scales, shape_scales, store_scales

finite = st.floats(0, 2.0**100, width=32, allow_subnormal=False)
few = st.lists(finite, min_size=1, max_size=9).map(lambda numbers: torch.tensor(numbers, dtype=torch.float32))


@st.composite
def many_scales(draw: st.DrawFn) -> Tensor:
    """Of up to three groups, with some values that repeat."""
    scales = draw(few)
    return scales.repeat(draw(st.integers(1, 3 * GROUP // len(scales))))


@given(many_scales(), st.data())
def test_a_scale_changes_by_no_more_than_is_said(scales: Tensor, data: st.DataObject) -> None:
    stored = store_scales(scales, is_double=True)
    assert stored.shape == shape_scales(len(scales), True)
    read = read_scales(stored, len(scales), range(len(scales)), is_double=True)
    mean = scales.double().mean()
    for group, got in zip(scales.double().split(GROUP), read.double().split(GROUP), strict=True):
        bound = 0.0071 * (group - mean).abs().max() + 1e-6 * mean + 1e-40
        assert bool(((got - group).abs() <= bound).all())


@given(many_scales(), st.booleans(), st.data())
def test_scales_are_read_by_any_ranges(scales: Tensor, is_double: bool, data: st.DataObject) -> None:
    count = len(scales)
    stored = store_scales(scales, is_double)
    begin = data.draw(st.integers(0, count - 1))
    wanted = range(begin, data.draw(st.integers(begin + 1, count)))
    whole = read_scales(stored, count, range(count), is_double)
    assert torch.equal(read_scales(stored, count, wanted, is_double), whole[begin : wanted.stop])
    assert is_double or torch.equal(whole, scales)
