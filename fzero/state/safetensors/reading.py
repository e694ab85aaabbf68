"""Reading: safetensors files as a dict of sources, each of which reads only the range that is asked for.

Why not `safetensors.safe_open(...).get_slice` with the boxes of a range: get_slice maps the file, and the mapped pages
are resident beside the tensor that the values are copied to. Reading 16 MiB of a 256 MiB leaf grows the peak of
resident memory by 16 MiB with `os.preadv` and by 34 MiB with get_slice, for whole rows and for a range that starts in
mid-row; both touch 16 MiB of the file (safetensors 0.8.0, torch 2.13, Linux). A file that shrinks while it is open
kills a process that has mapped it, by SIGBUS; preadv returns fewer bytes, which become an error that names the leaf.
"""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from fzero.base.arguments import check_arguments
from fzero.base.dtypes import describe_form
from fzero.base.errors import FzeroError
from fzero.state.safetensors.header import DAMAGED, PREFIX, Entry, Header, parse_header, parse_length
from fzero.state.safetensors.transfer import read_elements
from fzero.state.sources import check_range

CHANGED = "leave a file alone until every rank has read its part, then open it again"
PATTERNS = ("model.safetensors", "model.safetensors.index.json", "*.safetensors.index.json", "*.safetensors")
"""Files that stand for a directory, in order of preference: Hugging Face's names first, then any other name."""


