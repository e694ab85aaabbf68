"""Laws of places: the files of a checkpoint hold each element of each leaf once, and are where four numbers say."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from fzero.base.mesh import VirtualMesh
from fzero.checkpoint.places import Grid, Place
from fzero.layout.layout import Layout
from fzero.testing.strategies import layouts


@st.composite
def placed_leaves(draw: st.DrawFn) -> tuple[Grid, Layout, list[Place]]:
    """The leaves of a layout on a mesh with the shard axis, of one or two axes, between others, written by any copy of
    the state."""
    layout = draw(layouts(max_world=5, max_block=3))
    outer, inner, further = (draw(st.integers(1, 2)) for _ in range(3))
    sizes = {"a": outer, "fsdp": layout.world, "b": inner}
    if layout.world == 4:
        sizes = {"a": outer, "fsdp": 2, "b": inner, "sp": 2, "c": further}
    grid = Grid.of(sizes, "fsdp+sp" if layout.world == 4 else "fsdp")
    firsts = st.sampled_from(grid.list_firsts())
    places = [
        Place(leaf.path, torch.float32, leaf.shape, where.start, layout.shard, draw(firsts))
        for leaf, where in zip(layout.leaves, layout.leaf_ranges)
    ]
    return grid, layout, places


@given(placed_leaves())
def test_files_hold_each_element_once(case: tuple[Grid, Layout, list[Place]]) -> None:
    grid, _, places = case
    for place in places:
        parts = [part for file in range(grid.files) if (part := grid.find_part(place, file))]
        assert sorted(i for part in parts for i in part) == list(range(place.numel))


@given(placed_leaves())
def test_a_file_has_the_part_of_its_rank(case: tuple[Grid, Layout, list[Place]]) -> None:
    grid, layout, places = case
    mesh = VirtualMesh(a=2, fsdp=3, b=2)
    full = Grid.of(mesh.sizes, "a+b")
    for axis in ("a+b", "fsdp", "fsdp+b"):
        assert [full.position(rank, axis) for rank in range(12)] == [mesh.position(rank, axis) for rank in range(12)]
        assert [full.offset(i, axis) for i in range(full.count(axis))] == mesh.rows(axis)[0]
    for index, place in enumerate(places):
        for position in range(layout.world):
            file = place.first + grid.offset(position, "")
            assert list(grid.find_part(place, file)) == list(layout.part(index, position))


@given(placed_leaves(), st.data())
def test_files_of_a_range_are_those_that_have_some_of_it(
    case: tuple[Grid, Layout, list[Place]], data: st.DataObject
) -> None:
    grid, _, places = case
    for place in places:
        start = data.draw(st.integers(0, place.numel))
        elements = range(start, data.draw(st.integers(start, place.numel)))
        found = list(grid.iter_files(place, elements))
        assert [i for _, part in found for i in part] == list(elements)
        assert all(part and set(part) <= set(grid.find_part(place, file)) for file, part in found)
