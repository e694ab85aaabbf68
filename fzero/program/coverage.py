"""Coverage: the elements of a new tensor that nothing has written yet, as boxes of the tensor.

`torch.empty` leaves whatever was in the memory. Writes into views of the tensor, each a box, may together set all of
its elements, as circular padding does.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor


class _Span(NamedTuple):
    """A range of positions, whose ends may be open sizes (`fzero.base.symbols`)."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


Box = tuple[_Span, ...]
"""A range along each dimension."""


class _Dim(NamedTuple):
    """A dimension of a dense tensor."""

    stride: int
    size: int


class Unset:
    """The elements of a new dense tensor that no write has set."""

    def __init__(self, value: Tensor) -> None:
        dims = [_Dim(stride, size) for stride, size in zip(value.stride(), value.shape) if size > 1]
        self._dims = sorted(dims, reverse=True)
        self._left: list[Box] = [tuple(_Span(0, size) for _, size in self._dims)] if value.numel() else []
        """Boxes that cover these elements."""

    def set(self, view: Tensor) -> None:
        """Note that a node overwrites every element of a view of the tensor."""
        box = self._find_box(view)
        if box is not None:
            self._left = [rest for each in self._left for rest in _subtract(each, box)]

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Note that a node copies one view of the tensor into another: what was not set is not set in the target."""
        given, box = self._find_box(source), self._find_box(target)
        if given is None or box is None or [span.size for span in given] != [span.size for span in box]:
            return
        unset = [both for each in self._left if (both := _intersect(each, given)) is not None]
        self.set(target)
        shifts = [b.start - a.start for a, b in zip(given, box)]
        self._left += [tuple(_Span(x.start + by, x.stop + by) for x, by in zip(each, shifts)) for each in unset]

    def reaches(self, view: Tensor) -> bool:
        """Whether a view of the tensor may have an element that is not set."""
        box = self._find_box(view)
        return bool(self._left) if box is None else any(_intersect(each, box) is not None for each in self._left)

    def _find_box(self, view: Tensor) -> Box | None:
        """The box that a view of the tensor is. None for a view that is no box, such as one with a step."""
        left = [dim for dim in map(_Dim, view.stride(), view.shape) if dim.size > 1 and dim.stride]
        offset: Any = view.storage_offset()
        box = list[_Span]()
        if view.numel() == 0:
            return tuple(_Span(0, 0) for _ in self._dims)
        if view.numel() == view.untyped_storage().nbytes() // view.element_size() and 0 not in view.stride():
            return tuple(_Span(0, size) for _, size in self._dims)  # in other dimensions, and all of it
        for stride, size in self._dims:
            start, offset = offset // stride, offset % stride  # divmod takes no open sizes
            along = [dim for dim in left if dim.stride == stride]
            left = [dim for dim in left if dim.stride != stride]
            box.append(_Span(start, start + (along[-1].size if along else 1)))
            if box[-1].stop > size:
                return None
        return None if left or offset else tuple(box)


def _intersect(a: Box, b: Box) -> Box | None:
    """The elements of both boxes; None where there are none."""
    both = tuple(_Span(max(x.start, y.start), min(x.stop, y.stop)) for x, y in zip(a, b))
    return both if all(span.size > 0 for span in both) else None


def _subtract(a: Box, b: Box) -> list[Box]:
    """Boxes that tile the elements of `a` that are not in `b`."""
    both, rest = _intersect(a, b), list[Box]()
    if both is None:
        return [a]
    for dim, (whole, common) in enumerate(zip(a, both)):
        for side in (_Span(whole.start, common.start), _Span(common.stop, whole.stop)):
            if side.size > 0:
                rest.append((*both[:dim], side, *a[dim + 1 :]))
    return rest
