"""DCP metadata: which tensors a folder of `torch.distributed.checkpoint` has, and where the pieces of each one lie.

The file `.metadata` is a pickle, and unpickling may call any function that the pickle names. Here a pickle may name
classes of `KNOWN` alone, and gets records in their place: what was stored, without torch's code. Nothing is called.
"""

from __future__ import annotations

import io
import os
import pickle
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fzero.base.errors import FzeroError
from fzero.layout.boxes import Box

DAMAGED = "the checkpoint is damaged or incomplete, or another program wrote it; save or copy it again"

_DCP, _SHARD = "torch.distributed.checkpoint", "torch.distributed._shard.sharded_tensor.metadata"
KNOWN = {
    *((f"{_DCP}.metadata", name) for name in (
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    )),
    (f"{_DCP}.filesystem", "_StorageInfo"),
    (_SHARD, "TensorProperties"), (_SHARD, "MEM_FORMAT_ENCODING"),  # torch before 2.3
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"), ("pathlib", "WindowsPath"),
    ("pathlib._local", "PosixPath"), ("pathlib._local", "WindowsPath"),  # Python 3.13
}  # fmt: skip
"""`(module, name)` of what DCP's pickles name, beside `torch.Size` and torch's dtypes."""


class Stored(NamedTuple):
    """Some bytes of a file: those of one `torch.save`."""

    file: str
    span: range


class BoxPiece(NamedTuple):
    """A rectangle of a tensor, and where the elements are stored."""

    box: Box
    stored: Stored


class TensorEntry(NamedTuple):
    """One tensor of a checkpoint. Its pieces are in order of their first rows."""

    dtype: torch.dtype
    shape: torch.Size
    pieces: tuple[BoxPiece, ...]


class Contents(NamedTuple):
    """All of a checkpoint by keys: tensors, and other values, such as numbers and strings."""

    tensors: dict[str, TensorEntry]
    values: dict[str, Stored]


def read_metadata(file: Path) -> Contents:
    """What the file `.metadata` of a checkpoint says. The file is not trusted: every entry is checked.

    Raises:
        FzeroError: for a file that cannot be read or is no metadata of DCP; for a pickle that names anything unknown;
            for a tensor whose stored pieces are unknown, or lie in files outside of the folder.
    """
    try:
        text = file.read_bytes()
    except OSError as error:
        problem = f"cannot be read: {error.strerror or error}"
        raise FzeroError(str(file), problem, "give a folder that torch.distributed.checkpoint.save wrote") from error
    try:
        found = _Unpickler(io.BytesIO(text)).load()
        entries, storage = found.fields["state_dict_metadata"], found.fields["storage_data"]
        places = {_key_of(index.fields): _parse_place(info.fields) for index, info in storage.items()}
        return _parse(entries, places)
    except FzeroError as error:
        raise FzeroError(str(file), error.problem, error.way_out) from error
    except Exception as error:  # a pickle of anything else fails in as many ways as there are pickles
        problem = f"is not the metadata of a checkpoint: {type(error).__name__}: {error}"
        raise FzeroError(str(file), problem, DAMAGED) from error


class _Record:
    """An object of a pickle: its class's name, the arguments that made it, and its fields."""

    def __new__(cls, *args: Any) -> _Record:
        record = super().__new__(cls)
        record.args, record.fields = args, {}
        return record

    args: tuple[Any, ...]
    fields: Any

    def __setstate__(self, state: Any) -> None:
        self.fields = state


class _Unpickler(pickle.Unpickler):
    """Builds a record, of a class that nothing else uses, in place of every object."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch", "Size"):
            return tuple
        known = getattr(torch, name, None) if module == "torch" else None
        if isinstance(known, torch.dtype):
            return known
        if (module, name) in KNOWN:
            return type(name, (_Record,), {})
        problem = f"its pickle names {module}.{name}, which is no part of a checkpoint's metadata"
        raise FzeroError("", problem, "do not load this file with torch either, unless you trust its author")


def _parse(entries: dict[str, Any], places: dict[Any, Stored]) -> Contents:
    tensors, values = dict[str, TensorEntry](), dict[str, Stored]()
    for key, entry in entries.items():
        if type(entry).__name__ == "TensorStorageMetadata":
            tensors[_check(key, str)] = _parse_tensor(key, entry.fields, places)
        else:
            values[_check(key, str)] = places[key, None]
    return Contents(tensors, values)


def _parse_tensor(key: str, fields: dict[str, Any], places: dict[Any, Stored]) -> TensorEntry:
    shape, dtype = torch.Size(_check_sizes(fields["size"])), _check(fields["properties"].fields[0], torch.dtype)
    pieces = []
    for chunk in fields["chunks"]:
        box = Box(_check_sizes(chunk.fields["offsets"]), _check_sizes(chunk.fields["sizes"]))
        if not len(box.start) == len(box.size) == len(shape):
            raise FzeroError("", f"{key} has shape {list(shape)} and a piece {box}", DAMAGED)
        if any(start + size > length for start, size, length in zip(*box, shape)):
            raise FzeroError("", f"{key} has shape {list(shape)}, its piece {box} reaches outside", DAMAGED)
        if 0 not in box.size:
            pieces.append(BoxPiece(box, places[key, box.start]))
    return TensorEntry(dtype, shape, tuple(sorted(pieces, key=lambda piece: piece.box)))


def _key_of(fields: dict[str, Any]) -> tuple[str, tuple[int, ...] | None]:
    """The key and the offsets of a `MetadataIndex`."""
    offset = fields.get("offset")
    return _check(fields["fqn"], str), None if offset is None else _check_sizes(offset)


def _parse_place(fields: dict[str, Any]) -> Stored:
    file, start, length = _check(fields["relative_path"], str), fields["offset"], fields["length"]
    if os.path.basename(file) != file or file in ("", ".", ".."):
        raise FzeroError("", f"it places values in {file!r}", "a checkpoint names files in its own folder")
    if fields.get("transform_descriptors"):
        problem = f"{file} has its bytes transformed by {fields['transform_descriptors']}"
        raise FzeroError("", problem, "load the checkpoint with torch, and save it without extensions")
    start, length = _check_sizes((start, length))
    return Stored(file, range(start, start + length))


def _check_sizes(value: Iterable[Any]) -> tuple[int, ...]:
    sizes = tuple(value)
    if not all(type(size) is int and 0 <= size < 2**63 for size in sizes):
        raise FzeroError("", f"it has {sizes!r:.80} in place of sizes", DAMAGED)
    return sizes


def _check(value: Any, expected: type) -> Any:
    if not isinstance(value, expected):
        raise FzeroError("", f"it has {value!r:.80} in place of a {expected.__name__}", DAMAGED)
    return value


def measure_files(contents: Contents) -> dict[str, int]:
    """The bytes that each file of a checkpoint has at least."""
    ends: defaultdict[str, int] = defaultdict(int)
    pieces = (piece.stored for entry in contents.tensors.values() for piece in entry.pieces)
    for stored in (*pieces, *contents.values.values()):
        ends[stored.file] = max(ends[stored.file], stored.span.stop)
    return dict(ends)
