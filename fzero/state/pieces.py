"""Pieces: a source whose elements are those of other sources, each of which has some of them, anywhere."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

import torch
from torch import Tensor

from fzero.base.dtypes import describe_form
from fzero.base.errors import FzeroError
from fzero.layout.strides import Copy, extent, halve, runs, within
from fzero.state.sources import Source, check_range

Parts = Iterable[tuple[Copy, Source]]
"""Sources, and the copies from their elements to those of the value."""
SPAN_NBYTES = 2**20
"""The most bytes that are read at once for elements that do not lie side by side."""
SPARSE = 4
"""Elements that do not lie side by side are read with all those between them up to this many times their number."""
PAGE_NBYTES = 4096
"""So many bytes are read at once even for one element: a disk reads no fewer."""


class PiecedSource:
    """A value of a shape and dtype, whose `parts` say which elements of a source are which of its own. `where` names
    their files in errors, which end with the `way_out`. A `Source`.

    Reading raises:
        FzeroError: for elements that no part has.
    """

    def __init__(
        self, path: str, shape: torch.Size, dtype: torch.dtype, parts: Parts, where: str, way_out: str = ""
    ) -> None:
        self.path, self.shape, self.dtype, self._where, self._way_out = path, shape, dtype, where, way_out
        # by where they begin: tensors that are joined along an inner dimension take turns
        self._parts = sorted(((copy.swap(), source) for copy, source in parts), key=lambda part: part[0].source)
        self._starts = [copy.source for copy, _ in self._parts]
        self._longest = max((extent(copy) for copy, _ in self._parts), default=0)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.path}: {describe_form(self)} in {self._where})"

    def read(self, start: int, out: Tensor) -> None:
        flat, count = check_range(self, start, out), 0
        first = bisect_left(self._starts, flat.start - self._longest + 1)
        for copy, source in self._parts[first : bisect_left(self._starts, flat.stop)]:
            for part in within(copy, flat):
                _read(source, part.swap(), start, out)
                count += part.numel
        if count != len(flat):
            problem = f"{self._where} has {count} of the {len(flat)} elements from {start} on"
            raise FzeroError(self.path, problem, self._way_out)


def _read(source: Source, copy: Copy, start: int, out: Tensor) -> None:
    """Read the elements of a copy from its source into `out`, which holds the target's elements from `start` on."""
    span = extent(copy)
    nbytes = span * source.dtype.itemsize
    first = next(runs(copy))
    if first.numel == copy.numel:
        source.read(first.source, out[first.target - start :][: first.numel])
    elif nbytes <= PAGE_NBYTES or (nbytes <= SPAN_NBYTES and span <= SPARSE * copy.numel):
        stage = torch.empty(span, dtype=source.dtype, device="cpu")
        source.read(copy.source, stage)
        sizes, sources, targets = zip(*copy.dims)
        place = out.as_strided(sizes, targets, out.storage_offset() + copy.target - start)
        place.copy_(stage.as_strided(sizes, sources))
    else:
        for half in halve(copy):
            _read(source, half, start, out)
