"""Boxes: a row-major range of an N-d array as rectangles, which is how files and slices name a part of it, and back.

range(3, 14) of (3, 5)    . . . a a    the rest of a row, whole rows, the start of a row: in two dimensions
                          b b b b b    never more than three boxes, and with each further dimension at most
                          c c c c .    two more, one at either end
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

from fzero.base.errors import FzeroError


class Box(NamedTuple):
    """A rectangle of an array: along each dimension `size` elements from `start` on."""

    start: tuple[int, ...]
    size: tuple[int, ...]


@lru_cache(2**16)
def boxes(shape: tuple[int, ...], flat: range) -> tuple[Box, ...]:
    """The boxes that cover a row-major range of an array, in its order, each contiguous: at most `2 * ndim - 1`, one
    for 0-d, none for an empty range.

    `flat(shape, box)` is the inverse: these ranges tile the one that was given.

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


@lru_cache(2**16)
def flat(shape: tuple[int, ...], box: Box) -> range:
    """The row-major range of an array that a box covers.

    Raises:
        FzeroError: for a box that reaches outside the array, or whose elements are not neighbours in it.
    """
    start, size = box
    if not len(start) == len(size) == len(shape):
        raise FzeroError(f"{box}", f"has {len(start)} and {len(size)} dimensions, shape {shape} has {len(shape)}")
    if any(a < 0 or n < 0 or a + n > whole for a, n, whole in zip(start, size, shape)):
        raise FzeroError(f"{box}", f"reaches outside shape {shape}")
    first = sum(a * stride for a, stride in zip(start, _strides(shape)))
    if math.prod(size) == 0:
        return range(first, first)
    outer = next((dim for dim, n in enumerate(size) if n > 1), len(size))
    if size[outer + 1 :] != shape[outer + 1 :]:
        raise FzeroError(f"{box}", f"is not contiguous in shape {shape}", "take one that is whole in its inner dims")
    return range(first, first + math.prod(size))


def _largest(shape: tuple[int, ...], position: int, stop: int) -> tuple[int, ...]:
    """The size of the largest box that begins at `position`, ends by `stop` and is contiguous: of the outermost
    dimension that both allow, as many steps as they allow."""
    for dim, (whole, stride) in enumerate(zip(shape, _strides(shape))):
        if position % stride == 0 and position + stride <= stop:
            steps = min((stop - position) // stride, whole - position // stride % whole)
            return (*(1,) * dim, steps, *shape[dim + 1 :])
    return ()


def _index(shape: tuple[int, ...], position: int) -> tuple[int, ...]:
    """The coordinates of an element."""
    return tuple(position // stride % whole for whole, stride in zip(shape, _strides(shape)))


@lru_cache(2**12)
def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Elements from one step to the next, along each dimension."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
