"""Packing, by hand."""

from __future__ import annotations

import pytest

from fzero.layout.packing import pack


def starts(sizes: list[tuple[int, int]], world: int, align: int = 1) -> tuple[int, list[int]]:
    """Elements of a shard, and where each leaf begins."""
    shard, ranges = pack(tuple(sizes), world, align)
    assert [len(where) for where in ranges] == [numel for numel, _ in sizes]
    return shard, [where.start for where in ranges]


def test_without_blocks_leaves_adjoin() -> None:
    assert starts([(6, 1), (0, 1), (7, 1)], 3) == (5, [0, 6, 6])
    assert starts([(6, 1), (7, 1)], 3, align=4) == (8, [0, 6])


def test_a_boundary_between_blocks_needs_no_gap() -> None:
    assert starts([(12, 4), (3, 1)], 2) == (8, [0, 12])


def test_a_gap_shifts_the_boundary_between_two_blocks() -> None:
    assert starts([(3, 1), (12, 4)], 2) == (8, [0, 4])


def test_a_leaf_that_is_one_block_lies_on_one_rank() -> None:
    assert starts([(5, 5), (5, 5), (5, 5)], 2) == (10, [0, 5, 10])
    assert starts([(2, 1), (5, 9)], 2) == (5, [0, 5])


def test_a_block_of_many_shards_divides_them() -> None:
    assert starts([(40, 4)], 6) == (8, [0])  # 7 would do without rows
    assert starts([(30, 3), (40, 4)], 7) == (12, [0, 32])  # the gap of 2 moves a boundary to the first row's end


def test_a_leaf_of_more_than_one_shard_may_be_cut_once_by_one_that_its_block_does_not_divide() -> None:
    assert starts([(6, 2), (9, 3)], 2) == (9, [0, 6])
    assert starts([(10, 5)], 2, align=4) == (8, [3])  # the boundary lies at 8, after a row of 5
    assert starts([(9, 3)], 3, align=2) == (6, [0])
    assert starts([(2, 3), (5, 2)], 3) == (3, [0, 4])  # from 3 on it would be cut twice, at 6 and at 9
    assert starts([(6, 2)], 6, align=3) == (6, [0])


def test_the_last_block_may_be_shorter() -> None:
    assert starts([(7, 3)], 2) == (4, [1])  # 3 before the boundary, 3 + 1 behind it


def test_blocks_that_divide_the_alignment_divide_every_shard() -> None:
    assert starts([(1, 1), (100, 2)], 8, align=4) == (16, [0, 2])


def test_nothing_to_pack() -> None:
    assert starts([], 3) == (0, [])
    assert starts([(0, 7), (0, 1)], 3) == (0, [0, 0])
    assert starts([(0, 7), (3, 3), (0, 7)], 3) == (3, [0, 0, 3])


def test_one_rank_holds_everything_without_gaps() -> None:
    assert starts([(5, 4), (6, 5)], 1) == (11, [0, 5])


@pytest.mark.parametrize("world", [8, 64, 4096])
def test_rows_of_a_transformer_layer(world: int) -> None:
    rows = [(4096 * 4096, 4096)] * 4 + [(11008 * 4096, 4096)] * 3 + [(4096, 1)] * 2
    shard, ranges = pack(tuple(rows), world, 16)
    assert shard % 4096 == 0 and shard * world - sum(numel for numel, _ in rows) < (2 * 4096 + 4096) * world
    assert ranges[-1].stop == sum(numel for numel, _ in rows)  # all is whole rows: no gap is needed
