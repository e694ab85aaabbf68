"""Streaming: from sources into a rank's part of a bucket, a chunk at a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fzero.base.errors import FzeroError
from fzero.layout.chunks import rank_overlaps
from fzero.layout.layout import Layout, wire
from fzero.state.sources import Source, TensorSource

CHUNK = 32 << 20
"""Bytes that are on their way at once, unless the user says otherwise."""


def place(leaves: Mapping[int, Any], layout: Layout, rank: int | None) -> dict[int, Tensor]:
    """The slices that `rank` (None: all ranks together) holds of these leaves of a layout, tensors of one dtype and
    device, by their index: views of one new buffer, in order. Where all leaves are given that is the rank's whole part
    of the bucket, its padding zeros."""
    first = next(iter(leaves.values()))
    slices = room(leaves, layout, rank, first.dtype, first.device)
    for index, leaf in leaves.items():
        fill(slices[index].view(-1), TensorSource(leaf), layout, index, rank, CHUNK)
    return slices


def room(
    leaves: Mapping[int, Any],
    layout: Layout,
    rank: int | None,
    dtype: torch.dtype,
    device: torch.device,
    pin: bool = False,
) -> dict[int, Tensor]:
    """Zeros for the slices that `place` gives. Of leaves only shapes are read."""
    held = wire(layout, tuple(sorted(leaves)))
    where = held.block(rank)
    size = len(layout.rank_range(rank)) if held.is_complete else sum(map(len, where))
    block = torch.zeros(size, dtype=dtype, device=device, pin_memory=pin)
    flats = {index: block[at.start : at.stop] for index, at in zip(held.leaves, where)}
    return {index: flat.view(leaves[index].shape) if layout.replicated else flat for index, flat in flats.items()}


def fill(out: Tensor, source: Source, layout: Layout, leaf: int, rank: int | None, chunk: int) -> None:
    """Read a rank's part of a leaf into `out`, 1-d, `chunk` bytes at a time."""
    start = layout.part(leaf, rank).start
    for piece in rank_overlaps(layout, leaf, rank, elements(chunk, source.dtype, out.dtype)):
        here = out[piece.source.start - start : piece.source.stop - start]
        if out.device.type == "cpu" or isinstance(source, TensorSource):
            source.read(piece.source.start, here)
        else:
            staged = torch.empty(here.shape, dtype=here.dtype, pin_memory=out.is_cuda)
            source.read(piece.source.start, staged)
            here.copy_(staged)


def elements(chunk: int, *dtypes: torch.dtype) -> int:
    """How many elements of the widest of these dtypes a chunk of so many bytes has.

    Raises:
        FzeroError: for a chunk that has none.
    """
    widest = max(dtype.itemsize for dtype in dtypes)
    if chunk < widest:
        raise FzeroError("chunk", f"is {chunk} bytes, an element {widest}", "give some megabytes, such as 32 << 20")
    return chunk // widest
