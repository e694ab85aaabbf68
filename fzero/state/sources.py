"""Sources: values that are read by ranges, so that memory holds no more of them than a caller reads at a time.

source_of(tensor)                                of any strides: transposed, sliced, expanded
source_of(torch.load(file, mmap=True)[key])      only the pages of a range are read from disk
source_of(numpy.load(file, mmap_mode="r"))       likewise
fzero.state.safetensors.open_safetensors(file)   a dict of sources
"""

from __future__ import annotations

import ctypes
import sys
import warnings
import zlib
from typing import Any, Protocol, TypeGuard, runtime_checkable

import torch
from torch import Tensor

from fzero.base.dense import check_dense
from fzero.base.dtypes import describe_form
from fzero.base.errors import FzeroError
from fzero.layout.boxes import boxes
from fzero.layout.layout import Layout
from fzero.ranks.ranks import Ranks

SAMPLE = 64
"""Elements by which ranks compare values that they read."""


@runtime_checkable
class Source(Protocol):
    """A value of a shape and dtype whose elements can be read by ranges. Errors name the value by `path`."""

    shape: torch.Size
    dtype: torch.dtype
    path: str

    def read(self, start: int, out: Tensor) -> None:
        """Fill `out`, 1-d and on the CPU, with the flat row-major elements [start, start + out.numel()), cast to the
        dtype of `out`."""


class TensorSource:
    """The values of a tensor of any strides on any device, read straight from the tensor's memory.

    `dtype` is the source's dtype, by default the tensor's. Values are cast only while they are read.

    Raises:
        FzeroError: for a meta tensor, which has no values; for a sparse tensor, a nested tensor or a DTensor.
    """

    def __init__(
        self, tensor: Tensor, path: str = "", dtype: torch.dtype | None = None, is_frozen: bool = False
    ) -> None:
        if tensor.is_meta:
            raise FzeroError(path, "is on the meta device: it has a shape but no values", "give a tensor with values")
        check_dense(path, tensor)
        self.tensor = tensor.detach()
        self.shape, self.dtype, self.path = tensor.shape, dtype or tensor.dtype, path
        self.is_frozen = is_frozen

    def read(self, start: int, out: Tensor) -> None:
        done = 0
        # Box by box: `tensor.reshape(-1)` would copy the whole of a tensor that is not contiguous.
        for box in boxes(tuple(self.shape), check_range(self, start, out)):
            piece = self.tensor
            for dim, (begin, size) in enumerate(zip(*box)):
                piece = piece.narrow(dim, begin, size)
            out[done : done + piece.numel()].view(piece.shape).copy_(piece)
            done += piece.numel()

    def __repr__(self) -> str:
        return f"TensorSource({self.path or 'tensor'}: {describe_form(self)})"


def source_of(value: Any, path: str = "") -> Source:
    """The source of a tensor or of a numpy array, memory-mapped or not. A source is returned as it is.

    Raises:
        FzeroError: for any other value, and for an array that torch cannot view: an array of another byte order, of
            negative strides, or of a dtype that torch lacks.
    """
    if isinstance(value, Tensor):
        return TensorSource(value, path)
    if is_source(value):
        return value
    numpy = sys.modules.get("numpy")  # numpy is optional: while nobody imported numpy, no value is an array
    if numpy is not None and isinstance(value, numpy.ndarray):
        return TensorSource(_view_array(value, path), path)
    raise FzeroError(path, f"is a {type(value).__name__}, not a tensor", "give a tensor, a numpy array or a Source")


def is_source(value: Any) -> TypeGuard[Source]:
    """Whether `value` is a `Source`."""
    return isinstance(value, Source)


class SourceOnRanks(Source, Protocol):
    """A source whose values lie on several ranks, which read them together."""

    def fill(self, on: Ranks, out: Tensor, layout: Layout, leaf: int, chunk: int) -> None:
        """Fill `out`, this rank's part of a leaf, 1-d, `chunk` bytes at a time. All ranks of `on` call together."""


def is_on_ranks(source: Source) -> TypeGuard[SourceOnRanks]:
    """Whether the values of a source lie on several ranks."""
    return hasattr(source, "fill")


def check_range(source: Source, start: int, out: Tensor) -> range:
    """The flat elements that `source.read(start, out)` reads.

    Raises:
        FzeroError: when the source does not have all of these elements.
    """
    flat, numel = range(start, start + out.numel()), source.shape.numel()
    if start < 0 or flat.stop > numel:
        raise FzeroError(source.path, f"elements [{start}, {flat.stop}) were asked for, it has {numel}")
    return flat


def fingerprint(source: Source) -> int:
    """A hash of a source's path, shape, dtype and of `SAMPLE` elements from its middle, the same in every process. So
    ranks notice that they were given other values, without reading all of them.

    A source that knows a shorter way to describe its values has a method `fingerprint` that returns bytes.
    """
    known = getattr(source, "fingerprint", None)
    described = f"{source.path} {describe_form(source)} ".encode()
    return zlib.crc32(described + (_sample(source) if known is None else known()))


def _sample(source: Source) -> bytes:
    numel = source.shape.numel()
    out = torch.empty(min(numel, SAMPLE), dtype=source.dtype, device="cpu")
    source.read((numel - out.numel()) // 2, out)
    return ctypes.string_at(out.data_ptr(), out.nbytes) if out.nbytes else b""


def _view_array(array: Any, path: str) -> Tensor:
    """A tensor on the memory of a numpy array."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given NumPy array is not writ")  # fzero only reads the array
            return torch.from_numpy(array)
    except (TypeError, ValueError) as error:
        problem = f"torch cannot view an array of {array.dtype} with strides {array.strides}"
        raise FzeroError(
            path, f"{problem}: {error}", "give a copy in a dtype and byte order of this machine"
        ) from error
