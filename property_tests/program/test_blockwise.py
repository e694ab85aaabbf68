"""Laws of codes and scales, for any values, blocks and ranges."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import fzero
from fzero.program.blockwise import Coding, decode, encode
from fzero.state.sources import TensorSource

ERRORS = {(8, "even"): 254, (4, "even"): 14, (4, "nf4"): 6.5}
finite = st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False)
values = st.lists(finite, min_size=1, max_size=70).map(lambda numbers: torch.tensor(numbers, dtype=torch.float32))


@st.composite
def codings(draw: st.DrawFn, *, numel: int, is_double: bool = False) -> Coding:
    bits, levels = draw(st.sampled_from(list(ERRORS)))
    return Coding((numel,), torch.float32, bits, 2 * draw(st.integers(1, 20)), levels, is_double)


@given(values, st.data())
def test_no_element_changes_by_more_than_is_said(x: Tensor, data: st.DataObject) -> None:
    coding = data.draw(codings(numel=x.numel()))
    change = (decode(*encode(x, coding), coding).double() - x.double()).abs()
    for block, changed in zip(x.double().split(coding.block), change.split(coding.block), strict=True):
        bound = block.abs().max() * (1 / ERRORS[coding.bits, coding.levels] + 1e-6) + 1e-40
        assert bool((changed <= bound).all())


@given(values, st.data())
def test_values_that_are_levels_stay(x: Tensor, data: st.DataObject) -> None:
    coding = data.draw(codings(numel=x.numel()))
    codes, scales = encode(x, coding)
    again, _ = encode(decode(codes, scales, coding), coding)
    assert torch.equal(again, codes)


@given(values, st.data())
def test_codes_and_scales_are_read_by_any_ranges(x: Tensor, data: st.DataObject) -> None:
    coding = data.draw(codings(numel=x.numel(), is_double=data.draw(st.booleans())))
    how: dict[str, Any] = {name: getattr(coding, name) for name in ("bits", "levels", "block", "double_quant")}
    how["where"] = ""
    if x.numel() < coding.block:
        return
    stored = fzero.quantize({"x": TensorSource(x)}, **how)["x"]
    for source, whole in zip((stored.codes, stored.scales), encode(x, coding), strict=True):
        flat = whole.reshape(-1)
        begin = data.draw(st.integers(0, flat.numel()))
        out = torch.empty(data.draw(st.integers(0, flat.numel() - begin)), dtype=torch.uint8)
        source.read(begin, out)
        assert torch.equal(out, flat[begin : begin + out.numel()])
