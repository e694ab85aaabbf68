"""Strategies of the property tests."""

from __future__ import annotations

import math

import torch
from hypothesis import strategies as st

from fzero.layout.layout import Layout
from fzero.layout.wires import Wire, wire
from fzero.testing.strategies import layouts


def ranges(*, max_stop: int = 20) -> st.SearchStrategy[range]:
    """Half-open ranges within [0, max_stop], empty ones included."""
    ends = st.tuples(st.integers(0, max_stop), st.integers(0, max_stop))
    return ends.map(lambda pair: range(min(pair), max(pair)))


def sizes(*, max_size: int = 9, max_count: int = 6) -> st.SearchStrategy[list[int]]:
    """Lengths of consecutive pieces, zeros included."""
    return st.lists(st.integers(0, max_size), max_size=max_count)


@st.composite
def layouts_with_ranks(draw: st.DrawFn, *, max_world: int = 9, max_block: int = 1) -> tuple[Layout, int]:
    """A layout and one of its ranks."""
    layout = draw(layouts(max_world=max_world, max_block=max_block))
    return layout, draw(st.integers(0, layout.world - 1))


@st.composite
def wires(draw: st.DrawFn, *, max_world: int = 5, complete: bool = False, max_block: int = 1) -> Wire:
    """Wires of one leaf of a layout or more, in order; of all leaves if `complete`."""
    layout = draw(layouts(max_world=max_world, max_block=max_block))
    everything = range(len(layout.leaves))
    chosen = everything if complete else draw(st.sets(st.sampled_from(everything), min_size=1))
    return wire(layout, tuple(sorted(chosen)))


def dtypes() -> st.SearchStrategy[torch.dtype]:
    """What leaves are made of."""
    return st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.int64])


@st.composite
def wires_with_leaves(
    draw: st.DrawFn, *, complete: bool = False, max_block: int = 1
) -> tuple[Wire, list[torch.Tensor]]:
    """A wire and the leaves that it carries, in full. No element is zero, so that padding differs from all of them."""
    sent, dtype = draw(wires(complete=complete, max_block=max_block)), draw(dtypes())
    shapes = [sent.layout.leaves[leaf].shape for leaf in sent.leaves]
    numbers = torch.arange(1, sum(map(math.prod, shapes)) + 1).to(dtype).split([math.prod(shape) for shape in shapes])
    return sent, [flat.view(shape) for flat, shape in zip(numbers, shapes)]
