"""Rearranged: what a program that splits, joins and transposes tensors makes of them, without their values.

    w = name_tensor("w", (4, 6), torch.float32)
    a, b = w.T.chunk(2)
    b.pieces()     # [("w", Copy(...))]: which elements of "w" are which elements of b

So fzero runs the conversions that transformers has for the tensors of a file, and learns from them which range of a
leaf is which range of the file. Nothing has to be known about an operation but whether it returns a view or a copy.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.base import torch_private
from fzero.base.errors import FzeroError
from fzero.layout.strides import Copy, compose, view_to_view
from fzero.state.pieces import PiecedSource
from fzero.state.sources import Source

aten = torch.ops.aten


class MemoryOrigin(NamedTuple):
    """Where the elements of a tensor's memory come from: parts of named tensors. `maker` is the operation that computed
    other values, "" where none did."""

    held: tuple[tuple[str, Copy], ...]
    maker: str = ""


class Rearranged(Tensor):
    """A tensor on the meta device that knows where its elements come from. `name_tensor` makes the first ones.

    `plain` is a plain meta tensor with the strides, and the sharing of memory, that torch would give the values.
    """

    plain: Tensor
    memory: MemoryOrigin
    __torch_function__ = torch_private.disabled_torch_function

    def __new__(cls, plain: Tensor, memory: MemoryOrigin) -> Rearranged:
        strides = {"strides": plain.stride(), "storage_offset": plain.storage_offset()}
        value = torch_private.make_wrapper_subclass(cls, plain.shape, dtype=plain.dtype, device=plain.device, **strides)
        value.plain, value.memory = plain, memory
        return value

    def __init__(self, *of: Any) -> None:
        pass  # `__new__` did it; the constructor of Tensor takes no arguments

    @property
    def origins(self) -> str:
        """The tensors that the elements come from."""
        return ", ".join(sorted({name for name, _ in self.memory.held}))

    def pieces(self, where: str) -> list[tuple[str, Copy]]:
        """`(name, copy)` of each part: elements of the named tensor that are row-major elements of this one.

        Raises:
            FzeroError: naming `where`, for values that some operation computed.
        """
        memory = _copy([(self, torch.empty(self.shape, device="meta"))], "a view")
        if memory.maker:
            problem = f"is computed by {memory.maker} from {self.origins}, and fzero only moves elements"
            raise FzeroError(where, problem, "convert it with transformers, on one process")
        if sum(copy.numel for _, copy in memory.held) != self.numel():
            raise FzeroError(where, f"is made of {self.origins} and other values", "convert it with transformers")
        return list(memory.held)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        given = [x for x in torch_private.pytree_leaves((args, kwargs)) if isinstance(x, Rearranged)]
        overwritten = _find_overwritten(func, args)
        for x in overwritten:
            if not x.memory.maker:
                raise FzeroError(x.origins, f"{func} writes into it", "fzero follows views and copies only")
        if "device" in kwargs:
            kwargs["device"] = torch.device("meta")
        positional, named = torch_private.map_pytree_only(Rearranged, lambda x: x.plain, (args, kwargs))
        made = func(*positional, **named)
        if overwritten:
            return overwritten[0]
        return torch_private.map_pytree_only(Tensor, lambda out: _follow(func, given, args, out), made)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Rearranged({list(self.shape)} of {self.origins})"


def name_tensor(name: str, shape: Sequence[int], dtype: torch.dtype) -> Rearranged:
    """The whole tensor of a name, to be rearranged."""
    plain = torch.empty(tuple(shape), dtype=dtype, device="meta")
    whole = view_to_view([plain.numel()], [1], [1])
    return Rearranged(plain, MemoryOrigin(tuple((name, copy) for copy in whole)))


Parts = list[tuple[Rearranged, Tensor]]
"""Tensors that an operation copies, each with the view of the result that becomes equal to it."""


def _find_overwritten(func: Any, args: tuple[Any, ...]) -> list[Rearranged]:
    """The arguments that an operation writes into."""
    rows = zip(torch_private.schema_of(func).arguments, args)
    return [x for row, x in rows if row.alias_info and row.alias_info.is_write and isinstance(x, Rearranged)]


def _follow(func: Any, given: Sequence[Rearranged], args: tuple[Any, ...], out: Tensor) -> Rearranged:
    """The result `out` of an operation, a meta tensor, with its memory."""
    for x in given:
        if torch_private.storage_key(x.plain) == torch_private.storage_key(out):
            return Rearranged(out, x.memory)  # a view
    parts = _COPIES[func](args, out) if func in _COPIES else None
    if parts is None:
        return Rearranged(out, MemoryOrigin(tuple(held for x in given for held in x.memory.held), str(func)))
    return Rearranged(out, _copy([(x, place) for x, place in parts if isinstance(x, Rearranged)], str(func)))


def _copy(parts: Parts, maker: str) -> MemoryOrigin:
    """The memory that an operation, `maker`, copies tensors into."""
    held = tuple(held for x, _ in parts for held in x.memory.held)
    computed = next((x.memory.maker for x, _ in parts if x.memory.maker), "")
    if computed:
        return MemoryOrigin(held, computed)
    try:
        return MemoryOrigin(tuple(each for x, place in parts for each in _move(x, place)))
    except FzeroError as error:
        return MemoryOrigin(held, f"{maker} ({error.problem})")


def _move(x: Rearranged, place: Tensor) -> Iterator[tuple[str, Copy]]:
    """The parts of a tensor, where they are in the memory of `place`."""
    start, to = int(x.plain.storage_offset()), int(place.storage_offset())
    for move in view_to_view(x.shape, x.plain.stride(), place.stride(), start, to):
        for name, held in x.memory.held:
            yield from ((name, part) for part in compose(held, move))


def _copy_one(args: tuple[Any, ...], out: Tensor) -> Parts:
    return [(args[0], out)]


def _copy_same_size(args: tuple[Any, ...], out: Tensor) -> Parts | None:
    """transformers pads a bias by nothing when it ties weights. None for any other padding."""
    return None if any(args[1]) else [(args[0], out)]


def _copy_beside(args: tuple[Any, ...], out: Tensor) -> Parts:
    tensors, dim, start, parts = args[0], args[1] if len(args) > 1 else 0, 0, []
    for x in tensors:
        parts.append((x, out.narrow(dim, start, x.shape[dim])))
        start += x.shape[dim]
    return parts


def _copy_onto(args: tuple[Any, ...], out: Tensor) -> Parts:
    tensors, dim = args[0], args[1] if len(args) > 1 else 0
    return [(x, out.select(dim, index)) for index, x in enumerate(tensors)]


_COPIES: dict[Any, Callable[[tuple[Any, ...], Tensor], Parts | None]] = {
    aten.clone.default: _copy_one,
    aten._to_copy.default: _copy_one,
    aten.constant_pad_nd.default: _copy_same_size,
    aten.cat.default: _copy_beside,
    aten.stack.default: _copy_onto,
}


class RearrangedSource(PiecedSource):
    """The values of a `Rearranged`, of the `sources` of the tensors that it comes from. `where` names their files.

    Raises:
        FzeroError: for values that some operation computed.
    """

    def __init__(self, path: str, value: Rearranged, sources: Mapping[str, Source]) -> None:
        parts = [(copy, sources[name]) for name, copy in value.pieces(path)]
        dtypes = {source.dtype for _, source in parts} or {value.dtype}
        self.where = ", ".join(sorted({getattr(source, "where", source.path) for _, source in parts}))
        super().__init__(path, value.shape, functools.reduce(torch.promote_types, dtypes), parts, self.where)
