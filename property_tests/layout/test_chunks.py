"""Laws of chunk plans."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import example, given
from hypothesis import strategies as st

from fzero.base.mesh import VirtualMesh
from fzero.layout.chunks import Overlap, chunks, overlaps, rank_overlaps
from fzero.layout.layout import Layout, Leaf
from fzero.layout.ranges import intersect
from fzero.testing.strategies import layouts
from property_tests.strategies import layouts_with_ranks

FIVE = Layout("bucket", (Leaf("leaf0", (5,)),), VirtualMesh(fsdp=4), align=1)  # parts of 2, 2, 1 and 0
ODD = Layout("bucket", (Leaf("leaf0", ()), Leaf("leaf1", (0, 3)), Leaf("leaf2", (7,), 3)), VirtualMesh(fsdp=3), align=1)
WIDE = Layout("bucket", (Leaf("leaf0", (3, 41), 41), Leaf("leaf1", (9,))), VirtualMesh(fsdp=4096), align=1)

plans = layouts(max_block=7)
wide_plans = layouts(max_world=4096, max_block=7)
sizes = st.integers(1, 70)


def all_overlaps(layout: Layout, leaf: int, size: int) -> list[Overlap]:
    """The overlaps of every chunk of a leaf."""
    return [each for chunk in chunks(layout.leaves[leaf].numel, size) for each in overlaps(layout, leaf, chunk)]


def filled(layout: Layout, size: int) -> list[list[tuple[int, int] | None]]:
    """The (leaf, element) pairs that ranks hold, None for padding, after all overlaps of all chunks were sent."""
    held: list[list[tuple[int, int] | None]] = [[None] * layout.shard for _ in range(layout.world)]
    for leaf in range(len(layout.leaves)):
        for each in all_overlaps(layout, leaf, size):
            assert each.rank is not None
            start = layout.slot(leaf, each.rank).start + each.source.start - layout.part(leaf, each.rank).start
            place = slice(start, start + len(each.source))
            assert not any(held[each.rank][place])
            held[each.rank][place] = [(leaf, i) for i in each.source]
    return held


@given(st.integers(0, 300), sizes)
@example(0, 1)
def test_chunks_tile_and_all_but_the_last_are_whole(numel: int, size: int) -> None:
    found = list(chunks(numel, size))
    assert [i for chunk in found for i in chunk] == list(range(numel))
    assert all(len(chunk) == size for chunk in found[:-1]) and all(0 < len(chunk) <= size for chunk in found)


@given(wide_plans, sizes)
@example(FIVE, 2)
@example(ODD, 1)
@example(WIDE, 40)
def test_overlaps_tile_the_leaf_in_order(layout: Layout, size: int) -> None:
    for index, leaf in enumerate(layout.leaves):
        found = all_overlaps(layout, index, size)
        assert [i for each in found for i in each.source] == list(range(leaf.numel))
        assert all(each.leaf == index and len(each.source) > 0 for each in found)


@given(wide_plans, sizes)
@example(FIVE, 2)
@example(ODD, 1)
@example(WIDE, 40)
def test_what_overlaps_is_owned_by_its_rank(layout: Layout, size: int) -> None:
    for index in range(len(layout.leaves)):
        for each in all_overlaps(layout, index, size):
            assert intersect(each.source, layout.part(index, each.rank)) == each.source


@given(plans, sizes)
@example(FIVE, 3)
@example(ODD, 2)
def test_owners_are_those_that_a_look_at_every_rank_finds(layout: Layout, size: int) -> None:
    for index, leaf in enumerate(layout.leaves):
        for chunk in chunks(leaf.numel, size):
            expected = [rank for rank in range(layout.world) if intersect(chunk, layout.part(index, rank))]
            assert [each.rank for each in overlaps(layout, index, chunk)] == expected


@given(plans, sizes)
@example(FIVE, 2)
@example(ODD, 1)
def test_ranks_hold_the_bucket_after_all_overlaps_were_sent(layout: Layout, size: int) -> None:
    bucket = [element for held in filled(layout, size) for element in held]
    for leaf, whole in enumerate(layout.leaf_ranges):
        assert bucket[whole.start : whole.stop] == [(leaf, i) for i in range(len(whole))]
    assert sum(element is not None for element in bucket) == layout.numel


@given(plans, sizes, sizes)
@example(ODD, 1, 70)
def test_what_ranks_hold_does_not_depend_on_the_size_of_chunks(layout: Layout, size: int, other: int) -> None:
    assert filled(layout, size) == filled(layout, other)


@given(layouts_with_ranks(max_world=4096, max_block=7), sizes)
@example((FIVE, 3), 2)
@example((ODD, 1), 2)
@example((WIDE, 4000), 2)
def test_a_rank_reads_what_would_be_sent_to_it(drawn: tuple[Layout, int], size: int) -> None:
    layout, rank = drawn
    for index in range(len(layout.leaves)):
        sent = [each for each in all_overlaps(layout, index, size) if each.rank == rank]
        assert list(rank_overlaps(layout, index, rank, size)) == sent


@given(plans, sizes)
@example(ODD, 2)
def test_a_chunk_that_is_read_together_is_one_chunk_of_the_leaf(layout: Layout, size: int) -> None:
    for index in range(len(layout.leaves)):
        for rank in (*range(layout.world), None):
            for each in rank_overlaps(layout, index, rank, size):
                assert each.source[0] // size == each.source[-1] // size


@given(plans, sizes)
@example(ODD, 2)
def test_all_ranks_together_own_each_chunk(layout: Layout, size: int) -> None:
    for index, leaf in enumerate(layout.leaves):
        found = list(rank_overlaps(layout, index, None, size))
        assert [each.source for each in found] == list(chunks(leaf.numel, size))


@given(plans, sizes)
def test_each_rank_owns_each_chunk_of_a_replicated_leaf(layout: Layout, size: int) -> None:
    copied = replace(layout, replicated=True)
    for index, leaf in enumerate(copied.leaves):
        for chunk in chunks(leaf.numel, size):
            found = list(overlaps(copied, index, chunk))
            assert [each.rank for each in found] == list(range(copied.world))
            assert all(each.source == chunk for each in found)


@given(wide_plans)
@example(FIVE)
@example(WIDE)
def test_the_number_of_overlaps_is_below_chunks_and_ranks_that_own_some(layout: Layout) -> None:
    for index, leaf in enumerate(layout.leaves):
        owners = len(list(overlaps(layout, index, range(leaf.numel))))
        assert len(all_overlaps(layout, index, 5)) <= max(0, -(-leaf.numel // 5) + owners - 1)
