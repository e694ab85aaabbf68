"""Half-open integer ranges: tile, pad, intersect, shift.

A range is Python's own `range` with step 1, so it has `len`, iterates and compares.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate, pairwise


def pad(size: int, multiple: int) -> int:
    """The least multiple of `multiple` that is at least `size`."""
    return -(-size // multiple) * multiple


def tile(sizes: Iterable[int]) -> tuple[range, ...]:
    """Ranges that tile [0, sum(sizes)) in order, one of each size."""
    return tuple(range(start, stop) for start, stop in pairwise(accumulate(sizes, initial=0)))


def intersect(a: range, b: range) -> range:
    """The elements of both; an empty range lies inside `a`."""
    start = min(max(a.start, b.start), a.stop)
    return range(start, max(start, min(a.stop, b.stop)))


def shift(a: range, by: int) -> range:
    """Each element plus `by`."""
    return range(a.start + by, a.stop + by)
