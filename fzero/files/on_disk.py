"""OnDisk: a tensor whose elements lie in a file, and what torch's functions do to one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from fzero.base import torch_private
from fzero.base.dtypes import name_dtype
from fzero.base.errors import FzeroError
from fzero.base.placement import Disk
from fzero.files.memory import allocate_pinned_memory, new_buffer
from fzero.files.store import Extent, Move, open_store

CHUNK_NBYTES = 4 << 20
"""Bytes of memory that a cast, or a copy from a tensor that is not contiguous, uses at a time."""
aten = torch.ops.aten


class OnDisk(Tensor):
    """[n] a tensor of the CPU whose elements are bytes of an extent.

    Functions of torch that read it get its elements in memory. `copy_`, `fill_` and `zero_` write it, and `empty_like`,
    `zeros_like` and `full_like` make another one beside it. A slice of it is an `OnDisk` of a part of the extent, and
    so are `detach()`, `view(-1)` and `view(dtype)`. Other views of it, and other functions that write into it, are
    refused, because they would write into a copy.
    """

    extent: Extent
    start: int  # in bytes of the extent

    def __new__(cls, extent: Extent, start: int, numel: int, dtype: torch.dtype) -> OnDisk:
        value: OnDisk = torch_private.make_wrapper_subclass(cls, (numel,), dtype=dtype, device="cpu")
        value.extent, value.start = extent, start
        return value

    def __init__(self, *of: Any) -> None:
        pass  # `__new__` did it; the constructor of Tensor takes no arguments

    @property
    def place(self) -> Disk:
        """The placement that the file belongs to."""
        return Disk(self.extent.store.path)

    __torch_function__ = torch_private.disabled_torch_function

    @classmethod  # which Tensor's stub is not
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        perform = _RULES.get(func)
        return perform(*args, **(kwargs or {})) if perform else _run_on_copies(func, args, kwargs or {})

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        dtype = name_dtype(self.dtype)
        return f"OnDisk({dtype}[{self.numel()}] at byte {self.extent.start + self.start} of {self.extent.file.path})"

    def tolist(self) -> Any:
        return self.clone().tolist()

    # These would hand out memory, which there is none of: torch returns 0 for the first, and an empty copy for the last

    def data_ptr(self) -> int:
        self._refuse("has no address in memory")

    def untyped_storage(self) -> Any:
        self._refuse("has no storage in memory")

    def numpy(self, **_: Any) -> Any:
        self._refuse("has no memory for an array")

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._refuse("cannot be pickled: its file belongs to this process")

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return memo.setdefault(id(self), self.clone())  # in memory: an equal value, of its own

    def _refuse(self, problem: str) -> NoReturn:
        name = self.extent.leaf or str(self.extent.file.path)
        raise FzeroError(name, f"lies on disk: it {problem}", "use its clone(), which is in memory")


class Started(NamedTuple):
    """Copies that are under way."""

    values: list[Tensor]
    moves: list[Future[None]]

    def wait(self) -> list[Tensor]:
        """The copies, once they are there.

        Raises:
            FzeroError: naming leaf, file and bytes, where the disk is full or fails, or the file was cut short.
        """
        for move in self.moves:
            move.result()
        return self.values


def allocate(place: Disk, dtype: torch.dtype, numel: int, rank: int | None, bucket: str, leaf: str = "") -> OnDisk:
    """[numel] elements without values, in the file of a rank and bucket below the path of `place`.

    `rank` None stands for all virtual ranks together. `leaf` is for errors.

    Raises:
        FzeroError: for a path that is no folder or cannot be written to; where the disk has no room.
    """
    store = open_store(place.path)
    extent = store.allocate(numel * dtype.itemsize, store.open_file(rank, bucket), leaf)
    return OnDisk(extent, 0, numel, dtype)


def read(values: Sequence[OnDisk], into: Sequence[Tensor] | None = None) -> Started:
    """Start to copy tensors from files into new memory of the host, pinned where there is an accelerator to copy to, or
    into contiguous tensors of equal dtypes."""
    if into is None and torch.accelerator.is_available():
        into = [allocate_pinned_memory(x.numel(), x.dtype, x.extent.leaf, is_asked=False) for x in values]
    elif into is None:
        into = [new_buffer(x.numel(), x.dtype) for x in values]
    return Started(list(into), [
        future for x, memory in zip(values, into) for future in x.extent.store.read([_move(x, memory)])
    ])  # fmt: skip


def write(values: Sequence[Tensor], into: Sequence[OnDisk]) -> Started:
    """Start to copy contiguous tensors of the host over tensors on disk, of equal dtypes. They may change when `wait`
    has returned."""
    return Started(list(into), [
        future for x, memory in zip(into, values) for future in x.extent.store.write([_move(x, memory)])
    ])  # fmt: skip


def check_writes(x: Tensor) -> None:
    """Wait for all writes of a tensor on disk; of any other tensor nothing.

    Raises:
        FzeroError: as `Started.wait`, for a write that failed, also where that was told before.
    """
    for move in x.extent.writes if isinstance(x, OnDisk) else ():
        move.result()


def load(x: Tensor) -> Tensor:
    """A tensor itself, or the copy in host memory of a tensor on disk."""
    return x.clone() if isinstance(x, OnDisk) else x


def duplicate(x: Tensor) -> Tensor:
    """A copy of a tensor, in a file where the tensor lies in one."""
    return torch.empty_like(x).copy_(x) if isinstance(x, OnDisk) else x.clone()


def is_alias(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors lie in one storage, or in one extent of a file; False for tensors that a transform of
    torch.func wraps."""
    if isinstance(a, OnDisk) and isinstance(b, OnDisk):
        return a.extent is b.extent
    return not isinstance(a, OnDisk) and not isinstance(b, OnDisk) and torch_private.is_alias(a, b)


