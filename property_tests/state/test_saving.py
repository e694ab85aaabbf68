"""Saving: whatever the layout and the mesh, ranks together write each byte of a file once, with its right value."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from stand_ins import live_stand_ins

from fzero.layout.layout import Layout, replicated_layout
from fzero.state.fill import copy_slices
from fzero.state.safetensors.header import plan_header
from fzero.state.safetensors.saving import plan_pieces
from fzero.testing.strategies import layouts
from fzero.values.sharded import Sharded
from property_tests.strategies import dtypes


@given(layouts(), dtypes(), st.booleans())
def test_ranks_together_write_each_element_once(layout: Layout, dtype: torch.dtype, extra: bool) -> None:
    wholes = [torch.arange(leaf.numel).to(dtype).view(leaf.shape) for leaf in layout.leaves]
    found = torch.zeros(sum(whole.numel() for whole in wholes) + extra, dtype=dtype)
    counts = torch.zeros_like(found, dtype=torch.int64)
    for on in live_stand_ins(layout.mesh):
        slices = copy_slices(dict(enumerate(wholes)), layout, on.rank)
        values = {leaf.path: Sharded(slices[i], layout, i, on) for i, leaf in enumerate(layout.leaves)}
        if extra:
            values["step"] = Sharded(torch.tensor(7).to(dtype), replicated_layout((), layout.mesh), 0, on)
        for offset, source, *_ in plan_pieces(values, plan_header(values, {}), on):
            here = slice(offset // dtype.itemsize, offset // dtype.itemsize + source.shape.numel())
            source.read(0, found[here])
            counts[here] += 1
    assert counts.eq(1).all()
    expected = [whole.view(-1) for whole in wholes] + [torch.tensor([7]).to(dtype)] * extra
    assert found.equal(torch.cat(expected))
