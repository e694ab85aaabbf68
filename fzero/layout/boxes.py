"""Boxes: a row-major range of an N-d array as rectangles, because files and slices name parts of an array so.

range(3, 14) of (3, 5)    . . . a a    a: the rest of a row, b: whole rows, c: the start of a row
                          b b b b b    at most three boxes in two dimensions; each further dimension
                          c c c c .    adds at most two boxes, one at either end
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

from fzero.base.errors import FzeroError


class Box(NamedTuple):
    """A rectangle of an array: `size` elements from `start` on, along each dimension."""

    start: tuple[int, ...]
    size: tuple[int, ...]


@lru_cache(2**16)
def boxes(shape: tuple[int, ...], flat: range) -> tuple[Box, ...]:
    """The boxes that cover the row-major range `flat` of an array of this shape, in the order of the range.

    Each box is contiguous, and the row-major ranges of the boxes tile `flat`. There are at most `2 * ndim - 1` boxes,
    one for a 0-d array, none for an empty range.

    Raises:
        FzeroError: for a range that reaches outside the array.
    """
    numel = math.prod(shape)
    if flat and (flat.start < 0 or flat.stop > numel):
        raise FzeroError(f"{flat}", f"reaches outside shape {shape}", f"its elements are range(0, {numel})")
    found, position = [], flat.start
    while position < flat.stop:
        found.append(Box(_index(shape, position), _largest(shape, position, flat.stop)))
        position += math.prod(found[-1].size)
    return tuple(found)


def _largest(shape: tuple[int, ...], position: int, stop: int) -> tuple[int, ...]:
    """The size of the largest contiguous box that begins at element `position` and ends no later than `stop`.

    The box takes as many steps as fit along the outermost dimension of which one step fits.
    """
    for dim, (size, stride) in enumerate(zip(shape, _strides(shape))):
        if position % stride == 0 and position + stride <= stop:
            steps = min((stop - position) // stride, size - position // stride % size)
            return (*(1,) * dim, steps, *shape[dim + 1 :])
    return ()


def _index(shape: tuple[int, ...], position: int) -> tuple[int, ...]:
    """The coordinates of the element at a row-major position."""
    return tuple(position // stride % size for size, stride in zip(shape, _strides(shape)))


@lru_cache(2**12)
def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Along each dimension, the elements between one step and the next."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