def address_of(x: Tensor) -> tuple[str, int]:
    """The place of a tensor's first byte: a file, "" for memory, and a number of bytes from its start."""
    return (str(x.extent.file.path), x.extent.start + x.start) if isinstance(x, OnDisk) else ("", x.data_ptr())


def _move(x: OnDisk, memory: Tensor) -> Move:
    assert memory.is_cpu and memory.is_contiguous() and (memory.dtype, memory.numel()) == (x.dtype, x.numel())
    return Move(x.extent, x.start, x.nbytes, memory.data_ptr(), memory)


def _slice(x: OnDisk, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> OnDisk:
    begin, stop, step = slice(start, end, step).indices(x.numel())
    if step != 1:
        x._refuse("cannot be viewed in steps")
    return OnDisk(x.extent, x.start + begin * x.itemsize, max(stop - begin, 0), x.dtype)


def _split(x: OnDisk, size: int, dim: int = 0) -> list[OnDisk]:
    return [_slice(x, 0, start, start + size) for start in range(0, max(x.numel(), 1), max(size, 1))]


def _alias(x: OnDisk) -> OnDisk:
    return _slice(x)


def _view(x: OnDisk, shape: Sequence[int]) -> OnDisk:
    if list(shape) not in ([-1], [x.numel()]):
        x._refuse(f"cannot be viewed in the shape {list(shape)}")
    return _alias(x)


def _view_dtype(x: OnDisk, dtype: torch.dtype) -> OnDisk:
    if x.nbytes % dtype.itemsize:
        x._refuse(f"has {x.nbytes} bytes, which are no {dtype} elements")
    return OnDisk(x.extent, x.start, x.nbytes // dtype.itemsize, dtype)


def _copy_(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """`target.copy_(source)`, one of which lies on disk."""
    if isinstance(target, OnDisk):
        source = source.expand(target.shape) if target.shape != source.shape else source
    elif target.shape != source.shape:
        return target.copy_(source.clone())
    if isinstance(source, OnDisk) and _is_plain(target, source.dtype):
        read([source], [target]).wait()
    elif isinstance(target, OnDisk) and _is_plain(source, target.dtype):
        write([source.detach()], [target]).wait()
    else:
        step = min(CHUNK_NBYTES // max(target.itemsize, source.itemsize), target.numel())
        staged = new_buffer(step, target.dtype)
        for start in range(0, target.numel(), max(step, 1)):
            here, there = target[start : start + step], source[start : start + step].detach()
            here.copy_(staged[: here.numel()].copy_(load(there)))
    return target


def _is_plain(x: Tensor, dtype: torch.dtype) -> bool:
    """Whether the memory of a tensor is that of its values in order, in this dtype."""
    is_lazy = x.is_conj() or x.is_neg()
    return not isinstance(x, OnDisk) and x.is_cpu and x.is_contiguous() and x.dtype == dtype and not is_lazy


def _copy_lists_(targets: list[Tensor], sources: list[Tensor], non_blocking: bool = False) -> None:
    for target, source in zip(targets, sources):
        target.copy_(source)


def _fill_(x: OnDisk, value: Any) -> OnDisk:
    step = min(CHUNK_NBYTES // x.itemsize, x.numel())
    values = new_buffer(step, x.dtype).fill_(value)
    for start in range(0, x.numel(), max(step, 1)):
        here = x[start : start + step]
        here.copy_(values[: here.numel()])
    return x


def _zero_(x: OnDisk) -> OnDisk:
    return _fill_(x, 0)


def _make_like(func: Any, value: Any, x: OnDisk, *args: Any, dtype: torch.dtype | None = None, **how: Any) -> Tensor:
    """Another tensor on disk, filled with `value` unless it is None. On a device that is named a tensor there."""
    if how.get("device") is not None or how.get("pin_memory"):
        return _run_on_copies(func, (x, *args), {"dtype": dtype, **how})
    extent = x.extent.store.allocate(x.numel() * (dtype or x.dtype).itemsize, x.extent.file, x.extent.leaf)
    made = OnDisk(extent, 0, x.numel(), dtype or x.dtype)
    return made if value is None else made.fill_(value)


def _copy_to_memory(
    x: OnDisk,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    layout: torch.layout | None = None,
    non_blocking: bool = False,
    memory_format: torch.memory_format | None = None,
) -> Tensor:
    if (device or x.device).type == "cpu" and not pin_memory:
        return new_buffer(x.numel(), dtype or x.dtype).copy_(x)
    made = torch.empty(x.shape, dtype=dtype or x.dtype, device=device or "cpu", pin_memory=bool(pin_memory))
    return made if made.is_meta else made.copy_(x)


_RULES: dict[Any, Callable[..., Any]] = {
    aten.slice.Tensor: _slice,
    aten.split.Tensor: _split,
    aten.detach.default: _alias,
    aten.alias.default: _alias,
    aten.view.default: _view,
    aten.reshape.default: _view,
    aten.view.dtype: _view_dtype,
    aten.copy_.default: _copy_,
    aten._foreach_copy_.default: _copy_lists_,
    aten.fill_.Scalar: _fill_,
    aten.fill_.Tensor: _fill_,
    aten.zero_.default: _zero_,
    aten._foreach_zero_.default: lambda values: [x.zero_() for x in values] and None,
    aten.clone.default: _copy_to_memory,
    aten._to_copy.default: _copy_to_memory,
    aten.is_pinned.default: lambda x, device=None: False,
    aten.empty_like.default: partial(_make_like, aten.empty_like.default, None),
    aten.zeros_like.default: partial(_make_like, aten.zeros_like.default, 0),
    aten.ones_like.default: partial(_make_like, aten.ones_like.default, 1),
    aten.full_like.default: lambda x, value, **how: _make_like(aten.full_like.default, value, x, value, **how),
}
_READS_NO_ELEMENTS = {
    getattr(aten, name).default
    for name in "new_empty new_zeros new_ones new_full empty_like zeros_like ones_like full_like rand_like".split()
}


def _run_on_copies(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation that reads tensors on disk, with their elements in memory."""
    schema = torch_private.schema_of(func)
    is_view = any(x.alias_info is not None and not x.alias_info.is_write for x in schema.returns)
    given = dict(zip((argument.name for argument in schema.arguments), args)) | kwargs
    written = [given.get(x.name) for x in schema.arguments if x.alias_info is not None and x.alias_info.is_write]

    def load(x: OnDisk) -> Tensor:
        if is_view:
            x._refuse(f"cannot be viewed by {func}")
        if any(x is each or (isinstance(each, (list, tuple)) and any(x is y for y in each)) for each in written):
            x._refuse(f"cannot be written into by {func}")
        if func in _READS_NO_ELEMENTS:  # a tensor of one element that has the shape
            return torch.empty(1, dtype=x.dtype, device="cpu").expand(x.shape)
        return x.clone()

    args, kwargs = torch_private.map_pytree_only(OnDisk, load, (args, kwargs))
    return func(*args, **kwargs)
