"""Header: the table at the start of a safetensors file: dtype, shape and byte range of each tensor.

    8 bytes              n, the length of the header, little-endian
    n bytes              JSON: {"<key>": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ...}, then spaces
    the rest             the data: row-major little-endian elements, tensor after tensor without a gap

Format: https://github.com/huggingface/safetensors
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from fzero.base.errors import FzeroError
from fzero.base.shapes import global_shape

PREFIX = 8
"""Bytes of the number that is the length of the header. The data starts at a multiple of it."""
MAX_NBYTES = 100_000_000
"""The longest header in bytes, as in the reference implementation."""
METADATA = "__metadata__"
DAMAGED = "the file is damaged, incomplete or no safetensors file; write or download it again"

DTYPES = {
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F32": torch.float32,
    "U32": torch.uint32,
    "I32": torch.int32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Dtypes by their names in a file, in the order in which tensors lie in a file: wide dtypes first, so that each tensor
is aligned. The order is the reference implementation's, so that files are equal byte for byte."""

NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Entry(NamedTuple):
    """One tensor. `span` is its range of bytes, counted from the start of the data."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    span: range


class Header(NamedTuple):
    """The tensors of a file by key, and its metadata."""

    entries: dict[str, Entry]
    metadata: dict[str, str]

    @property
    def nbytes(self) -> int:
        """Bytes of the data."""
        return max((entry.span.stop for entry in self.entries.values()), default=0)


def plan_header(values: Mapping[str, Any], metadata: Mapping[str, str]) -> Header:
    """The header of a file of these values. A value is anything with `shape` and `dtype`. Tensors are sorted by dtype,
    in the order of `DTYPES`, then by key.

    Raises:
        FzeroError: for a dtype that the format lacks, the key "__metadata__", and metadata that are not strings.
    """
    for key, value in values.items():
        if value.dtype not in NAMES:
            raise FzeroError(key, f"safetensors has no {value.dtype}, only {', '.join(DTYPES)}", "cast it")
        if key == METADATA:
            raise FzeroError(key, "safetensors keeps this key for its metadata", "name the leaf otherwise")
    for key, text in metadata.items():
        if not isinstance(key, str) or not isinstance(text, str):
            raise FzeroError(METADATA, f"has {key!r}: {text!r}", "metadata are strings by strings")
    order, start, entries = list(NAMES), 0, {}
    for key in sorted(values, key=lambda key: (order.index(values[key].dtype), key)):
        dtype, shape = values[key].dtype, global_shape(values[key])
        entries[key] = Entry(dtype, shape, range(start, start + math.prod(shape) * dtype.itemsize))
        start = entries[key].span.stop
    return Header(entries, dict(sorted(metadata.items())))


def render_header(header: Header) -> bytes:
    """The bytes of a file before its data: the length, which `parse_length` reads, and the text, which `parse_header`
    reads."""
    table: dict[str, Any] = {METADATA: header.metadata} if header.metadata else {}
    for key, (dtype, shape, span) in header.entries.items():
        table[key] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [span.start, span.stop]}
    text = json.dumps(table, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % PREFIX)
    return len(text).to_bytes(PREFIX, "little") + text


def parse_length(prefix: bytes, nbytes: int, file: str) -> int:
    """The length in bytes of the header of a file of `nbytes` bytes that starts with `prefix`.

    Raises:
        FzeroError: for a header longer than the file, or longer than `MAX_NBYTES`.
    """
    if len(prefix) < PREFIX:
        raise FzeroError(file, f"has {nbytes} bytes, the length of a header alone takes {PREFIX}", DAMAGED)
    found = int.from_bytes(prefix, "little")
    if found > nbytes - PREFIX:
        raise FzeroError(file, f"says its header has {found} bytes, {nbytes - PREFIX} follow", DAMAGED)
    if found > MAX_NBYTES:
        raise FzeroError(file, f"says its header has {found} bytes, the format allows {MAX_NBYTES}", DAMAGED)
    return found


def parse_header(text: bytes, nbytes: int, file: str) -> Header:
    """The header of a file with `nbytes` bytes of data. The text is not trusted: every entry is checked.

    Raises:
        FzeroError: for anything but a table of tensors that tile the data.
    """
    table = _parse_table(text, file)
    metadata = table.pop(METADATA, None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise FzeroError(file, f"its {METADATA} are not strings by strings", DAMAGED)
    entries = {key: _parse_entry(key, item, nbytes, file) for key, item in table.items()}
    _check_tiling(entries, nbytes, file)
    return Header(entries, metadata)


def _parse_table(text: bytes, file: str) -> dict[str, Any]:
    try:
        table = json.loads(text.decode(), object_pairs_hook=_refuse_duplicates)
    except (ValueError, RecursionError) as error:
        raise FzeroError(file, f"its header is not the JSON of a table: {error}", DAMAGED) from error
    if not isinstance(table, dict):
        raise FzeroError(file, f"its header is a {type(table).__name__}, not a table", DAMAGED)
    return table


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for key, value in pairs:
        if key in table:
            raise ValueError(f"the key {key!r} stands in it twice")
        table[key] = value
    return table


def _parse_entry(key: str, item: Any, nbytes: int, file: str) -> Entry:
    if not isinstance(item, dict) or not {"dtype", "shape", "data_offsets"} <= item.keys():
        raise FzeroError(key, f"{file} gives no dtype, shape and data_offsets for it, but {item!r:.80}", DAMAGED)
    name, shape, offsets = item["dtype"], item["shape"], item["data_offsets"]
    if not isinstance(name, str) or name not in DTYPES:
        raise FzeroError(key, f"{file} gives it the dtype {name!r:.80}, torch has {', '.join(DTYPES)}")
    if not _are_sizes(shape):
        raise FzeroError(key, f"{file} gives it the shape {shape!r:.80}, not a list of sizes", DAMAGED)
    if not _are_sizes(offsets) or len(offsets) != 2 or not offsets[0] <= offsets[1] <= nbytes:
        problem = f"{file} says that its bytes are {offsets!r:.80} of {nbytes}, not [begin, end] within them"
        raise FzeroError(key, problem, DAMAGED)
    dtype, (start, stop) = DTYPES[name], offsets
    if math.prod(shape) * dtype.itemsize != stop - start:
        takes = f"{name} of shape {shape} takes {math.prod(shape) * dtype.itemsize}"
        raise FzeroError(key, f"{file} has {stop - start} bytes for it, {takes}", DAMAGED)
    return Entry(dtype, tuple(shape), range(start, stop))


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(size) is int and 0 <= size < 2**63 for size in value)


def _check_tiling(entries: Mapping[str, Entry], nbytes: int, file: str) -> None:
    """Raise for tensors that overlap, and for bytes that belong to no tensor."""
    end = 0
    for key, entry in sorted(entries.items(), key=lambda item: (item[1].span.start, item[1].span.stop)):
        if entry.span.start != end:
            problem = f"{file} has it begin at byte {entry.span.start}, the tensor before it ends at {end}"
            raise FzeroError(key, problem, DAMAGED)
        end = entry.span.stop
    if end != nbytes:
        raise FzeroError(file, f"has {nbytes} bytes of data, its tensors end at {end}", DAMAGED)
