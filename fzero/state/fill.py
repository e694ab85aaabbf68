"""Fill: a rank's part of a bucket, allocated and read from sources a chunk at a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fzero import files
from fzero.base.errors import FzeroError
from fzero.base.placement import Disk, Host, Placement
from fzero.files.memory import allocate_pinned_memory, new_buffer
from fzero.layout.chunks import rank_overlaps
from fzero.layout.layout import Layout
from fzero.layout.wires import wire
from fzero.state.sources import Source, TensorSource

CHUNK_NBYTES = 32 << 20
"""Default bytes of a chunk: of values that are read, sent or written at a time."""

BUILD_CHUNK_NBYTES = 4 << 20
"""Default bytes of a chunk in `fzero.build`. Smaller, because it adds to the peak: a chunk is gathered from all ranks
and held beside the shards and this rank's shard of a bucket, together no more than the shards and a whole parameter."""


HOST = torch.device("cpu")


def copy_slices(leaves: Mapping[int, Any], layout: Layout, rank: int | None) -> dict[int, Tensor]:
    """Copies of the slices that `rank` (None: all ranks together) keeps of some leaves of a layout, by leaf index.

    `leaves` are tensors of one dtype and device. The slices are views of one new buffer, in order. With all leaves of
    the layout the buffer is the rank's whole part of the bucket, and padding is zero.
    """
    first = next(iter(leaves.values()))
    slices = allocate_slices(leaves, layout, rank, first.dtype, first.device)
    for index, leaf in leaves.items():
        fill(slices[index].view(-1), TensorSource(leaf), layout, index, rank, CHUNK_NBYTES)
    return slices


def allocate_slices(
    leaves: Mapping[int, Any],
    layout: Layout,
    rank: int | None,
    dtype: torch.dtype,
    device: torch.device,
    pin: bool = False,
    place: Placement | None = None,
) -> dict[int, Tensor]:
    """Memory in place of the slices that `copy_slices` returns: zeros as padding, and no values yet. Reads only the
    shapes of leaves. On disk each slice lies by itself, without padding. So does a leaf that is split over model axes,
    of which all ranks together have each part, one behind the other.

    Raises:
        FzeroError: as `find_memory` and `allocate`, of a device or of a disk.
    """
    along = wire(layout, tuple(sorted(leaves)))
    block = along.block(rank)
    device, pin = find_memory(place, device, pin)
    parts = layout.splits if rank is None else 1
    if isinstance(place, Disk) and device.type != "meta":
        paths = [layout.leaves[index].path for index in along.leaves]
        return {
            index: files.allocate(place, dtype, parts * len(at), rank, layout.bucket, path)
            for index, at, path in zip(along.leaves, block, paths)
        }
    if parts > 1:
        return {index: allocate(parts * len(at), dtype, device, pin) for index, at in zip(along.leaves, block)}
    numel = len(layout.rank_range(rank)) if along.is_complete else sum(map(len, block))
    buffer = allocate(numel, dtype, device, pin)
    end = 0  # not zeros everywhere: they would take longer than to read the values from a file in the page cache
    for at in filter(None, block):
        buffer[end : at.start].zero_()
        end = at.stop
    buffer[end:].zero_()
    flats = {index: buffer[at.start : at.stop] for index, at in zip(along.leaves, block)}
    return {index: flat.view(leaves[index].shape) if layout.replicated else flat for index, flat in flats.items()}


def find_memory(place: Placement | None, device: torch.device, pin: bool) -> tuple[torch.device, bool]:
    """`(device, pin)` of the memory of a placement; those given for the device.

    Raises:
        FzeroError: for a placement beside a device that is neither a CPU nor a CUDA device.
    """
    if place is None or device.type == "meta":
        return device, pin
    if device.type not in ("cpu", "cuda"):
        way_out = "leave it out: copies run between the host and CPU or CUDA devices"
        raise FzeroError("to", f"is {place}, beside slices for {device}", way_out)
    return HOST, isinstance(place, Host) and place.pin and torch.accelerator.is_available()


def allocate(numel: int, dtype: torch.dtype, device: torch.device, pin: bool = False) -> Tensor:
    """[numel] elements without values on a device, in pinned memory with `pin`.

    Raises:
        FzeroError: for `pin` on a device that is not the host, and where no accelerator is there to pin memory for; for
            memory that cannot be pinned.
    """
    if pin and device.type not in ("cpu", "meta"):
        way_out = 'give device="cpu" too: only memory of the host is pinned; or leave pin out'
        raise FzeroError("pin", f"is True, and slices are allocated on {device}", way_out)
    if pin and device.type == "cpu" and not torch.accelerator.is_available():
        problem = "is True, and there is no accelerator: memory of the host is pinned for one"
        raise FzeroError("pin", problem, "leave pin out")
    is_pinned = pin and device.type == "cpu"
    return allocate_pinned_memory(numel, dtype, "pin") if is_pinned else torch.empty(numel, dtype=dtype, device=device)


def fill(out: Tensor, source: Source, layout: Layout, leaf: int, rank: int | None, chunk: int) -> None:
    """Read a rank's part of a leaf into `out`, 1-d, `chunk` bytes at a time."""
    start = layout.part(leaf, rank).start
    for piece in rank_overlaps(layout, leaf, rank, chunk_numel(chunk, source.dtype, out.dtype)):
        here = out[piece.source.start - start : piece.source.stop - start]
        # A tensor may be copied from any device to any other; every other source writes to host memory only. Nothing
        # is copied to a disk but what is 1-d.
        is_on_disk = isinstance(out, files.OnDisk)
        if not is_on_disk and (out.device.type == "cpu" or isinstance(source, TensorSource)):
            source.read(piece.source.start, here)
        else:
            numel, dtype = here.numel(), here.dtype
            staged = allocate(numel, dtype, HOST, True) if out.is_cuda else new_buffer(numel, dtype)
            source.read(piece.source.start, staged)
            here.copy_(staged)


MAX_NBYTES = 2**62
"""A chunk of more bytes is one of so many: torch takes no number of 64 bits."""


def chunk_numel(chunk: int, *dtypes: torch.dtype) -> int:
    """The number of elements, of the widest of these dtypes, in a chunk of `chunk` bytes.

    Raises:
        FzeroError: for a chunk smaller than one element.
    """
    widest = max(dtype.itemsize for dtype in dtypes)
    if chunk < widest:
        raise FzeroError("chunk", f"is {chunk} bytes, an element {widest}", "give some megabytes, such as 32 << 20")
    return min(chunk, MAX_NBYTES) // widest
