"""Reading folders of `torch.distributed.checkpoint` by ranges.

torch's reader loads every stored piece that it needs a part of: for 16 MiB of a 256 MiB leaf, the peak of resident
memory grows by 515 MiB. Here only the elements that are asked for are read, and the peak grows by 16 MiB. A piece is
the zip file that `torch.save` wrote at its place in a larger file; the tensor's storage lies in it uncompressed.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fzero.base.arguments import check_arguments
from fzero.base.errors import FzeroError
from fzero.checkpoint.dcp_metadata import DAMAGED, Piece, Stored, TensorEntry, measure_files, read_metadata
from fzero.checkpoint.torch_files import Window, find_elements, load_torch_file
from fzero.files.memory import memory_of
from fzero.layout.boxes import Box, boxes
from fzero.state.safetensors.reading import CAST_NBYTES
from fzero.state.safetensors.transfer import read_into
from fzero.state.sources import Source, TensorSource, check_range, describe


@check_arguments
def open_dcp(path: str | os.PathLike[str]) -> dict[str, Source]:
    """The tensors of a folder that `torch.distributed.checkpoint.save` wrote, as sources by key. Reads no values.

    Keys are those of the saved dict, nested keys joined by dots: "model.layers.0.weight". The tensors may have been
    plain ones, DTensors on any mesh, or those of `save_dcp`. `read_dcp_values` reads what is no tensor.

    Raises:
        FzeroError: for a folder without `.metadata`, or whose metadata are those of no checkpoint; for a file that is
            missing or too short.
    """
    folder = DcpFolder(path)
    return {key: DcpSource(folder, key) for key in folder.contents.tensors}


@check_arguments
def read_dcp_values(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The other values of such a folder by key: numbers, strings, and lists and dicts of them.

    Raises:
        FzeroError: as `open_dcp`; for a value that only a function or class of somebody's can build.
    """
    folder = DcpFolder(path)
    return {key: folder.load(stored, key) for key, stored in folder.contents.values.items()}


class DcpSource:
    """The tensor `key` of a folder. Errors name the tensor by `path`, at first the key."""

    def __init__(self, folder: DcpFolder, key: str) -> None:
        self.folder, self.key, self.path = folder, key, key
        self.entry: TensorEntry = folder.contents.tensors[key]
        self.shape, self.dtype = self.entry.shape, self.entry.dtype
        self._rows = [piece.box.start[:1] for piece in self.entry.pieces]
        self._longest = max((piece.box.size[0] for piece in self.entry.pieces if piece.box.size), default=0)

    def read(self, start: int, out: Tensor) -> None:
        done = 0
        for box in boxes(tuple(self.shape), check_range(self, start, out)):
            numel = torch.Size(box.size).numel()
            if (count := self._read_box(box, out[done : done + numel].view(box.size))) != numel:
                problem = f"{self.folder.path} has {count} of the {numel} elements from {list(box.start)} on"
                raise FzeroError(self.path, problem, DAMAGED)
            done += numel

    def _read_box(self, box: Box, out: Tensor) -> int:
        """Fill `out`, of the shape of `box`, from the pieces that meet it. Returns how many elements they have."""
        count = 0
        for piece in self._pieces_near(box):
            start = [max(*pair) for pair in zip(box.start, piece.box.start)]
            stop = [min(a + b, c + d) for a, b, c, d in zip(*box, *piece.box)]
            if any(low >= high for low, high in zip(start, stop)):
                continue
            here = out
            for dim, (low, high) in enumerate(zip(start, stop)):
                here = here.narrow(dim, low - box.start[dim], high - low)
            first = 0  # of the common elements, in the piece: one run, for a box takes whole rows but of one dimension
            for low, begin, size in zip(start, *piece.box):
                first = first * size + low - begin
            self.folder.read(piece.stored, self.entry.dtype, piece.box.size, first, here, self.path)
            count += here.numel()
        return count

    def _pieces_near(self, box: Box) -> tuple[Piece, ...]:
        """The pieces that may have rows of a box."""
        if not box.start:
            return self.entry.pieces
        first = bisect_left(self._rows, (box.start[0] - self._longest + 1,))
        return self.entry.pieces[first : bisect_left(self._rows, (box.start[0] + box.size[0],))]

    def __repr__(self) -> str:
        return f"DcpSource({self.path}: {describe(self)} in {self.folder.path})"


