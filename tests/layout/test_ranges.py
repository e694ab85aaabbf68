"""Integer ranges, by hand."""

from __future__ import annotations

import pytest

from fzero.layout.ranges import intersect, pad, shift, tile


@pytest.mark.parametrize(("size", "multiple", "padded"), [(0, 4, 0), (1, 4, 4), (4, 4, 4), (5, 4, 8), (7, 1, 7)])
def test_pad(size: int, multiple: int, padded: int) -> None:
    assert pad(size, multiple) == padded


def test_tile() -> None:
    assert tile([3, 0, 2]) == (range(0, 3), range(3, 3), range(3, 5))
    assert tile([]) == ()


@pytest.mark.parametrize(
    ("a", "b", "both"),
    [
        (range(2, 6), range(4, 9), range(4, 6)),
        (range(2, 6), range(3, 5), range(3, 5)),
        (range(2, 6), range(6, 9), range(6, 6)),
        (range(2, 6), range(0, 1), range(2, 2)),
        (range(2, 6), range(8, 9), range(6, 6)),
        (range(2, 6), range(4, 4), range(4, 4)),
    ],
)
def test_intersect(a: range, b: range, both: range) -> None:
    got = intersect(a, b)
    assert (got.start, got.stop) == (both.start, both.stop)  # all empty ranges compare equal


def test_shift() -> None:
    assert shift(range(2, 5), -2) == range(0, 3)
