"""Extents that are given out lie apart, and gaps are used again."""

from __future__ import annotations

from fzero.files.extents import ALIGN, FreeList


def test_the_first_gap_that_is_large_enough_is_used_again() -> None:
    free = FreeList()
    a, b, c, d = (free.take(nbytes) for nbytes in (3 * ALIGN, 1, ALIGN, ALIGN + 1))
    assert (a, b, c, d) == (range(0, 3 * ALIGN), range(3 * ALIGN, 4 * ALIGN), range(4 * ALIGN, 5 * ALIGN),
                            range(5 * ALIGN, 7 * ALIGN))  # fmt: skip
    free.give_back(a)
    free.give_back(c)
    assert free.take(2 * ALIGN) == range(0, 2 * ALIGN)
    assert free.take(2 * ALIGN) == range(7 * ALIGN, 9 * ALIGN)  # no gap is large enough
    assert free.gaps == [range(2 * ALIGN, 3 * ALIGN), c]


def test_neighbouring_gaps_become_one_and_the_last_one_ends_the_file() -> None:
    free = FreeList()
    taken = [free.take(ALIGN) for _ in range(4)]
    for i in (2, 0, 1):
        free.give_back(taken[i])
    assert free.gaps == [range(0, 3 * ALIGN)]
    free.give_back(taken[3])
    assert (free.gaps, free.end) == ([], 0)
