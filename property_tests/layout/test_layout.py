"""Laws of layouts and wires."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fzero.base.errors import FzeroError
from fzero.base.mesh import VirtualMesh
from fzero.layout.layout import Layout, Leaf
from fzero.layout.ranges import shift, tile
from fzero.layout.wires import Wire
from fzero.testing.strategies import layouts
from property_tests.strategies import layouts_with_ranks, wires

EMPTY = Layout("bucket", (Leaf("leaf0", (0,)),), VirtualMesh(fsdp=3))
RAGGED = Layout("bucket", (Leaf("leaf0", (5,)), Leaf("leaf1", ())), VirtualMesh(fsdp=4), align=1)
ROWS = Layout(
    "bucket", (Leaf("leaf0", (3,)), Leaf("leaf1", (3, 4), 4), Leaf("leaf2", ())), VirtualMesh(fsdp=2), align=1
)
NOTHING = Wire(Layout("", (Leaf("a", (0,)), Leaf("b", (0,))), VirtualMesh(fsdp=1), align=1), (0,))
LAST_ALONE = Wire(  # of whose first leaf the last element is on another rank than the others, in the other's block
    Layout("", (Leaf("a", (3,)), Leaf("b", (6,)), Leaf("c", (7,))), VirtualMesh(fsdp=2), align=1), (1, 2)
)


@given(layouts())
@example(EMPTY)
@example(RAGGED)
def test_slices_tile_the_bucket(layout: Layout) -> None:
    assert [i for rank in range(layout.world) for i in layout.rank_range(rank)] == list(range(layout.padded))


@given(layouts(max_block=7))
@example(EMPTY)
@example(RAGGED)
@example(ROWS)
def test_parts_of_a_leaf_tile_the_leaf(layout: Layout) -> None:
    for index, leaf in enumerate(layout.leaves):
        assert [i for rank in range(layout.world) for i in layout.part(index, rank)] == list(range(leaf.numel))


@given(layouts())
def test_leaves_tile_the_bucket_without_its_padding(layout: Layout) -> None:
    assert [i for whole in layout.leaf_ranges for i in whole] == list(range(layout.numel))


@given(layouts(max_world=4096))
@example(EMPTY)
def test_padding_is_below_one_alignment_unit(layout: Layout) -> None:
    assert 0 <= layout.padded - layout.numel < layout.world * layout.align


@given(layouts_with_ranks(max_world=4096))
def test_every_slice_is_equally_long_and_aligned(drawn: tuple[Layout, int]) -> None:
    layout, rank = drawn
    assert len(layout.rank_range(rank)) == layout.shard == layout.padded / layout.world
    assert layout.rank_range(rank).start % layout.align == 0


@given(layouts_with_ranks(max_world=4096))
def test_parts_lie_in_the_slice_of_their_rank(drawn: tuple[Layout, int]) -> None:
    layout, rank = drawn
    for index, whole in enumerate(layout.leaf_ranges):
        assert set(shift(layout.part(index, rank), whole.start)) <= set(layout.rank_range(rank))


@given(layouts_with_ranks(max_world=4096))
def test_a_part_begins_where_that_of_the_rank_before_ends(drawn: tuple[Layout, int]) -> None:
    layout, rank = drawn
    for index in range(len(layout.leaves)):
        before = layout.part(index, rank - 1).stop if rank else 0
        assert layout.part(index, rank).start == before


@given(layouts_with_ranks())
def test_layouts_of_equal_arguments_are_equal(drawn: tuple[Layout, int]) -> None:
    layout, rank = drawn
    twin = replace(layout, leaves=tuple(Leaf(leaf.path, leaf.shape) for leaf in layout.leaves))
    assert twin == layout and hash(twin) == hash(layout) and twin.rank_range(rank) == layout.rank_range(rank)


@given(layouts_with_ranks())
def test_names_and_other_axes_do_not_move_anything(drawn: tuple[Layout, int]) -> None:
    layout, rank = drawn
    renamed = tuple(Leaf(f"other.{leaf.path}", leaf.shape) for leaf in layout.leaves)
    other = Layout("other", renamed, VirtualMesh(pipe=2, fsdp=layout.world), layout.align)
    assert [other.part(i, rank) for i in range(len(renamed))] == [layout.part(i, rank) for i in range(len(renamed))]


@given(layouts_with_ranks())
def test_every_rank_holds_all_of_a_replicated_layout(drawn: tuple[Layout, int]) -> None:
    layout, rank = replace(drawn[0], replicated=True), drawn[1]
    assert layout.padded == layout.shard == layout.numel
    assert [len(layout.part(i, rank)) for i in range(len(layout.leaves))] == [leaf.numel for leaf in layout.leaves]


@given(layouts(max_world=64, max_block=7))
@example(EMPTY)
@example(RAGGED)
@example(ROWS)
def test_between_representative_ranks_all_hold_as_much_of_each_leaf_in_the_same_place(layout: Layout) -> None:
    leaves = range(len(layout.leaves))
    slots = [[layout.slot(i, rank) for i in leaves] for rank in range(layout.world)]  # empty ranges are equal
    alike = [rank for rank in range(1, layout.world) if slots[rank] == slots[rank - 1]]
    assert (
        {0} | (set(range(layout.world)) - set(alike)) <= layout.representative_ranks(leaves) <= set(range(layout.world))
    )


@given(layouts(max_world=4096, max_block=7))
def test_representative_ranks_do_not_grow_with_the_world(layout: Layout) -> None:
    assert len(layout.representative_ranks(range(len(layout.leaves)))) <= 1 + 4 * len(layout.leaves)


@given(wires())
def test_a_block_is_the_parts_of_a_rank_from_its_start(sent: Wire) -> None:
    for rank in range(sent.layout.world):
        ends = [i for piece in sent.block(rank) for i in piece]
        assert ends == list(range(sum(map(len, sent.parts(rank))))) and len(ends) <= sent.stride


@given(wires())
def test_a_block_is_aligned_and_padded_by_less_than_one_unit(sent: Wire) -> None:
    if len(sent.leaves) < len(sent.layout.leaves):
        longest = max(sum(map(len, sent.parts(rank))) for rank in range(sent.layout.world))
        assert sent.stride % sent.layout.align == 0 and longest <= sent.stride < longest + sent.layout.align


@given(wires(max_block=7))
@example(LAST_ALONE)
@example(NOTHING)
def test_a_partial_wire_sends_the_parts_of_all_ranks(sent: Wire) -> None:
    parts = sum(len(part) for rank in range(sent.layout.world) for part in sent.parts(rank))
    assert sent.sent == (sent.numel if sent.is_complete else parts) <= sent.numel


@given(wires(max_block=7))
def test_pieces_of_a_leaf_are_its_parts_in_rank_order(sent: Wire) -> None:
    for position, leaf in enumerate(sent.leaves):
        expected = [rank * sent.stride + i for rank in range(sent.layout.world) for i in sent.block(rank)[position]]
        assert [i for piece in sent.pieces(position) for i in piece] == expected
        assert len(expected) == sent.layout.leaves[leaf].numel


@given(wires(max_world=12, max_block=3))
@example(LAST_ALONE)
@example(NOTHING)
def test_a_leaf_is_joined_unless_it_has_several_pieces(sent: Wire) -> None:
    for position in range(len(sent.leaves)):
        assert sent.is_joined(position) == (len(sent.pieces(position)) <= 1)


@given(wires())
def test_pieces_neither_touch_nor_are_empty(sent: Wire) -> None:
    for position in range(len(sent.leaves)):
        pieces = sent.pieces(position)
        assert all(pieces) and all(a.stop < b.start for a, b in pairwise(pieces))


@given(layouts_with_ranks(max_world=4096, max_block=7))
@example((ROWS, 1))
def test_parts_begin_and_end_with_a_block(drawn: tuple[Layout, int]) -> None:
    layout, rank = drawn
    for index, leaf in enumerate(layout.leaves):
        part = layout.part(index, rank)
        assert all(end % leaf.block == 0 or end == leaf.numel for end in (part.start, part.stop))


@given(layouts_with_ranks(max_world=4096, max_block=7))
@example((ROWS, 0))
def test_slots_are_apart_and_as_long_as_the_parts(drawn: tuple[Layout, int]) -> None:
    layout, rank = drawn
    slots = [layout.slot(index, rank) for index in range(len(layout.leaves))]
    assert [len(slot) for slot in slots] == [len(layout.part(index, rank)) for index in range(len(slots))]
    assert all(a.stop <= b.start for a, b in pairwise([range(0), *slots, range(layout.shard, layout.shard)]))


@given(layouts_with_ranks(max_world=4096, max_block=7))
@example((ROWS, 1))
def test_slots_say_where_the_leaf_lies_in_the_bucket(drawn: tuple[Layout, int]) -> None:
    layout, rank = drawn
    for index, whole in enumerate(layout.leaf_ranges):
        slot, part = layout.slot(index, rank), layout.part(index, rank)
        assert not part or shift(slot, rank * layout.shard) == shift(part, whole.start)
        assert layout.slot(index, None) == whole


@given(layouts(max_block=7))
@example(ROWS)
def test_there_are_gaps_where_leaves_do_not_tile(layout: Layout) -> None:
    lengths = [leaf.numel for leaf in layout.leaves]
    assert [len(whole) for whole in layout.leaf_ranges] == lengths
    assert layout.has_gaps == (layout.leaf_ranges != tile(lengths)) and not replace(layout, replicated=True).has_gaps


@given(wires(complete=True, max_block=7))
def test_with_all_leaves_a_wire_is_the_bucket(sent: Wire) -> None:
    layout = sent.layout
    assert sent.numel == layout.padded
    assert [sent.pieces(i) for i in sent.leaves] == [((whole,) if whole else ()) for whole in layout.leaf_ranges]
    for rank in range(layout.world):
        assert sent.block(rank) == tuple(layout.slot(index, rank) for index in sent.leaves)


@given(layouts(max_block=7), st.integers(1, 4), st.integers(1, 6))
def test_blocks_of_a_unit_lie_with_their_elements(layout: Layout, size: int, times: int) -> None:
    layout = replace(layout, unit=size * times)
    blocks = layout.coarsen(size)
    assert blocks.padded % (blocks.world * blocks.align) == 0 == layout.padded % (layout.world * layout.align)
    for index, leaf in enumerate(layout.leaves):
        assert layout.leaf_ranges[index].start % layout.unit == 0
        parts = [layout.part(index, rank) for rank in range(layout.world)]
        assert [i for part in parts for i in part] == list(range(leaf.numel))
        for rank, part in enumerate(parts):
            assert not part or (part.start % size == 0 and part.start % leaf.block == 0)
            assert blocks.part(index, rank) == range(-(-part.start // size), -(-part.stop // size))


def test_blocks_that_ranks_may_cut_are_refused() -> None:
    for layout in (RAGGED, replace(RAGGED, unit=6)):
        with pytest.raises(FzeroError, match=r"leaf0: ranks may cut blocks of 4 elements.*unit=4"):
            layout.coarsen(4)
    assert replace(RAGGED, replicated=True).coarsen(4).leaves[0].shape == (2,)
