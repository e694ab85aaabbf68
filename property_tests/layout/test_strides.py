"""Laws of strides: what copies say of elements is what torch does with values."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from fzero.base.errors import FzeroError
from fzero.layout.strides import Copy, compose, dense, extent, halve, runs, view_to_view, within


@st.composite
def views(draw: st.DrawFn, whole: Tensor) -> Tensor:
    """A view of a tensor: transposed, cut, split into more dimensions, of every second element."""
    view = whole
    for _ in range(draw(st.integers(0, 4))):
        dims = st.integers(0, view.ndim - 1)
        kind = draw(st.sampled_from(["transpose", "narrow", "select", "unflatten", "step"]))
        if not view.ndim or not view.numel():
            break
        dim = draw(dims)
        size = view.shape[dim]
        if kind == "transpose":
            view = view.transpose(dim, draw(dims))
        elif kind == "narrow":
            start = draw(st.integers(0, size))
            view = view.narrow(dim, start, draw(st.integers(0, size - start)))
        elif kind == "select":
            view = view.select(dim, draw(st.integers(0, size - 1)))
        elif kind == "unflatten":
            outer = draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0]))
            view = view.unflatten(dim, (outer, size // outer))
        else:
            view = view.transpose(dim, -1)[..., ::2]
    return view


@st.composite
def wholes(draw: st.DrawFn) -> Tensor:
    shape = draw(st.lists(st.integers(1, 6), max_size=3))
    return torch.arange(math.prod(shape)).view(shape)


def elements(copies: Iterable[Copy]) -> list[tuple[int, int]]:
    """`(source, target)` of each element, in order."""
    return [(run.source + i, run.target + i) for copy in copies for run in runs(copy) for i in range(run.numel)]


def gather(copies: Iterable[Copy], source: Tensor, numel: int) -> Tensor:
    out = torch.full((numel,), -1)
    for at, to in elements(copies):
        assert out[to] == -1
        out[to] = source.view(-1)[at]
    return out


@given(st.data())
def test_copies_of_copies_are_what_torch_makes(data: st.DataObject) -> None:
    whole = data.draw(wholes())
    first = data.draw(views(whole))
    middle = first.clone(memory_format=data.draw(st.sampled_from([torch.contiguous_format, torch.preserve_format])))
    last = data.draw(views(middle))
    put = view_to_view(first.shape, first.stride(), middle.stride(), first.storage_offset())
    take = view_to_view(last.shape, last.stride(), dense(last.shape), last.storage_offset())
    try:
        found = [copy for a in put for b in take for copy in compose(a, b)]
    except FzeroError as error:
        assume("do not divide each other" not in str(error))
        raise
    assert gather(found, whole, last.numel()).equal(last.reshape(-1))


@given(st.data())
def test_parts_of_a_copy_are_its_elements_in_a_range(data: st.DataObject) -> None:
    whole = data.draw(wholes())
    view = data.draw(views(whole))
    ends = sorted(data.draw(st.tuples(*[st.integers(0, whole.numel())] * 2)))
    for copy in view_to_view(view.shape, view.stride(), dense(view.shape), view.storage_offset()):
        expected = elements([copy])
        assert expected == sorted(expected)
        assert extent(copy) == expected[-1][0] - expected[0][0] + 1
        assert elements(within(copy, range(*ends))) == [pair for pair in expected if ends[0] <= pair[0] < ends[1]]
        assert sorted(elements([copy.swap()])) == sorted((b, a) for a, b in expected)
        if copy.numel > 1:
            assert elements(halve(copy)) == expected
