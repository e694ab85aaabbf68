"""Half-open integer ranges: pad, tile, intersect, shift.

A range is Python's own `range` with step 1: it has a `len`, iterates and compares. All empty ranges compare equal.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate, pairwise


def pad(size: int, multiple: int) -> int:
    """Round `size` up to a multiple of `multiple`."""
    return -(-size // multiple) * multiple


def tile(sizes: Iterable[int]) -> tuple[range, ...]:
    """Ranges that tile [0, sum(sizes)) in order, one of each size."""
    return tuple(range(start, stop) for start, stop in pairwise(accumulate(sizes, initial=0)))


def intersect(a: range, b: range) -> range:
    """The elements that both ranges have. An empty result lies inside `a`."""
    start = min(max(a.start, b.start), a.stop)
    return range(start, max(start, min(a.stop, b.stop)))


def shift(a: range, by: int) -> range:
    """Add `by` to each element."""
    return range(a.start + by, a.stop + by)
