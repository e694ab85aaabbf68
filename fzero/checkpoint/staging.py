"""Staging: a copy of what a rank writes in the memory of the host, so that a step may overwrite the values at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeGuard

import torch

from fzero.files import OnDisk
from fzero.layout.ranges import pad, tile
from fzero.ranks.ranks import Ranks
from fzero.state.sources import Source, TensorSource

ALIGN = 64
"""A value's copy begins at a multiple of so many bytes."""


class Staging:
    """One buffer on the host, which each save uses again: at most one copy of what a rank writes. Values on a disk are
    copied on that disk."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._stream: Any = None
        self._wait: Callable[[], None] | None = None

    def copy(
        self, files: Mapping[int, Mapping[str, Source]], on: Ranks, is_state: Callable[[str], bool]
    ) -> dict[int, dict[str, Source]]:
        """The values of each file, copied. Overwrites the copies of the call before. Call `wait` before they are read.

        Copies of slices from a GPU are under way when this returns, beside the stream of the steps. The first node of
        a step that overwrites a slice waits for them (`Ranks.settle`). `is_state(key)` says which values are slices:
        others, which a user may overwrite, are there when this returns.
        """
        sources = [source for values in files.values() for source in values.values()]
        sizes = [0 if _is_on_disk(source) else pad(_nbytes(source), ALIGN) for source in sources]
        self._reserve(sum(sizes))
        spans, copied = iter(tile(sizes)), dict[int, dict[str, Source]]()
        with self._beside(on) as copy_later:
            for number, values in files.items():
                copied[number] = {}
                for key, source in values.items():
                    span = next(spans)
                    if _is_on_disk(source):
                        held = torch.empty_like(source.tensor).copy_(source.tensor)
                        copied[number][key] = TensorSource(held, source.path)
                        continue
                    held = self._buffer[span.start : span.start + _nbytes(source)].view(source.dtype)
                    is_later = isinstance(source, TensorSource) and source.tensor.is_cuda and is_state(key)
                    (copy_later if is_later else _copy_now)(source, held)
                    copied[number][key] = TensorSource(held.view(source.shape), source.path)
        return copied

    def wait(self) -> None:
        """Return when the copies are there."""
        if self._wait is not None:
            self._wait()

    def _reserve(self, nbytes: int) -> None:
        if nbytes > self._buffer.numel():
            self._buffer = torch.empty(0, dtype=torch.uint8, device="cpu")  # free the old one first
            self._buffer = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=torch.cuda.is_available())

    @contextmanager
    def _beside(self, on: Ranks) -> Iterator[Callable[[Any, torch.Tensor], None]]:
        """A function that starts a copy from a GPU beside the stream of the steps."""
        self._wait = None
        device = on.choose_device()
        if device.type != "cuda":
            yield _copy_now
            return
        self._stream = self._stream or torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))  # which computes the values
        yield partial(_copy_on, self._stream)
        copied = self._stream.record_event()
        self._wait = copied.synchronize
        on.readers.append(lambda: torch.cuda.current_stream(device).wait_event(copied))


def _is_on_disk(source: Source) -> TypeGuard[TensorSource]:
    return isinstance(source, TensorSource) and isinstance(source.tensor, OnDisk)


def _copy_now(source: Source, held: torch.Tensor) -> None:
    source.read(0, held)


def _copy_on(stream: Any, source: TensorSource, held: torch.Tensor) -> None:
    with torch.cuda.stream(stream):
        held.copy_(source.tensor.reshape(-1), non_blocking=True)
    source.tensor.record_stream(stream)  # or another tensor may get the memory before the copy has read it


def _nbytes(source: Source) -> int:
    return source.shape.numel() * source.dtype.itemsize
