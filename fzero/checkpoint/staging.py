"""Staging: a copy of what a rank writes in the memory of the host, so that a step may overwrite the values at once."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fzero.layout.ranges import pad, tile
from fzero.state.sources import Source, TensorSource

ALIGN = 64
"""A value's copy begins at a multiple of so many bytes."""


class Staging:
    """One buffer on the host, which each save uses again: at most one copy of what a rank writes."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8, device="cpu")

    def copy(self, files: Mapping[int, Mapping[str, Source]]) -> dict[int, dict[str, Source]]:
        """The values of each file, copied. Overwrites the copies of the call before.

        Copies from a GPU are under way when this returns. The step's first node that overwrites a value waits for
        them (`Live.settle`), and so does `read`.
        """
        sizes = [pad(_nbytes(source), ALIGN) for values in files.values() for source in values.values()]
        self._reserve(sum(sizes))
        spans = iter(tile(sizes))
        return {
            number: {key: self._copy(source, next(spans)) for key, source in values.items()}
            for number, values in files.items()
        }

    def _reserve(self, nbytes: int) -> None:
        if nbytes > self._buffer.numel():
            self._buffer = torch.empty(0, dtype=torch.uint8, device="cpu")  # free the old one first
            self._buffer = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=torch.cuda.is_available())

    def _copy(self, source: Source, span: range) -> Source:
        held = self._buffer[span.start : span.start + _nbytes(source)].view(source.dtype)
        source.read(0, held)
        return TensorSource(held.view(source.shape), source.path)


def _nbytes(source: Source) -> int:
    return source.shape.numel() * source.dtype.itemsize
