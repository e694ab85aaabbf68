"""Manifest: the JSON file that says what a checkpoint has, and where.

    {"format": "fzero.checkpoint", "version": 1, "crc32": "9ae0daaf", "body": {
        "step": 1200, "save": "5f0c...",                                           a number that no other save has
        "mesh": {"replica": 2, "fsdp": 4}, "shard_axis": "fsdp",
        "leaves": [["params.blocks.0.up", "F32", [64, 16], 1024, 4096, 0], ...],   path, dtype and numbers of a `Place`
        "values": [["schedule", "str", "cosine"], ...],                             leaves that are no tensors
        "files": [[81920, "1c291ca3", ""], ...],                                    bytes, CRC-32, SHA-256 or ""
        "metadata": {...}, "versions": {"fzero": "0.1.0", "torch": "2.13.0"}}}

The CRC-32 is of the body's text. File number n is called `rank-n.safetensors`: a manifest names no paths, so that
nothing can lead out of the folder. Nothing is executed to read it. The header of each file has the save too, and the
file's number (`tag_file`): so a file in the place of another is found when it is opened. Old checkpoints have neither.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fzero.base.errors import FzeroError
from fzero.base.garbage import pause_garbage_collection
from fzero.base.mesh import JOINT
from fzero.checkpoint.places import Grid, Place
from fzero.state.safetensors.header import DTYPES, NAMES

FORMAT, VERSIONS = "fzero.checkpoint", (1, 2, 3)
"""The version is 2 where leaves are split over model axes, 3 where the shard axis is of axes that are not side by side
or not that of all leaves, and else 1: the oldest that an fzero knows which reads the checkpoint."""
MANIFEST = "manifest.json"
ANOTHER = "the file is damaged or not fzero's; put it back, or load another checkpoint"
SPLIT = ', "body": '
"""What stands between the head of a manifest and its body."""

OTHERS = {"C128": torch.complex128}
"""Dtypes that safetensors lacks, by their names in a manifest. Their elements lie in a file as bytes."""
DTYPE_NAMES = NAMES | {dtype: name for name, dtype in OTHERS.items()}
NAMED_DTYPES = DTYPES | OTHERS

TAGS = "save", "file"
"""Keys of a file's header."""
MAX_DEPTH = 100
"""Dicts and lists of metadata within one another."""

Value = bool | int | float | complex | str
KINDS: dict[str, type] = {kind.__name__: kind for kind in (bool, int, float, complex, str)}
"""Leaves that are no tensors, by the names of their types."""


class FileEntry(NamedTuple):
    """One file: its bytes, their CRC-32, and their SHA-256 or ""."""

    nbytes: int
    crc32: str
    sha256: str


class Manifest(NamedTuple):
    """All that a checkpoint says of itself. `mesh` has the sizes of the axes of the mesh that saved it. `save` tells
    one save from every other one; an old checkpoint has ""."""

    step: int
    save: str
    mesh: dict[str, int]
    shard_axis: str
    grid: Grid
    places: dict[str, Place]
    values: dict[str, Value]
    files: list[FileEntry]
    metadata: dict[str, Any]
    versions: dict[str, str]


def name_file(number: int) -> str:
    """The name of a file of a checkpoint: `3 -> "rank-00003.safetensors"`."""
    return f"rank-{number:05}.safetensors"


def tag_file(save: str, number: int) -> dict[str, str]:
    """What the header of a file says of the file: the save that wrote it, and its number."""
    return dict(zip(TAGS, (save, str(number)))) if save else {}


def check_metadata(value: Any, path: str = "metadata", depth: int = 0) -> None:
    """Raise for what JSON would give back as something else, such as a key that is no string, or a tuple.

    Raises:
        FzeroError: naming the entry.
    """
    way_out = "metadata are values of JSON: give numbers, strings, None, lists, and dicts with strings as keys"
    if depth > MAX_DEPTH:
        raise FzeroError(f"{path:.80}", f"is nested more than {MAX_DEPTH} deep", way_out)
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise FzeroError(path, f"has the key {key!r:.80}, a {type(key).__name__}", way_out)
            check_metadata(item, f"{path}.{key}", depth + 1)
    elif isinstance(value, list):
        for number, item in enumerate(value):
            check_metadata(item, f"{path}.{number}", depth + 1)
    elif value is not None and not isinstance(value, (bool, int, float, str)):
        raise FzeroError(path, f"is {value!r:.80}, a {type(value).__name__}", way_out)


def render_manifest(manifest: Manifest) -> bytes:
    """The bytes of a manifest: `parse_manifest` is the inverse."""
    body = {
        "step": manifest.step,
        "save": manifest.save,
        "mesh": manifest.mesh,
        "shard_axis": manifest.shard_axis,
        "leaves": render_places(manifest.places.values()),
        "values": [[path, *render_value(value)] for path, value in manifest.values.items()],
        "files": manifest.files,
        "metadata": manifest.metadata,
        "versions": manifest.versions,
    }
    text = json.dumps(body, separators=(",", ":")).encode()
    version = _choose_version(manifest)
    head = json.dumps({"format": FORMAT, "version": version, "crc32": render_crc(zlib.crc32(text))})
    return head.removesuffix("}").encode() + SPLIT.encode() + text + b"}"


def _choose_version(manifest: Manifest) -> int:
    names, along = list(manifest.mesh), manifest.shard_axis.split(JOINT) if manifest.mesh else []
    first, places = names.index(along[0]) if along else 0, manifest.places.values()
    if any(place.axis for place in places) or names[first : first + len(along)] != along:
        return 3
    return 2 if any(place.firsts for place in places) else 1


