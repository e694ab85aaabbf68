"""Laws of integer ranges."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from fzero.layout.ranges import intersect, pad, shift, tile
from property_tests.strategies import ranges, sizes


@given(st.integers(0, 10**12), st.integers(1, 10**6))
@example(0, 7)
@example(7, 7)
def test_padding_is_the_least_multiple_that_fits(size: int, multiple: int) -> None:
    assert pad(size, multiple) % multiple == 0 and size <= pad(size, multiple) < size + multiple


@given(sizes())
def test_tiles_follow_each_other_from_zero(lengths: list[int]) -> None:
    assert [i for piece in tile(lengths) for i in piece] == list(range(sum(lengths)))


@given(sizes())
def test_tiles_have_the_sizes_asked_for(lengths: list[int]) -> None:
    assert [len(piece) for piece in tile(lengths)] == lengths


@given(ranges(), ranges())
def test_intersection_is_that_of_sets(a: range, b: range) -> None:
    assert set(intersect(a, b)) == set(a) & set(b)


@given(ranges(), ranges())
@example(range(3, 5), range(7, 9))
@example(range(7, 9), range(3, 5))
def test_intersection_lies_inside_the_first_range(a: range, b: range) -> None:
    both = intersect(a, b)
    assert a.start <= both.start <= both.stop <= a.stop


@given(ranges(), st.integers(-30, 30))
def test_shift_moves_each_element(a: range, by: int) -> None:
    assert list(shift(a, by)) == [i + by for i in a]


@given(ranges(), st.integers(-30, 30))
def test_shift_back_undoes_shift(a: range, by: int) -> None:
    assert shift(shift(a, by), -by) == a