class DcpFolder:
    """A folder of `torch.distributed.checkpoint`. The constructor reads its metadata and the sizes of its files. Files
    are closed between reads. `nbytes_read` counts the bytes of tensors that were read."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path, self.nbytes_read = Path(path), 0
        self.contents = read_metadata(self.path / ".metadata")
        self._starts = dict[Stored, int | None]()
        for name, nbytes in measure_files(self.contents).items():
            file = self.path / name
            if not os.path.isfile(file):
                raise FzeroError(str(file), "is not there", DAMAGED)
            if (found := file.stat().st_size) < nbytes:
                raise FzeroError(str(file), f"has {found} bytes, the metadata place values up to {nbytes}", DAMAGED)

    def read(
        self, stored: Stored, dtype: torch.dtype, shape: tuple[int, ...], first: int, out: Tensor, leaf: str
    ) -> None:
        """Fill `out`, of any shape, with elements of a stored tensor of this dtype and shape, from element `first` on.

        Raises:
            FzeroError: naming `leaf` and the file.
        """
        with self._open(stored, leaf) as window:
            if stored not in self._starts:
                self._starts[stored] = find_elements(window, dtype, shape)
            if (begin := self._starts[stored]) is None:
                whole = TensorSource(load_torch_file(window, leaf))
                bare = torch.empty(out.numel(), dtype=dtype, device="cpu")
                whole.read(first, bare)
                self.nbytes_read += whole.tensor.nbytes
                out.copy_(bare.view(out.shape))
                return
            start = begin + first * dtype.itemsize
            direct = out.is_contiguous() and out.is_cpu and out.dtype == dtype
            for part in (out,) if direct else _split(out, CAST_NBYTES // dtype.itemsize):
                bare = part if direct else torch.empty(part.shape, dtype=dtype, device="cpu")
                count = read_into(window.fd, memory_of(bare), start)
                self.nbytes_read += count
                if count < bare.nbytes:
                    raise OSError(f"gave {count} of {bare.nbytes} bytes from byte {start} on")
                if not direct:
                    part.copy_(bare)
                start += bare.nbytes

    def load(self, stored: Stored, leaf: str) -> Any:
        """What was stored, of classes that `torch.load` knows to be harmless.

        Raises:
            FzeroError: naming `leaf` and the file.
        """
        with self._open(stored, leaf) as window:
            return load_torch_file(window, "")

    @contextmanager
    def _open(self, stored: Stored, leaf: str) -> Iterator[Window]:
        file = self.path / stored.file
        try:
            with open(file, "rb") as opened:
                yield Window(opened.fileno(), stored.span)
        except Exception as error:  # zipfile raises many kinds for damaged bytes
            way_out = error.way_out if isinstance(error, FzeroError) else DAMAGED
            problem = getattr(error, "problem", str(error))
            where = f"{file} at bytes {stored.span.start} to {stored.span.stop}"
            raise FzeroError(leaf, f"{where} cannot be read: {problem}", way_out) from error


def _split(out: Tensor, numel: int) -> Iterator[Tensor]:
    """Views of `out` that follow each other in row-major order, of at most `numel` elements or one element each."""
    if out.numel() <= max(1, numel):
        yield out
        return
    dim = next(dim for dim, size in enumerate(out.shape) if size > 1)
    step = max(1, numel // (out.numel() // out.shape[dim]))
    for part in out.split(step, dim):
        yield from _split(part, numel)
