"""Integer ranges, by hand. Laws of `pad`, `tile` and `shift` stand in property_tests/layout/test_ranges.py."""

from __future__ import annotations

import pytest

from fzero.layout.ranges import intersect


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
