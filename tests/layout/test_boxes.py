"""Boxes of row-major ranges, by hand."""

from __future__ import annotations

import pytest

from fzero.base.errors import FzeroError
from fzero.layout.boxes import Box, boxes


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
