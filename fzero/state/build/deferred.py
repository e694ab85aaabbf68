"""Deferred: tensors whose memory is in a `Store`, and the modes under which a constructor makes such tensors.

For torch, a `Deferred` has a shape, strides, a dtype and a device, and shares an allocation with its views. An
operation on a `Deferred` runs as the same operation on the allocation's whole memory, so that random numbers are drawn
as in a plain construction, in the same order.

The idea is torchdistX's deferred initialization, which records a construction, and torch's meta device, which leaves
values out. Here the construction really runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fzero.base import torch_private
from fzero.base.dtypes import describe_form
from fzero.base.errors import FzeroError
from fzero.base.torch_private import DispatchMode, map_pytree_only, pytree_leaves, storage_key
from fzero.state.build.store import Allocation, Store, closed_error

SMALL = 1024
"""Tensors of up to this number of elements stay ordinary tensors."""

aten = torch.ops.aten
WAY_OUT = "build the module plainly, and partition what fzero.lower gives"


class Deferred(Tensor):
    """A tensor, or a view of a tensor, whose memory is `allocation`. Constructors make them under `defer_tensors`."""

    allocation: Allocation

    @staticmethod
    def __new__(cls, allocation: Allocation, like: Tensor) -> Deferred:
        self: Deferred = torch_private.make_wrapper_subclass(
            cls,
            like.size(),
            strides=like.stride(),
            storage_offset=like.storage_offset(),
            dtype=like.dtype,
            device=allocation.device,
        )
        self.allocation = allocation
        return self

    def __init__(self, allocation: Allocation, like: Tensor) -> None:
        pass

    __torch_function__ = torch_private.disabled_torch_function

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return run(_find_deferred_tensors((args, kwargs))[0].allocation.store, func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> Deferred:
        copied: Any = self.detach().clone().requires_grad_(self.requires_grad)
        vars(copied).update({name: value for name, value in vars(self).items() if name != "allocation"})
        memo[id(self)] = copied
        return copied

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Deferred({describe_form(self)})"


@contextmanager
def defer_tensors(store: Store) -> Iterator[None]:
    """Within the block, every new tensor of more than `SMALL` elements becomes a `Deferred` of `store`.

    Raises:
        FzeroError: inside of another such block.
    """
    if is_deferring():
        raise FzeroError("fzero.build", "is called inside of a constructor that fzero.build runs", "build one module")
    with _OperationMode(store), _MemoryMode():
        yield


def is_deferring() -> bool:
    """Whether the caller is inside of a block of `defer_tensors`."""
    return any(isinstance(mode, _OperationMode) for mode in torch_private.dispatch_modes())


def copy_whole(value: Deferred) -> Tensor:
    """A copy of all values, an ordinary tensor on every rank. Collective."""
    value.allocation.store.bring([value.allocation])
    return _real_view(value).clone()


def read(value: Deferred, part: range, out: Tensor, chunk: int) -> None:
    """Fill `out`, 1-d, with the row-major elements `part`, cast to the dtype of `out`. Collective, as `iter_values`."""
    for found, values in iter_values(value, part, chunk):
        out[found.start - part.start : found.stop - part.start].copy_(values)
        del values  # a view of a chunk, which is freed before the next is gathered


def iter_values(value: Deferred, part: range, chunk: int) -> Iterator[tuple[range, Tensor]]:
    """Yield some of the row-major elements `part`, and their values, in any order. Collective: every rank iterates to
    the end; each rank has its own part. A contiguous tensor is gathered `chunk` bytes at a time, any other as a
    whole."""
    store = value.allocation.store
    if not value.is_contiguous():
        store.bring([value.allocation])
        yield part, _real_view(value).reshape(-1)[part.start : part.stop]
        return
    size, begin = value.dtype.itemsize, value.storage_offset()
    wanted = range((begin + part.start) * size, (begin + part.stop) * size)
    for span, values in store.spans(value.allocation, wanted, chunk):
        yield range(span.start // size - begin, span.stop // size - begin), values.view(value.dtype)
        del values  # as in `read`


def run(store: Store, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation; its arguments may be `Deferred`."""
    given = _find_deferred_tensors((args, kwargs))
    for value in given:
        if value.allocation.store.is_closed:
            raise closed_error(value.shape, value.dtype)
    if not given:
        return _make(store, func, args, kwargs)
    packet = func.overloadpacket
    if func is aten.set_.source_Tensor:
        return _rebind(args[0], args[1])
    if packet in _REFUSED:
        raise _refusal(func, given[0])
    if torch.Tag.inplace_view in func.tags:
        with torch_private.no_dispatch():  # changes sizes and strides of the wrapper only
            func(*args, **kwargs)
        return args[0]
    if func.is_view or packet is aten._unsafe_view:
        return _view(func, args, kwargs)
    if packet in _LIKES:  # takes shape and dtype of a deferred tensor, not its values
        kwargs = {"device": given[0].device, **{key: value for key, value in kwargs.items() if value is not None}}
        return _make(store, func, *_move_to_meta((args, kwargs)))
    if packet is aten.clone and _is_all(given[0]) and kwargs.get("memory_format") in _SAME:
        return Deferred(store.duplicate(given[0].allocation), _make_stand_in(given[0]))
    if packet is aten.copy_ and len(given) == 2 and _are_alike(*given):
        store.duplicate(given[1].allocation, onto=given[0].allocation)
        return args[0]
    return _compute(store, func, args, kwargs, given)


