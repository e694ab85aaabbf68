"""Files of `torch.save`, read without running what they name: tensors, numbers, strings and containers alone.

Such a file is a zip file. Each storage of a tensor lies in it uncompressed, as a file of its own: "data/0".
"""

from __future__ import annotations

import io
import os
import re
import sys
import zipfile
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fzero.base.errors import FzeroError
from fzero.state.safetensors.transfer import read_into

LOCAL_HEADER = 30
"""Bytes in front of the name in the header of a file inside of a zip file. The last four are the lengths of what
follows: of the name, and of an extra field."""

StandIn = tuple[Callable[..., Any], str]
"""A class of fzero, and the full name of the class that it stands for in a file."""


def load_torch_file(
    file: str | os.PathLike[str] | Window,
    where: str,
    *,
    map_location: str = "cpu",
    mmap: bool = False,
    stand_ins: Sequence[StandIn] = (),
) -> Any:
    """What `torch.save` wrote to a file. `where` names the file in errors. With `mmap` the values of tensors stay in
    the file until somebody reads them.

    Raises:
        FzeroError: for a file that is damaged, and for one that names a class or function which neither torch knows to
            be harmless nor `stand_ins` replace.
    """
    opened: Any = file
    if isinstance(file, Window):
        file.seek(0)
    try:
        with torch.serialization.safe_globals(list(stand_ins)):
            return torch.load(opened, map_location=map_location, weights_only=True, mmap=mmap)
    except Exception as error:  # a damaged file fails in as many ways as there are damages
        text = str(error)
        if found := re.search(r"GLOBAL (\S+) (was not an allowed global|whose module \S+ is blocked)", text):
            way_out = f"if you trust the author of the file: torch.serialization.add_safe_globals([{found[1]}])"
            raise FzeroError(where, f"names {found[1]}, which loading would run", way_out) from error
        cause = re.search(r"WeightsUnpickler error: (.+)", text) or re.search(r"(.*)", text)
        problem = f"torch cannot load it: {type(error).__name__}: {cause[1] if cause else ''}"
        raise FzeroError(where, problem, "the file is damaged or incomplete; copy or save it again") from error


class Window(io.RawIOBase):
    """Some bytes of an open file, as a file of its own."""

    def __init__(self, fd: int, span: range) -> None:
        self.fd, self.span, self._position = fd, span, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: len(self.span)}[whence]
        self._position = max(0, base + offset)
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        room = memoryview(buffer).cast("B")[: max(0, len(self.span) - self._position)]
        count = read_into(self.fd, room, self.span.start + self._position)
        self._position += count
        return count


def find_elements(window: Window, dtype: torch.dtype, shape: tuple[int, ...]) -> int | None:
    """The byte of the file at which the elements of the tensor in a window begin; None for a tensor whose elements do
    not lie in order, such as one in the format `channels_last`.

    Raises:
        ValueError: for what is not a tensor of this dtype and shape, in this machine's byte order.
    """
    tensor = load_torch_file(window, "", map_location="meta")
    if (tensor.dtype, tuple(tensor.shape)) != (dtype, shape):
        raise ValueError(f"{tensor.dtype} {list(tensor.shape)} is stored, the metadata say {dtype} {list(shape)}")
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        return None
    with zipfile.ZipFile(window) as archive:
        records = {info.filename.partition("/")[2]: info for info in archive.infolist()}
        order = archive.read(records["byteorder"]).decode() if "byteorder" in records else "little"
    record = records["data/0"]  # the only storage, for there is one tensor
    if order != sys.byteorder or record.compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"the elements are {order}-endian, compressed by method {record.compress_type}")
    window.seek(record.header_offset + LOCAL_HEADER - 4)
    lengths = window.read(4) or b""
    name, extra = int.from_bytes(lengths[:2], "little"), int.from_bytes(lengths[2:], "little")
    data = record.header_offset + LOCAL_HEADER + name + extra
    start = data + tensor.storage_offset() * dtype.itemsize
    if start + tensor.nbytes > min(data + record.file_size, len(window.span)):
        raise ValueError(f"the tensor takes {tensor.nbytes} bytes from byte {start} on, {len(window.span)} are there")
    return window.span.start + start
