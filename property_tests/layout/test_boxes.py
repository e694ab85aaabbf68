"""Laws of boxes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from hypothesis import example, given
from hypothesis import strategies as st

from fzero.layout.boxes import Box, boxes

Shape = tuple[int, ...]


@st.composite
def shapes_with_ranges(draw: st.DrawFn, *, max_dims: int = 4, max_side: int = 4) -> tuple[Shape, range]:
    """A shape, 0-d and zero-size ones included, and a range of its elements."""
    shape = tuple(draw(st.lists(st.integers(0, max_side), max_size=max_dims)))
    ends = draw(st.tuples(*[st.integers(0, math.prod(shape))] * 2))
    return shape, range(min(ends), max(ends))


@st.composite
def shapes_with_boxes(draw: st.DrawFn) -> tuple[Shape, Box]:
    """A shape and any box inside it, empty ones included."""
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
    ends = [sorted(draw(st.tuples(st.integers(0, side), st.integers(0, side)))) for side in shape]
    return shape, Box(tuple(start for start, _ in ends), tuple(stop - start for start, stop in ends))


def elements(shape: Shape, box: Box) -> list[int]:
    """The row-major positions of a box's elements, one by one."""
    where = itertools.product(*(range(start, start + size) for start, size in zip(*box)))
    return [position(shape, index) for index in where]


def position(shape: Shape, index: Sequence[int]) -> int:
    """The row-major position of an element."""
    return sum(i * math.prod(shape[dim + 1 :]) for dim, i in enumerate(index))


SCALAR = (), range(1)
EMPTY = (3, 0, 2), range(0)
MOST = (3, 3, 3, 3), range(1, 80)  # seven boxes


@given(shapes_with_ranges())
@example(SCALAR)
@example(EMPTY)
@example(MOST)
def test_boxes_tile_the_range_in_order(drawn: tuple[Shape, range]) -> None:
    shape, where = drawn
    assert [i for box in boxes(shape, where) for i in elements(shape, box)] == list(where)


@given(shapes_with_ranges(max_dims=6, max_side=10**4))
@example(SCALAR)
@example(MOST)
def test_there_are_at_most_two_boxes_a_dimension_less_one(drawn: tuple[Shape, range]) -> None:
    shape, where = drawn
    found = boxes(shape, where)
    assert (len(found) <= max(1, 2 * len(shape) - 1)) if where else not found


@given(shapes_with_ranges(max_dims=6, max_side=10**4))
@example(SCALAR)
@example(MOST)
def test_boxes_of_large_arrays_tile_the_range_too(drawn: tuple[Shape, range]) -> None:
    shape, where = drawn
    end = where.start
    for start, size in boxes(shape, where):
        first, last = position(shape, start), position(shape, [a + n - 1 for a, n in zip(start, size)])
        assert first == end and last - first + 1 == math.prod(size) > 0  # contiguous, right behind the box before
        end = last + 1
    assert end == (where.stop if where else where.start)


@given(shapes_with_boxes())
@example(((), Box((), ())))
@example(((2, 1, 3), Box((0, 0, 0), (2, 1, 3))))
def test_a_contiguous_box_is_the_one_box_of_its_range(drawn: tuple[Shape, Box]) -> None:
    shape, box = drawn
    inside = elements(shape, box)
    if inside and inside == list(range(inside[0], inside[-1] + 1)):
        assert boxes(shape, range(inside[0], inside[-1] + 1)) == (box,)