def _compute(store: Store, func: Any, args: Any, kwargs: Any, given: list[Deferred]) -> Any:
    """Run `func` on the whole memory of its deferred arguments."""
    overwritten = given[0].allocation if _overwrites(func, args) else None
    allocations = dict.fromkeys(value.allocation for value in given)
    store.bring(allocations, overwritten)
    reals = {id(value): _real_view(value) for value in given}
    known = {id(reals[id(value)]): value for value in given}
    result = func(
        *map_pytree_only(Deferred, lambda value: reals[id(value)], args),
        **map_pytree_only(Deferred, lambda value: reals[id(value)], kwargs),
    )
    for real in reals.values():
        _check_metadata(func, known[id(real)], real)
    storages = {storage_key(allocation.flat): allocation for allocation in allocations if allocation.flat is not None}
    foreign = _find_storages((args, kwargs))

    def wrap(out: Tensor) -> Tensor:
        if id(out) in known:
            return known[id(out)]
        if type(out) is not Tensor or out.layout is not torch.strided or storage_key(out) in foreign:
            return out
        allocation = storages.get(storage_key(out))
        return _adopt(store, func, out) if allocation is None else Deferred(allocation, _check_plain(func, out))

    return map_pytree_only(Tensor, wrap, result)


def _make(store: Store, func: Any, args: Any, kwargs: Any) -> Any:
    """Run `func`, which has no deferred argument, and defer the large tensors that it makes."""
    given = [x for x in pytree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    device = torch.device(kwargs.get("device") or (given[0].device if given else "cpu"))
    if func.overloadpacket in _EMPTIES and device.type != "meta":
        like = func(*_move_to_meta(args), **{**_move_to_meta(kwargs), "device": "meta", "pin_memory": False})
        if like.numel() > SMALL and like.layout is torch.strided:
            return Deferred(store.blank(like.untyped_storage().nbytes(), device), like)
    if all(x.is_meta for x in given) and _may_be_large(args):
        store.bring([])  # cuts all memory that is whole, before the new tensor takes more
    result = func(*args, **kwargs)
    if func is aten.lift_fresh.default:  # torch.tensor, whose argument nobody else has
        return _adopt(store, func, result)
    if func.is_view:
        return result
    foreign = _find_storages(given)
    return map_pytree_only(
        Tensor,
        lambda out: out if out.layout is not torch.strided or storage_key(out) in foreign else _adopt(store, func, out),
        result,
    )


def _adopt(store: Store, func: Any, out: Tensor) -> Tensor:
    """A `Deferred` in place of a new tensor that is large; any other tensor as it is."""
    if type(out) is not Tensor or out.numel() <= SMALL or out.is_meta or out.is_quantized:
        return out
    return Deferred(store.adopt(_check_plain(func, out)), out)


def _view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a view operation: its result shares the allocation. Needs no values."""
    allocation = _find_deferred_tensors((args, kwargs))[0].allocation
    stand_ins, named = map_pytree_only(Deferred, _make_stand_in, (args, kwargs))
    views = func(*stand_ins, **named)
    return map_pytree_only(Tensor, lambda view: Deferred(allocation, _check_plain(func, view)), views)


def _rebind(self: Deferred, other: Any) -> Deferred:
    """`self.set_(other)` for equal strides: from now on `self` shares the allocation of `other`."""
    if type(self) is not type(other) or _geometry(self) != _geometry(other):
        raise _refusal(aten.set_.source_Tensor, self)
    self.allocation = other.allocation
    return self


def _make_stand_in(value: Deferred) -> Tensor:
    """The same view on the meta device."""
    return _view_as(torch.empty(value.allocation.nbytes, dtype=torch.uint8, device="meta"), value)


def _move_to_meta(tree: Any) -> Any:
    return map_pytree_only(Deferred, _make_stand_in, map_pytree_only(_is_ordinary, lambda x: x.to("meta"), tree))


def _is_ordinary(value: Any) -> bool:
    return type(value) is Tensor


def _real_view(value: Deferred) -> Tensor:
    """The same view of the allocation's whole memory, an ordinary tensor."""
    assert value.allocation.flat is not None
    return _view_as(value.allocation.flat, value)


def _view_as(flat: Tensor, value: Tensor) -> Tensor:
    """`flat`, the bytes of the memory of `value`, viewed with the dtype, sizes and strides of `value`."""
    size = value.dtype.itemsize
    elements = flat[: flat.numel() // size * size].view(value.dtype)
    return elements.as_strided(value.size(), value.stride(), value.storage_offset())


def _geometry(value: Tensor) -> tuple[Any, ...]:
    return value.dtype, value.size(), value.stride(), value.storage_offset()


def _is_all(value: Deferred) -> bool:
    """Whether a tensor covers all of its allocation, in order."""
    return value.is_contiguous() and value.numel() * value.dtype.itemsize == value.allocation.nbytes


def _are_alike(self: Deferred, other: Deferred) -> bool:
    """Whether `other` can be copied to `self` byte by byte."""
    same = _geometry(self) == _geometry(other) and self.device == other.device
    return same and self.allocation is not other.allocation and _is_all(self) and _is_all(other)


def _overwrites(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether an operation writes all of its first argument's allocation and reads none of it."""
    if func.overloadpacket not in _OVERWRITES or not isinstance(args[0], Deferred):
        return False
    others = _find_deferred_tensors(args[1:])
    return _is_all(args[0]) and all(other.allocation is not args[0].allocation for other in others)


def _may_be_large(args: tuple[Any, ...]) -> bool:
    """Whether a factory may make a large tensor: its first argument is not a list of sizes of few elements."""
    sizes = args[0] if args and isinstance(args[0], (list, tuple)) else None
    return sizes is None or torch.Size(sizes).numel() > SMALL


def _check_metadata(func: Any, value: Deferred, real: Tensor) -> None:
    if _geometry(value) != _geometry(real):  # the operation resized an out= tensor
        raise _refusal(func, value)


def _check_plain(func: Any, out: Tensor) -> Tensor:
    """`out`. Raises for a lazy conjugate or negation, which strides do not describe."""
    if out.is_conj() or out.is_neg():
        raise _refusal(func, out)
    return out


def _find_deferred_tensors(tree: Any) -> list[Deferred]:
    return [x for x in pytree_leaves(tree) if isinstance(x, Deferred)]


def _find_storages(tree: Any) -> set[int]:
    """The storages of the ordinary tensors among the leaves of `tree`."""
    return {storage_key(x) for x in pytree_leaves(tree) if type(x) is Tensor and x.layout is torch.strided}


def _refusal(func: Any, value: Tensor) -> FzeroError:
    name = getattr(func, "__name__", str(func))
    return FzeroError(
        "fzero.build",
        f"the constructor calls {name} on a {describe_form(value)}, which has no memory of its own",
        WAY_OUT,
    )


class _OperationMode(DispatchMode):
    """Runs every operation below autograd through `run`."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(self._store, func, args, kwargs or {})


class _MemoryMode(TorchFunctionMode):
    """Handles the calls that reach no operation: requests for a tensor's memory, and assignments to `.data`."""

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func == _SET_DATA:  # not `is`: the attribute is a new object at each access
            return _assign(*args)
        if func in _MEMORY and args and isinstance(args[0], Deferred):
            raise _refusal(func, args[0])
        if func is Tensor.tolist and isinstance(args[0], Deferred):
            with torch_private.disable_modes():
                return copy_whole(args[0]).tolist()
        return func(*args, **kwargs)


def _assign(self: Tensor, value: Any) -> None:
    """`self.data = value`."""
    if isinstance(self, Deferred) != isinstance(value, Deferred):
        raise _refusal(".data =", self if isinstance(self, Deferred) else value)
    _SET_DATA(self, value)
    if isinstance(self, Deferred):
        self.allocation = value.allocation


_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_MEMORY = {
    Tensor.__array__,
    Tensor.__dlpack__,
    Tensor.data_ptr,
    Tensor.numpy,
    Tensor.share_memory_,
    Tensor.storage,
    Tensor.untyped_storage,
}
_REFUSED = {aten.set_, aten.resize_, aten.resize_as_, aten._pin_memory, aten._resize_output_}
_SAME = {None, torch.preserve_format, torch.contiguous_format}
_EMPTIES = {aten.empty, aten.empty_strided, aten.empty_like, aten.new_empty, aten.new_empty_strided}
_LIKES = {
    *(aten.empty_like, aten.zeros_like, aten.ones_like, aten.full_like, aten.rand_like, aten.randn_like),
    *(aten.randint_like, aten.new_empty, aten.new_empty_strided, aten.new_zeros, aten.new_ones, aten.new_full),
}
_OVERWRITES = {
    *(aten.normal_, aten.uniform_, aten.zero_, aten.fill_, aten.copy_, aten.random_, aten.bernoulli_),
    *(aten.exponential_, aten.log_normal_, aten.cauchy_, aten.geometric_),
}
