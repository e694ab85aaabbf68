"""Reading folders of `torch.distributed.checkpoint` by ranges.

torch's reader loads every stored piece that it needs a part of: for 16 MiB of a 256 MiB leaf, the peak of resident
memory grows by 515 MiB. Here only the elements that are asked for are read, and the peak grows by 16 MiB. A piece is
the zip file that `torch.save` wrote at its place in a larger file; the tensor's storage lies in it uncompressed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fzero.base.arguments import check_arguments
from fzero.base.errors import FzeroError
from fzero.formats.dcp_metadata import DAMAGED, Stored, measure_files, read_metadata
from fzero.formats.torch_files import Window, find_elements, load_torch_file
from fzero.layout.strides import Copy, dense, view_to_view
from fzero.state.pieces import PiecedSource
from fzero.state.safetensors.transfer import read_elements
from fzero.state.sources import Source, TensorSource


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


class DcpSource(PiecedSource):
    """The tensor `key` of a folder."""

    def __init__(self, folder: DcpFolder, key: str) -> None:
        self.folder, entry = folder, folder.contents.tensors[key]
        strides, parts = dense(entry.shape), list[tuple[Copy, Source]]()
        for box, stored in entry.pieces:
            held = _Held(folder, stored, torch.Size(box.size), entry.dtype, key)
            first = sum(at * stride for at, stride in zip(box.start, strides))
            parts += [(copy, held) for copy in view_to_view(box.size, dense(box.size), strides, to=first)]
        super().__init__(key, entry.shape, entry.dtype, parts, str(folder.path), DAMAGED)


class _Held:
    """What one `torch.save` stored: a `Source`."""

    def __init__(self, folder: DcpFolder, stored: Stored, shape: torch.Size, dtype: torch.dtype, path: str) -> None:
        self.shape, self.dtype, self.path = shape, dtype, path
        self._folder, self._stored = folder, stored
        self._begin: int | None = -1  # the byte of the first element; None where they do not lie side by side

    def read(self, start: int, out: Tensor) -> None:
        with self._folder.open(self._stored, self.path) as window:
            if self._begin == -1:
                self._begin = find_elements(window, self.dtype, tuple(self.shape))
            if self._begin is None:
                whole = TensorSource(load_torch_file(window, self.path))
                whole.read(start, out)
                self._folder.nbytes_read += whole.tensor.nbytes
                return
            begin, wanted = self._begin + start * self.dtype.itemsize, out.numel() * self.dtype.itemsize
            count = read_elements(window.fd, out, self.dtype, begin)
            self._folder.nbytes_read += count
            if count < wanted:
                raise OSError(f"gave {count} of {wanted} bytes from byte {begin} on")


class DcpFolder:
    """A folder of `torch.distributed.checkpoint`. The constructor reads its metadata and the sizes of its files. Files
    are closed between reads. `nbytes_read` counts the bytes of tensors that were read."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path, self.nbytes_read = Path(path), 0
        self.contents = read_metadata(self.path / ".metadata")
        for name, nbytes in measure_files(self.contents).items():
            file = self.path / name
            if not os.path.isfile(file):
                raise FzeroError(str(file), "is not there", DAMAGED)
            if (found := file.stat().st_size) < nbytes:
                raise FzeroError(str(file), f"has {found} bytes, the metadata place values up to {nbytes}", DAMAGED)

    def load(self, stored: Stored, leaf: str) -> Any:
        """What was stored, of classes that `torch.load` knows to be harmless. Raises as `open`."""
        with self.open(stored, leaf) as window:
            return load_torch_file(window, "")

    @contextmanager
    def open(self, stored: Stored, leaf: str) -> Iterator[Window]:
        """What was stored, to read.

        Raises:
            FzeroError: naming `leaf` and the file, where the block fails.
        """
        file = self.path / stored.file
        try:
            with open(file, "rb") as opened:
                yield Window(opened.fileno(), stored.span)
        except Exception as error:  # zipfile raises many kinds for damaged bytes
            way_out = error.way_out if isinstance(error, FzeroError) else DAMAGED
            problem = getattr(error, "problem", str(error))
            where = f"{file} at bytes {stored.span.start} to {stored.span.stop}"
            raise FzeroError(leaf, f"{where} cannot be read: {problem}", way_out) from error
