"""What property tests draw from, once for all of them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from hypothesis import strategies as st

from fzero.layout import Layout, Leaf, Wire, wire
from fzero.mesh import VirtualMesh


def ranges(*, max_stop: int = 20) -> st.SearchStrategy[range]:
    """Half-open ranges within [0, max_stop], empty ones included."""
    ends = st.tuples(st.integers(0, max_stop), st.integers(0, max_stop))
    return ends.map(lambda pair: range(min(pair), max(pair)))


def sizes(*, max_size: int = 9, max_count: int = 6) -> st.SearchStrategy[list[int]]:
    """Lengths of consecutive pieces, zeros included."""
    return st.lists(st.integers(0, max_size), max_size=max_count)


def leaf_shapes(*, max_dims: int = 3, max_side: int = 4) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes of leaves: 0-d, zero-size, and others."""
    return st.lists(st.integers(0, max_side), max_size=max_dims).map(tuple)


def meshes(*, max_world: int = 9) -> st.SearchStrategy[VirtualMesh]:
    """Meshes whose shard axis has up to `max_world` ranks: named fsdp, named otherwise, or the inner of two."""
    worlds = st.integers(1, max_world)
    return st.one_of(
        worlds.map(lambda world: VirtualMesh(fsdp=world)),
        worlds.map(lambda world: VirtualMesh(data=world)),
        st.builds(lambda replicas, world: VirtualMesh(replica=replicas, fsdp=world), st.integers(1, 3), worlds),
    )


def layouts(
    *, max_world: int = 9, max_leaves: int = 5, aligns: Sequence[int] = (1, 2, 3, 16)
) -> st.SearchStrategy[Layout]:
    """Layouts of one to `max_leaves` leaves."""
    shapes = st.lists(leaf_shapes(), min_size=1, max_size=max_leaves)
    leaves = shapes.map(lambda drawn: tuple(Leaf(f"leaf{i}", shape) for i, shape in enumerate(drawn)))
    return st.builds(Layout, st.just("bucket"), leaves, meshes(max_world=max_world), st.sampled_from(aligns))


@st.composite
def layouts_with_ranks(draw: st.DrawFn, *, max_world: int = 9) -> tuple[Layout, int]:
    """A layout and one of its ranks."""
    layout = draw(layouts(max_world=max_world))
    return layout, draw(st.integers(0, layout.world - 1))


@st.composite
def wires(draw: st.DrawFn, *, max_world: int = 5, complete: bool = False) -> Wire:
    """Wires that carry any leaves of a layout but none, in order; all of them if `complete`."""
    layout = draw(layouts(max_world=max_world))
    everything = range(len(layout.leaves))
    chosen = everything if complete else draw(st.sets(st.sampled_from(everything), min_size=1))
    return wire(layout, tuple(sorted(chosen)))


def dtypes() -> st.SearchStrategy[torch.dtype]:
    """What leaves are made of."""
    return st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.int64])


@st.composite
def wires_with_leaves(draw: st.DrawFn, *, complete: bool = False) -> tuple[Wire, list[torch.Tensor]]:
    """A wire and the leaves that it carries, in full. No element is zero, so that padding differs from all of them."""
    sent, dtype = draw(wires(complete=complete)), draw(dtypes())
    shapes = [sent.layout.leaves[leaf].shape for leaf in sent.leaves]
    numbers = torch.arange(1, sum(map(math.prod, shapes)) + 1).to(dtype).split([math.prod(shape) for shape in shapes])
    return sent, [flat.view(shape) for flat, shape in zip(numbers, shapes)]
