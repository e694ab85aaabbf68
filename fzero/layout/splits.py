"""Splits: a leaf in parts, which ranks along model axes have, cut along a dim of the leaf.

    dim of the whole leaf, 2 parts   |- gate 0 -|- gate 1 -|- up 0 -|- up 1 -|
    rank 0 has                       |- gate 0 -|- up 0 -|
    rank 1 has                       |- gate 1 -|- up 1 -|

The flattened leaf consists of runs of equal size, which go to the ranks in turn.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Split(NamedTuple):
    """How a leaf is split over the ranks along an axis, or along several together: equally along `dim`, or with `parts`
    each of so many equal parts of the dim, as a gate and an up projection in one leaf."""

    axis: str
    dim: int
    parts: int = 1


def run_of(shape: Sequence[int], dim: int, parts: int) -> int:
    """The elements of a run, by the shape of what one rank has."""
    return math.prod(shape[dim + 1 :]) * shape[dim] // parts


def find_part_shape(shape: Sequence[int], runs: int, ranks: int) -> tuple[int, ...]:
    """The shape of what one of several ranks has of a leaf of this shape, by the number of its runs: the inverse of
    `run_of`, for a leaf that has elements. No other split has as many runs."""
    for dim, size in enumerate(shape):
        parts, rest = divmod(runs, math.prod(shape[:dim]))
        if not rest and parts and size % (parts * ranks) == 0:
            return (*shape[:dim], size // ranks, *shape[dim + 1 :])
    raise ValueError(f"{list(shape)} is not split over {ranks} ranks into {runs} runs each")


def range_in_part(run: int, ranks: int, position: int, elements: range) -> range:
    """The elements of what the rank at a position has that lie in a range of the whole: they adjoin."""
    periods = ((divmod(at, run * ranks)) for at in (elements.start, elements.stop))
    return range(*(number * run + min(max(0, rest - position * run), run) for number, rest in periods))


def runs_in_whole(run: int, ranks: int, position: int, elements: range) -> Iterator[tuple[int, int]]:
    """`(first element in the whole, number)` of the runs of some elements of what the rank at a position has."""
    start = elements.start
    while start < elements.stop:
        number, offset = divmod(start, run)
        size = min(run - offset, elements.stop - start)
        yield (number * ranks + position) * run + offset, size
        start += size


def runs_in_parts(run: int, ranks: int, elements: range) -> Iterator[tuple[int, int, int]]:
    """`(position, first element of what the rank there has, number)` of the runs of some elements of the whole."""
    start = elements.start
    while start < elements.stop:
        number, offset = divmod(start, run)
        size = min(run - offset, elements.stop - start)
        yield number % ranks, number // ranks * run + offset, size
        start += size
