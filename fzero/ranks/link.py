"""Link: copies between the memory of a device and that of the host.

A start returns the copies, as a list of tensors with the strides of what is copied, and `arrive` returns them once they
are there. Where the device is the host, a start copies at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from fzero.files.memory import allocate_pinned_memory


class Link(Protocol):
    """The way between the memory of one device and that of the host."""

    def to_host(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Start to copy values of the device into new memory of the host."""

    def to_device(self, values: Sequence[Tensor], into: Sequence[Tensor] | None = None) -> list[Tensor]:
        """Start to copy values of the host into new memory of the device, or over the values `into`, which nothing
        reads any more."""

    def arrive(self, started: list[Tensor], is_read: bool = True) -> list[Tensor]:
        """The copies of a start, once they are there. Copies on the host that are not read there, but copied back, may
        be there later: the device waits for them, and the calling thread does not."""


class AtOnce:
    """The link of a device that is the host."""

    def to_host(self, values: Sequence[Tensor]) -> list[Tensor]:
        return [x.clone(memory_format=torch.preserve_format) for x in values]

    def to_device(self, values: Sequence[Tensor], into: Sequence[Tensor] | None = None) -> list[Tensor]:
        if into is None:
            return self.to_host(values)
        for x, target in zip(values, into):
            target.copy_(x)
        return list(into)

    def arrive(self, started: list[Tensor], is_read: bool = True) -> list[Tensor]:
        return started


class StartedCopies(list[Tensor]):
    """Copies that are under way, and the event behind them on their stream."""

    event: torch.cuda.Event


class Cuda:
    """The link of a GPU: copies on two streams of their own, one for each direction. Copies out of memory that is not
    pinned hold up the calling thread."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._out, self._in = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def to_host(self, values: Sequence[Tensor]) -> list[Tensor]:
        self._out.wait_stream(torch.cuda.current_stream(self.device))  # which computes the values
        made = list(map(_allocate_pinned_like, values))
        for x in values:
            x.record_stream(self._out)  # the allocator reuses the memory once it is copied
        return self._copy(self._out, values, made)

    def to_device(self, values: Sequence[Tensor], into: Sequence[Tensor] | None = None) -> list[Tensor]:
        if into is not None:
            return self._copy(self._in, values, list(into))
        made = [torch.empty_like(x, device=self.device) for x in values]
        self._in.wait_stream(torch.cuda.current_stream(self.device))  # which may still compute in this memory
        for x in made:
            x.record_stream(self._in)
        return self._copy(self._in, values, made)

    def _copy(self, stream: torch.cuda.Stream, values: Sequence[Tensor], made: list[Tensor]) -> StartedCopies:
        with torch.cuda.stream(stream):
            for x, target in zip(values, made):
                target.copy_(x, non_blocking=True)
        started = StartedCopies(made)
        started.event = stream.record_event()
        return started

    def arrive(self, started: list[Tensor], is_read: bool = True) -> list[Tensor]:
        assert isinstance(started, StartedCopies)  # a start of this link made it
        if started[0].is_cuda or not is_read:  # a copy back waits for the current stream
            torch.cuda.current_stream(self.device).wait_event(started.event)
        else:
            started.event.synchronize()  # the host reads the copies
        return list(started)


def _allocate_pinned_like(x: Tensor) -> Tensor:
    """Memory of the host for a copy of `x`, pinned, with the strides that torch gives a copy."""
    strides = torch.empty_like(x, device="meta").stride()
    return allocate_pinned_memory(x.numel(), x.dtype, "to_host", is_asked=False).as_strided(x.shape, strides)


def link_of(device: torch.device) -> Link:
    """The link between a device and the host."""
    return Cuda(device) if device.type == "cuda" else AtOnce()
