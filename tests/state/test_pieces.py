"""Pieces: a value whose elements lie in other sources is read by ranges as if it lay in one."""

from __future__ import annotations

import pytest
import torch

from fzero.base.errors import FzeroError
from fzero.layout.strides import Copy, dense, view_to_view
from fzero.state.pieces import PiecedSource
from fzero.state.sources import Source, TensorSource

WHOLE = torch.arange(4 * 5 * 6.0).view(4, 5, 6)


def cut(tensor: torch.Tensor, sizes: tuple[int, ...]) -> list[tuple[Copy, Source]]:
    """The blocks of a tensor, of these sizes and smaller at the ends."""
    blocks = [(tensor, [0] * tensor.ndim)]
    for dim, size in enumerate(sizes):
        blocks = [
            (part, [*at[:dim], at[dim] + number * size, *at[dim + 1 :]])
            for block, at in blocks for number, part in enumerate(block.split(size, dim))
        ]  # fmt: skip
    strides = dense(tensor.shape)
    firsts = [(block.clone(), sum(a * b for a, b in zip(at, strides))) for block, at in blocks]
    return [
        (copy, TensorSource(block))
        for block, first in firsts for copy in view_to_view(block.shape, dense(block.shape), strides, to=first)
    ]  # fmt: skip


@pytest.mark.parametrize("sizes", [(4, 5, 6), (1, 5, 6), (3, 2, 6), (4, 5, 1), (2, 3, 4)])
def test_ranges_are_those_of_the_whole(sizes: tuple[int, ...]) -> None:
    source, numel = PiecedSource("w", WHOLE.shape, WHOLE.dtype, cut(WHOLE, sizes), "blocks"), WHOLE.numel()
    for start in range(0, numel, 7):
        for stop in (start, start + 1, min(start + 31, numel), numel):
            out = torch.full((stop - start,), torch.nan)
            source.read(start, out)
            assert out.equal(WHOLE.view(-1)[start:stop])


def test_elements_that_no_part_has_are_told() -> None:
    parts = cut(WHOLE, (1, 5, 6))
    source = PiecedSource("w", WHOLE.shape, WHOLE.dtype, parts[:1] + parts[2:], "blocks", "copy them again")
    with pytest.raises(FzeroError, match="w: blocks has 10 of the 40 elements from 20 on; copy them again"):
        source.read(20, torch.empty(40))
    source.read(60, torch.empty(40))