class TensorFile:
    """One safetensors file. The constructor reads and checks the header. The file is closed between reads.

    `nbytes_read` counts the bytes of tensors that were read.

    Raises:
        FzeroError: for a file that cannot be read, or that is not a valid safetensors file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path, self.nbytes_read = Path(path), 0
        name = str(path)
        if sys.byteorder != "little":
            raise FzeroError(name, f"is little-endian, this machine is {sys.byteorder}-endian")
        with self._open(name) as file:
            self._size, *self._identity = _identify(file)
            count = parse_length(file.read(PREFIX), self._size, name)
            self._data = PREFIX + count
            self.header: Header = parse_header(file.read(count), self._size - self._data, name)

    def read(self, entry: Entry, start: int, out: Tensor, leaf: str) -> None:
        """Fill `out`, 1-d, with the elements of a tensor from `start` on.

        Raises:
            FzeroError: naming `leaf`, when the file cannot be read, or changed since the constructor read its header.
        """
        begin, wanted = entry.span.start + start * entry.dtype.itemsize, out.numel() * entry.dtype.itemsize
        with self._open(leaf) as file:
            self._check_unchanged(file, leaf)
            count = read_elements(file.fileno(), out, entry.dtype, self._data + begin)
            self.nbytes_read += count
            self._check_unchanged(file, leaf)
        if count < wanted:
            raise FzeroError(leaf, f"{self.path} gave {count} of the {wanted} bytes asked for", DAMAGED)

    @contextmanager
    def _open(self, leaf: str) -> Iterator[BinaryIO]:
        try:
            with _open_regular(self.path) as file:
                yield file
        except OSError as error:
            raise FzeroError(
                leaf, f"{self.path} cannot be read: {error.strerror or error}", "see to the file"
            ) from error

    def _check_unchanged(self, file: BinaryIO, leaf: str) -> None:
        size, *identity = _identify(file)
        if size != self._size:
            raise FzeroError(leaf, f"{self.path} has {size} bytes, it had {self._size} when it was opened", CHANGED)
        if identity[0] != self._identity[0]:
            problem = f"{self.path} was written at {identity[0]} ns, what was opened at {self._identity[0]} ns"
            raise FzeroError(leaf, problem, CHANGED)
        if identity != self._identity:
            raise FzeroError(leaf, f"{self.path} is another file than when it was opened", CHANGED)

    def __repr__(self) -> str:
        return f"TensorFile({self.path}: {len(self.header.entries)} tensors, {self.header.nbytes} bytes)"


class FileSource:
    """The tensor `key` of a file. Errors name the tensor by `path`, by default the key.

    `dtype` is the source's dtype, by default the stored one. `read` casts straight from the stored dtype to that of
    `out`.

    Raises:
        FzeroError: when the file has no such key.
    """

    def __init__(
        self,
        file: TensorFile,
        key: str,
        path: str | None = None,
        dtype: torch.dtype | None = None,
        is_frozen: bool = False,
    ) -> None:
        self.is_frozen = is_frozen
        self.path = key if path is None else path
        if key not in file.header.entries:
            raise FzeroError(self.path, f"{file.path} has no {key!r} among its {len(file.header.entries)} tensors")
        self.file, self.key, self._entry = file, key, file.header.entries[key]
        self.shape, self.dtype = torch.Size(self._entry.shape), dtype or self._entry.dtype

    @property
    def where(self) -> str:
        """The path of the file."""
        return str(self.file.path)

    @property
    def stored(self) -> torch.dtype:
        """The dtype in the file."""
        return self._entry.dtype

    def read(self, start: int, out: Tensor) -> None:
        check_range(self, start, out)
        self.file.read(self._entry, start, out, self.path)

    def __repr__(self) -> str:
        return f"FileSource({self.path}: {describe_form(self)} in {self.file.path})"


@check_arguments
def open_safetensors(path: str | os.PathLike[str]) -> dict[str, FileSource]:
    """The tensors of a safetensors file, of an index file `*.safetensors.index.json`, or of a directory with one of
    these, as sources by key. Reads headers only; the sources of one file share a `TensorFile`. Of an index, only the
    tensors that it names are returned.

    Raises:
        FzeroError: for a file that is missing or not valid; for a directory with no file, or with several files of the
            preferred name pattern; for an index that does not agree with its files.
    """
    found = Path(path)
    if os.path.isdir(found):  # `Path.is_dir` raises for a name that is too long
        found = _find_file(found)
    if found.suffix == ".json":
        return _open_index(found)
    file = TensorFile(found)
    return {key: FileSource(file, key) for key in file.header.entries}


def _find_file(directory: Path) -> Path:
    for pattern in PATTERNS:
        found = sorted(directory.glob(pattern))
        if len(found) == 1:
            return found[0]
        if found:
            names = ", ".join(file.name for file in found)
            raise FzeroError(
                str(directory), f"has {len(found)} files {pattern}: {names}", "give the path of one of them"
            )
    raise FzeroError(str(directory), f"has 0 files {PATTERNS[-1]}", "give the path of a safetensors file")


def _open_index(index: Path) -> dict[str, FileSource]:
    """The tensors that an index names, in the order of the index."""
    weights = _read_weight_map(index)
    files: dict[str, TensorFile] = {}
    for key, name in weights.items():
        if name not in files:
            if Path(name).name != name:
                raise FzeroError(key, f"{index} has it in {name!r:.300}", "an index names files in its own directory")
            if not os.path.exists(index.parent / name):  # `Path.exists` raises for a name that is too long
                absent = sum(other == name for other in weights.values())
                raise FzeroError(
                    key, f"{index} has it and {absent - 1} more in {name:.300}, which is not there", DAMAGED
                )
            files[name] = TensorFile(index.parent / name)
    return {key: FileSource(files[name], key) for key, name in weights.items()}


def _read_weight_map(index: Path) -> Mapping[str, str]:
    try:
        with _open_regular(index) as file:
            weights = json.loads(file.read().decode())["weight_map"]
    except OSError as error:
        raise FzeroError(str(index), f"cannot be read: {error.strerror or error}", "see to the file") from error
    except (ValueError, RecursionError, LookupError, TypeError) as error:
        raise FzeroError(str(index), f"is not an index with a weight_map: {error!r}", DAMAGED) from error
    if not isinstance(weights, dict) or not all(isinstance(name, str) for name in weights.values()):
        raise FzeroError(str(index), f"its weight_map is not file names by keys: {weights!r:.80}", DAMAGED)
    return weights


def _open_regular(path: Path) -> BinaryIO:
    """A file to read.

    Raises:
        FzeroError: for a FIFO, a socket or a device: to open one may wait for ever.
        OSError: for a file that cannot be opened, also for a name that no file can have.
    """
    try:
        mode = os.stat(path).st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            raise FzeroError(str(path), "is a FIFO, a socket or a device", "give a regular file")
        return open(path, "rb")
    except ValueError as error:
        raise OSError(str(error)) from error


def _identify(file: BinaryIO) -> tuple[int, int, int, int]:
    """A file's size in bytes, the time of its last change in nanoseconds, and the numbers by which the system knows
    it: a file that replaced another one may have the size and the time of that."""
    status = os.fstat(file.fileno())
    return status.st_size, status.st_mtime_ns, status.st_dev, status.st_ino