def render_places(places: Iterable[Place]) -> list[tuple[Any, ...]]:
    """The places of leaves as JSON has them."""
    rows = [(x.path, DTYPE_NAMES[x.dtype], *(x[2:9] if x.firsts else x[2:6])) for x in places]
    return [(*row, place.axis) if place.axis else row for row, place in zip(rows, places)]


def render_value(value: Value) -> tuple[str, str]:
    """Type and text of a leaf that is no tensor. The text of a float is exact, also of one that JSON lacks."""
    kind = type(value).__name__
    return kind, value if isinstance(value, str) else repr(value)


def render_crc(crc: int) -> str:
    """Eight hexadecimal digits."""
    return f"{crc:08x}"


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint's folder.

    Raises:
        FzeroError: for a file that cannot be read, is damaged, or is of a newer version of the format.
    """
    file = folder / MANIFEST
    try:
        data = file.read_bytes()
    except OSError as error:
        raise FzeroError(str(file), f"cannot be read: {error.strerror or error}", "see to the file") from error
    return parse_manifest(data, str(file))


@pause_garbage_collection()
def parse_manifest(data: bytes, file: str) -> Manifest:
    """The manifest in these bytes. The text is not trusted: every entry is checked.

    Raises:
        FzeroError: naming `file`, for anything that `render_manifest` does not write.
    """
    try:
        table = json.loads(data)
        if table["format"] != FORMAT:
            raise FzeroError(file, f"has the format {table['format']!r:.80}, not {FORMAT!r}", ANOTHER)
        if table["version"] not in VERSIONS:
            problem = f"is version {table['version']!r:.80} of the format, this fzero reads 1 to {VERSIONS[-1]}"
            raise FzeroError(file, problem, "install a newer fzero")
        text = data[data.index(SPLIT.encode()) + len(SPLIT) : -1]
        found = render_crc(zlib.crc32(text))
        if table["crc32"] != found:
            raise FzeroError(file, f"has the CRC-32 {found}, its head says {table['crc32']!r:.80}", ANOTHER)
        return _parse_body(table["body"])
    except FzeroError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise FzeroError(file, f"is not the manifest of a checkpoint: {error!r:.200}", ANOTHER) from error


def _parse_body(body: Mapping[str, Any]) -> Manifest:
    """The manifest of a body. Raises ValueError, LookupError or TypeError for anything unexpected."""
    mesh, axis = {name: _natural(size) for name, size in body["mesh"].items()}, body["shard_axis"]
    grid = Grid.of(mesh, axis)
    places = {place.path: place for place in _parse_places(body["leaves"], grid)}
    values = {path: _parse_value(kind, text) for path, kind, text in body["values"]}
    files = [FileEntry(_natural(nbytes), str(crc), str(sha)) for nbytes, crc, sha in body["files"]]
    if len(places) < len(body["leaves"]) or len(values) < len(body["values"]) or places.keys() & values.keys():
        raise ValueError("a leaf stands in it twice")
    if len(files) != grid.files:
        raise ValueError(f"{len(files)} files for {grid.files} ranks")
    save, metadata, versions = body.get("save", ""), dict(body["metadata"]), dict(body["versions"])
    if type(save) is not str:
        raise ValueError(f"the save is {save!r:.80}, not a text")
    return Manifest(_natural(body["step"]), save, mesh, axis, grid, places, values, files, metadata, versions)


def _parse_places(rows: Any, grid: Grid) -> Iterator[Place]:
    _check_naturals([number for row in rows for numbers in (row[2], row[3:8], *row[8:9]) for number in numbers])
    for path, dtype, shape, start, shard, first, *split in rows:
        place = Place(path, NAMED_DTYPES[dtype], tuple(shape), start, shard, first)
        if split:
            dim, parts, firsts, axis = split if len(split) == 4 else (*split, "")
            place = place._replace(dim=dim, parts=parts, firsts=tuple(firsts), axis=axis)
            if not firsts or dim >= len(shape) or not parts or shape[dim] % parts or (place.numel and not shard):
                raise ValueError(f"{path} is no split leaf: {shape}, {split}")
        firsts, world = [part.first for part in place.list_parts()], grid.count(place.axis)
        is_within = start + place.numel <= shard * world and not any(grid.position(x, place.axis) for x in firsts)
        if type(path) is not str or max(firsts) >= grid.files or (shard and not is_within):
            raise ValueError(f"{path} is not in the files of {grid.files} ranks: {shape}, {start}, {shard}, {firsts}")
        yield place


def _parse_value(kind: str, text: str) -> Value:
    if not isinstance(text, str) or (kind == "bool" and text not in ("True", "False")):
        raise ValueError(f"{text!r:.80} is no {kind}")
    return text == "True" if kind == "bool" else KINDS[kind](text)


def _natural(number: Any) -> int:
    _check_naturals([number])
    return int(number)


def _check_naturals(numbers: list[Any]) -> None:
    """Raise for anything but numbers from 0 on. All numbers at once: there are half a million in a large manifest."""
    kinds = set(map(type, numbers)) - {int}
    if kinds or (numbers and (min(numbers) < 0 or max(numbers) >= 2**63)):
        bad = next(x for x in numbers if type(x) is not int or not 0 <= x < 2**63)
        raise ValueError(f"{bad!r:.80} is not a number from 0 on")
