"""Copies between strided views, by hand."""

from __future__ import annotations

import pytest

from fzero.base.errors import FzeroError
from fzero.layout.strides import Copy, Dim, Run, compose, dense, halve, runs, view_to_view, within

TRANSPOSE = Copy(0, 0, (Dim(2, 3, 1), Dim(3, 1, 2)))  # of [2, 3]


def test_dimensions_that_lie_dense_in_both_arrays_are_one() -> None:
    assert view_to_view((4, 2, 3), (6, 3, 1), dense((4, 2, 3)), 12, 5) == [Copy(12, 5, (Dim(24, 1, 1),))]
    assert view_to_view((3, 2), (1, 3), dense((3, 2))) == [TRANSPOSE]
    assert view_to_view((3, 0), (1, 1), (1, 1)) == []
    assert view_to_view((), (), ()) == [Copy(0, 0)]


def test_a_part_of_the_source() -> None:
    assert list(within(TRANSPOSE, range(2, 5))) == [Copy(2, 4), Copy(3, 1, (Dim(2, 1, 2),))]
    assert list(within(TRANSPOSE, range(6, 9))) == []


def test_a_transpose_of_a_transpose_is_none() -> None:
    assert list(compose(TRANSPOSE, TRANSPOSE.swap())) == [Copy(0, 0, (Dim(6, 1, 1),))]


def test_two_rows_of_what_two_tensors_were_joined_to() -> None:
    second = Copy(0, 4, (Dim(3, 2, 6), Dim(2, 1, 1)))  # [3, 2] at columns 4 and 5 of [3, 6]
    rows = Copy(6, 0, (Dim(12, 1, 1),))
    assert list(compose(second, rows)) == [Copy(2, 4, (Dim(2, 2, 6), Dim(2, 1, 1)))]


def test_runs_and_halves() -> None:
    copy = Copy(1, 0, (Dim(2, 8, 4), Dim(4, 1, 1)))
    assert list(runs(copy)) == [Run(1, 0, 4), Run(9, 4, 4)]
    assert halve(copy) == (Copy(1, 0, (Dim(4, 1, 1),)), Copy(9, 4, (Dim(4, 1, 1),)))


@pytest.mark.parametrize(("shape", "strides"), [((2, 3), (0, 1)), ((2, 3), (2, 1))])
def test_an_element_that_is_there_twice_is_refused(shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    with pytest.raises(FzeroError, match="view: elements overlap or interleave"):
        view_to_view(shape, strides, dense(shape))


def test_strides_that_do_not_divide_each_other_are_refused() -> None:
    with pytest.raises(FzeroError, match="strides 3 and 2 do not divide each other"):
        list(compose(Copy(0, 0, (Dim(3, 1, 2),)), Copy(0, 0, (Dim(2, 3, 1),))))
