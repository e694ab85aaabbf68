"""Laws of packing, compared with all possible placements."""

from __future__ import annotations

import math
from itertools import pairwise

from hypothesis import example, given
from hypothesis import strategies as st

from fzero.layout.packing import Sizes, pack
from fzero.layout.ranges import pad

Bucket = tuple[Sizes, int, int]


def buckets(*, max_world: int, max_numel: int, max_block: int) -> st.SearchStrategy[Bucket]:
    """Sizes of one to six leaves, ranks, and an alignment."""
    sizes = st.tuples(st.integers(0, max_numel), st.just(1) | st.integers(1, max_block))
    return st.tuples(
        st.lists(sizes, min_size=1, max_size=6).map(tuple), st.integers(1, max_world), st.sampled_from((1, 2, 3, 16))
    )


def small_buckets() -> st.SearchStrategy[Bucket]:
    return buckets(max_world=6, max_numel=30, max_block=12)


def large_buckets() -> st.SearchStrategy[Bucket]:
    return buckets(max_world=4096, max_numel=10**6, max_block=10**4)


def is_whole(start: int, numel: int, block: int, shard: int) -> bool:
    """Whether no shard's end cuts a block of a leaf that begins at `start`."""
    ends = range((start // shard + 1) * shard, start + numel, shard)
    return not ends or ((ends[0] - start) % block == 0 and (len(ends) == 1 or shard % block == 0))


def holds(sizes: Sizes, world: int, shard: int) -> bool:
    """Whether some placement of the leaves, in order, cuts no block. Tries all placements, one leaf after the other."""
    ends = {0}
    for numel, block in sizes:
        starts = {start for end in ends for start in range(end, world * shard - numel + 1)}
        ends = {start + numel for start in starts if is_whole(start, numel, block, shard)}
    return bool(ends)


LONG = (((28, 3), (9, 9), (28, 11), (13, 7), (27, 6), (19, 11)), 6, 1)  # its shard is far above numel / world
TWICE = (((30, 3), (40, 4), (11, 5)), 6, 2)  # blocks of several leaves have to divide the shard
ROWS = (((4096 * 4096, 4096), (11008 * 4096, 11008)), 1024, 16)
NONE = (((0, 7), (0, 1)), 3, 2)


@given(large_buckets())
@example(ROWS)
@example(LONG)
@example(NONE)
def test_leaves_lie_in_order_in_the_bucket(bucket: Bucket) -> None:
    sizes, world, align = bucket
    shard, ranges = pack(*bucket)
    assert shard % align == 0 and [len(where) for where in ranges] == [numel for numel, _ in sizes]
    assert all(a.stop <= b.start for a, b in pairwise([range(0), *ranges, range(world * shard, world * shard)]))


@given(large_buckets())
@example(ROWS)
@example(LONG)
def test_no_boundary_cuts_a_block(bucket: Bucket) -> None:
    shard, ranges = pack(*bucket)
    for (numel, block), where in zip(bucket[0], ranges):
        assert not numel or is_whole(where.start, numel, block, shard)


@given(small_buckets())
@example(LONG)
@example(TWICE)
@example(NONE)
def test_no_smaller_shard_holds_the_leaves(bucket: Bucket) -> None:
    sizes, world, align = bucket
    shard, _ = pack(*bucket)
    smaller = range(pad(-(-sum(numel for numel, _ in sizes) // world), align), shard, align)
    assert not any(holds(sizes, world, other) for other in smaller)


@given(small_buckets())
@example(LONG)
@example(TWICE)
def test_each_leaf_lies_as_early_as_it_can(bucket: Bucket) -> None:
    shard, ranges = pack(*bucket)
    for (numel, block), before, where in zip(bucket[0], [range(0), *ranges], ranges):
        assert not any(is_whole(start, numel, block, shard) for start in range(before.stop, where.start) if numel)


@given(large_buckets())
@example(ROWS)
@example(NONE)
def test_padding_is_bounded(bucket: Bucket) -> None:
    sizes, world, align = bucket
    shard, even = pack(*bucket).shard, sum(numel for numel, _ in sizes) / world
    block, unit = max(block for _, block in sizes), math.lcm(align, *(block for _, block in sizes))
    longest = max((numel for numel, block in sizes if block > 1), default=0)
    assert even <= shard < even + block + unit and shard < max(even + block, longest) + align


@given(large_buckets())
def test_without_blocks_there_is_only_the_end_to_pad(bucket: Bucket) -> None:
    sizes, world, align = bucket
    numel = sum(numel for numel, _ in sizes)
    shard, ranges = pack(tuple((numel, 1) for numel, _ in sizes), world, align)
    assert shard * world == pad(numel, world * align) and [i.stop for i in ranges[-1:]] == [numel]


@given(large_buckets())
def test_one_rank_needs_no_gaps(bucket: Bucket) -> None:
    sizes, _, align = bucket
    assert pack(sizes, 1, align) == pack(tuple((numel, 1) for numel, _ in sizes), 1, align)


@given(small_buckets(), st.integers(2, 5))
def test_scaling_every_size_scales_the_plan(bucket: Bucket, by: int) -> None:
    sizes, world, align = bucket
    shard, ranges = pack(*bucket)
    scaled = pack(tuple((numel * by, block * by) for numel, block in sizes), world, align * by)
    assert scaled == (shard * by, tuple(range(where.start * by, where.stop * by) for where in ranges))
