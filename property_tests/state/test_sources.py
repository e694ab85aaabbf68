"""Sources: whatever the strides and the range, the values read are those of the contiguous tensor."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fzero.state.sources import TensorSource
from fzero.testing.strategies import leaf_shapes
from property_tests.strategies import dtypes


@st.composite
def strided_tensors(draw: st.DrawFn) -> Tensor:
    """Tensors of any strides: distinct elements, then sliced with steps, permuted and expanded."""
    shape = draw(leaf_shapes(max_dims=4, max_side=5))
    tensor = torch.arange(torch.Size(shape).numel()).to(draw(dtypes())).view(shape)
    for dim, size in enumerate(shape):
        start, step = draw(st.integers(0, size)), draw(st.integers(1, 3))
        tensor = tensor[(slice(None),) * dim + (slice(start, None, step),)]
    tensor = tensor.permute(draw(st.permutations(range(tensor.ndim))))
    if draw(st.booleans()):
        tensor = tensor.unsqueeze(-1).expand(*tensor.shape, draw(st.integers(0, 3)))
    return tensor


@given(strided_tensors(), dtypes(), st.data())
def test_a_range_is_that_of_the_contiguous_tensor(tensor: Tensor, dtype: torch.dtype, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, tensor.numel()))
    out = torch.empty(data.draw(st.integers(0, tensor.numel() - start)), dtype=dtype)
    TensorSource(tensor).read(start, out)
    assert out.equal(tensor.contiguous().view(-1)[start : start + out.numel()].to(dtype))
