"""Boxes of row-major ranges, by hand."""

from __future__ import annotations

import pytest

from fzero.base.errors import FzeroError
from fzero.layout.boxes import Box, boxes, flat


@pytest.mark.parametrize(
    ("shape", "elements", "expected"),
    [
        ((), range(1), [((), ())]),
        ((), range(0), []),
        ((7,), range(2, 5), [((2,), (3,))]),
        ((3, 5), range(15), [((0, 0), (3, 5))]),
        ((3, 5), range(6, 9), [((1, 1), (1, 3))]),
        ((3, 5), range(3, 14), [((0, 3), (1, 2)), ((1, 0), (1, 5)), ((2, 0), (1, 4))]),
        ((3, 5), range(5, 15), [((1, 0), (2, 5))]),
        ((3, 5), range(8, 8), []),
        ((3, 1, 5), range(3, 10), [((0, 0, 3), (1, 1, 2)), ((1, 0, 0), (1, 1, 5))]),
        ((0, 4), range(0), []),
        (
            (3, 3, 3),
            range(2, 25),
            [((0, 0, 2), (1, 1, 1)), ((0, 1, 0), (1, 2, 3)), ((1, 0, 0), (1, 3, 3)),
             ((2, 0, 0), (1, 2, 3)), ((2, 2, 0), (1, 1, 1))],
        ),
    ],
)  # fmt: skip
def test_boxes(shape: tuple[int, ...], elements: range, expected: list[tuple[tuple[int, ...], ...]]) -> None:
    assert boxes(shape, elements) == tuple(Box(*box) for box in expected)


@pytest.mark.parametrize("elements", [range(-1, 3), range(10, 16)])
def test_a_range_outside_the_array_has_no_boxes(elements: range) -> None:
    with pytest.raises(FzeroError, match=r"reaches outside shape \(3, 5\); its elements are range\(0, 15\)"):
        boxes((3, 5), elements)


@pytest.mark.parametrize(
    ("shape", "box", "elements"),
    [
        ((), Box((), ()), range(1)),
        ((7,), Box((2,), (3,)), range(2, 5)),
        ((3, 5), Box((1, 0), (2, 5)), range(5, 15)),
        ((3, 5), Box((2, 1), (1, 3)), range(11, 14)),
        ((3, 1, 5), Box((1, 0, 0), (2, 1, 5)), range(5, 15)),
        ((4, 3, 1), Box((1, 1, 0), (1, 2, 1)), range(4, 6)),
    ],
)
def test_flat(shape: tuple[int, ...], box: Box, elements: range) -> None:
    assert flat(shape, box) == elements


def test_a_box_of_no_elements_covers_an_empty_range() -> None:
    assert len(flat((3, 5), Box((1, 2), (0, 3)))) == 0 and len(flat((0, 4), Box((0, 0), (0, 4)))) == 0


@pytest.mark.parametrize("box", [Box((0, 1), (2, 4)), Box((0, 0), (2, 4)), Box((1, 4), (2, 1))])
def test_a_box_whose_elements_are_not_neighbours_is_refused(box: Box) -> None:
    with pytest.raises(FzeroError, match=r"is not contiguous in shape \(3, 5\)"):
        flat((3, 5), box)


@pytest.mark.parametrize("box", [Box((-1, 0), (1, 1)), Box((2, 0), (2, 5)), Box((0, 3), (1, 3)), Box((0, 0), (1, -1))])
def test_a_box_outside_the_array_is_refused(box: Box) -> None:
    with pytest.raises(FzeroError, match=r"reaches outside shape \(3, 5\)"):
        flat((3, 5), box)


def test_a_box_of_other_dimensions_is_refused() -> None:
    with pytest.raises(FzeroError, match=r"has 1 and 1 dimensions, shape \(3, 5\) has 2"):
        flat((3, 5), Box((0,), (1,)))
