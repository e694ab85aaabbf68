"""Deferred: tensors whose values are in a `Store`, and the modes under which a constructor makes such tensors.

To torch a `Deferred` has a shape, strides, a dtype and a device, and shares an entry with its views. An operation on it
runs as the same operation on the entry's whole memory: random numbers are drawn as they would have been, in that order.

After torchdistX's deferred initialization and torch's meta device, which record a construction or leave values out;
here it really runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)
from torch.utils._pytree import tree_leaves, tree_map_only

from fzero.base.errors import FzeroError
from fzero.state.build.store import Entry, Store, used_up

SMALL = 1024
"""Elements up to which a tensor stays an ordinary one."""

aten = torch.ops.aten
WAY_OUT = "build the module plainly, and partition what fzero.lower gives"


class Deferred(Tensor):
    """A tensor, or a view of one, whose memory is `entry`. Made under `deferring`."""

    entry: Entry

    @staticmethod
    def __new__(cls, entry: Entry, like: Tensor) -> Deferred:
        self: Deferred = torch.Tensor._make_wrapper_subclass(
            cls,
            like.size(),
            strides=like.stride(),
            storage_offset=like.storage_offset(),
            dtype=like.dtype,
            device=entry.device,
        )
        self.entry = entry
        return self

    def __init__(self, entry: Entry, like: Tensor) -> None:
        pass

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return run(_deferred((args, kwargs))[0].entry.store, func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> Deferred:
        copied: Any = self.detach().clone().requires_grad_(self.requires_grad)
        vars(copied).update({name: value for name, value in vars(self).items() if name != "entry"})
        memo[id(self)] = copied
        return copied

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Deferred({_named(self)})"


@contextmanager
def deferring(store: Store) -> Iterator[None]:
    """Every tensor of more than `SMALL` elements that is made here becomes a `Deferred` of `store`.

    Raises:
        FzeroError: within another one.
    """
    if any(isinstance(mode, _Made) for mode in _get_current_dispatch_mode_stack()):
        raise FzeroError("fzero.build", "is called inside of a constructor that fzero.build runs", "build one module")
    with _Made(store), _Asked():
        yield


def whole(value: Deferred) -> Tensor:
    """A copy of all values, on every rank. Collective."""
    value.entry.store.bring([value.entry])
    return _real(value).clone()


def read(value: Deferred, part: range, out: Tensor, chunk: int) -> None:
    """Fill `out`, 1-d, with these row-major elements, cast to its dtype. Collective, each rank with a part of its own:
    `chunk` bytes at a time where the elements lie in memory in that order, else of the whole tensor."""
    store = value.entry.store
    if not value.is_contiguous():
        store.bring([value.entry])
        out.copy_(_real(value).reshape(-1)[part.start : part.stop])
        return
    size = value.dtype.itemsize
    first = value.storage_offset() + part.start
    for span, found in store.spans(value.entry, range(first * size, (first + len(part)) * size), chunk):
        out[span.start // size - first : span.stop // size - first].copy_(found.view(value.dtype))
        del found


def run(store: Store, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`func` of arguments some of which are `Deferred`, or none."""
    given = _deferred((args, kwargs))
    for value in given:
        if value.entry.store.is_closed:
            raise used_up(value.shape, value.dtype)
    if not given:
        return _make(store, func, args, kwargs)
    packet = func.overloadpacket
    if func is aten.set_.source_Tensor:
        return _rebound(args[0], args[1])
    if packet in _REFUSED:
        raise _refusal(func, given[0])
    if torch.Tag.inplace_view in func.tags:
        with no_dispatch():  # changes sizes and strides of the wrapper alone
            func(*args, **kwargs)
        return args[0]
    if func.is_view or packet is aten._unsafe_view:
        return _view(func, args, kwargs)
    if packet in _LIKES:
        kwargs = {"device": given[0].device, **{key: value for key, value in kwargs.items() if value is not None}}
        return _make(store, func, *_on_meta((args, kwargs)))
    if packet is aten.clone and _is_all(given[0]) and kwargs.get("memory_format") in _SAME:
        return Deferred(store.duplicate(given[0].entry), _stand_in(given[0]))
    if packet is aten.copy_ and len(given) == 2 and _are_alike(*given):
        store.duplicate(given[1].entry, onto=given[0].entry)
        return args[0]
    return _compute(store, func, args, kwargs, given)


def _compute(store: Store, func: Any, args: Any, kwargs: Any, given: list[Deferred]) -> Any:
    """Run `func` on whole memory."""
    overwritten = given[0].entry if _overwrites(func, args) else None
    entries = dict.fromkeys(value.entry for value in given)
    store.bring(entries, overwritten)
    reals = {id(value): _real(value) for value in given}
    known = {id(reals[id(value)]): value for value in given}
    result = func(
        *tree_map_only(Deferred, lambda value: reals[id(value)], args),
        **tree_map_only(Deferred, lambda value: reals[id(value)], kwargs),
    )
    for real in reals.values():
        _check_metadata(func, known[id(real)], real)
    storages = {_storage(entry.flat): entry for entry in entries if entry.flat is not None}
    foreign = _storages((args, kwargs))

    def wrapped(out: Tensor) -> Tensor:
        if id(out) in known:
            return known[id(out)]
        if type(out) is not Tensor or out.layout is not torch.strided or _storage(out) in foreign:
            return out
        entry = storages.get(_storage(out))
        return _adopted(store, func, out) if entry is None else Deferred(entry, _plain(func, out))

    return tree_map_only(Tensor, wrapped, result)


def _make(store: Store, func: Any, args: Any, kwargs: Any) -> Any:
    """Run `func`, of which no argument is deferred, and defer what it makes anew."""
    given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    device = torch.device(kwargs.get("device") or (given[0].device if given else "cpu"))
    if func.overloadpacket in _EMPTIES and device.type != "meta":
        like = func(*_on_meta(args), **{**_on_meta(kwargs), "device": "meta", "pin_memory": False})
        if like.numel() > SMALL and like.layout is torch.strided:
            return Deferred(store.blank(like.untyped_storage().nbytes(), device), like)
    if all(x.is_meta for x in given) and _may_be_large(args):
        store.bring([])
    result = func(*args, **kwargs)
    if func is aten.lift_fresh.default:  # torch.tensor, of a tensor that nobody else has
        return _adopted(store, func, result)
    if func.is_view:
        return result
    foreign = _storages(given)
    return tree_map_only(
        Tensor,
        lambda out: out if out.layout is not torch.strided or _storage(out) in foreign else _adopted(store, func, out),
        result,
    )


def _adopted(store: Store, func: Any, out: Tensor) -> Tensor:
    """A deferred tensor in place of a new one that is large."""
    if type(out) is not Tensor or out.numel() <= SMALL or out.is_meta or out.is_quantized:
        return out
    return Deferred(store.adopt(_plain(func, out)), out)


def _view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A view shares the entry. Needs no values."""
    entry = _deferred((args, kwargs))[0].entry
    views = func(*tree_map_only(Deferred, _stand_in, args), **tree_map_only(Deferred, _stand_in, kwargs))
    return tree_map_only(Tensor, lambda view: Deferred(entry, _plain(func, view)), views)


def _rebound(self: Deferred, other: Any) -> Deferred:
    """`self.set_(other)` of equal strides: from now on a view of what `other` views."""
    if type(self) is not type(other) or _geometry(self) != _geometry(other):
        raise _refusal(aten.set_.source_Tensor, self)
    self.entry = other.entry
    return self


def _stand_in(value: Deferred) -> Tensor:
    """The same view of memory on the meta device."""
    return _viewed(torch.empty(value.entry.nbytes, dtype=torch.uint8, device="meta"), value)


def _on_meta(tree: Any) -> Any:
    return tree_map_only(Deferred, _stand_in, tree_map_only(_is_ordinary, lambda x: x.to("meta"), tree))


def _is_ordinary(value: Any) -> bool:
    return type(value) is Tensor


def _real(value: Deferred) -> Tensor:
    """The same view of memory that is whole."""
    assert value.entry.flat is not None
    return _viewed(value.entry.flat, value)


def _viewed(flat: Tensor, value: Tensor) -> Tensor:
    """The bytes that are the memory of `value` as that tensor."""
    size = value.dtype.itemsize
    elements = flat[: flat.numel() // size * size].view(value.dtype)
    return elements.as_strided(value.size(), value.stride(), value.storage_offset())


def _geometry(value: Tensor) -> tuple[Any, ...]:
    return value.dtype, value.size(), value.stride(), value.storage_offset()


def _is_all(value: Deferred) -> bool:
    """Whether a tensor is all of its memory, in order."""
    return value.is_contiguous() and value.numel() * value.dtype.itemsize == value.entry.nbytes


def _are_alike(self: Deferred, other: Deferred) -> bool:
    """Whether one may be copied to the other byte by byte."""
    same = _geometry(self) == _geometry(other) and self.device == other.device
    return same and self.entry is not other.entry and _is_all(self) and _is_all(other)


def _overwrites(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether an operation writes all of its first argument and reads nothing of it."""
    if func.overloadpacket not in _OVERWRITES or not isinstance(args[0], Deferred):
        return False
    others = _deferred(args[1:])
    return _is_all(args[0]) and all(other.entry is not args[0].entry for other in others)


def _may_be_large(args: tuple[Any, ...]) -> bool:
    """Whether a factory's first argument is no list of sizes, or one of many elements."""
    sizes = args[0] if args and isinstance(args[0], (list, tuple)) else None
    return sizes is None or torch.Size(sizes).numel() > SMALL


def _check_metadata(func: Any, value: Deferred, real: Tensor) -> None:
    if _geometry(value) != _geometry(real):  # an out= that was resized
        raise _refusal(func, value)


def _plain(func: Any, out: Tensor) -> Tensor:
    """`out`, which must be no lazy conjugate or negation: strides do not tell of those."""
    if out.is_conj() or out.is_neg():
        raise _refusal(func, out)
    return out


def _deferred(tree: Any) -> list[Deferred]:
    return [x for x in tree_leaves(tree) if isinstance(x, Deferred)]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _storages(tree: Any) -> set[int]:
    """Those of ordinary tensors."""
    return {_storage(x) for x in tree_leaves(tree) if type(x) is Tensor and x.layout is torch.strided}


def _named(value: Tensor) -> str:
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"


def _refusal(func: Any, value: Tensor) -> FzeroError:
    name = getattr(func, "__name__", str(func))
    return FzeroError(
        "fzero.build", f"the constructor calls {name} on a {_named(value)}, which has no memory of its own", WAY_OUT
    )


class _Made(TorchDispatchMode):
    """Sees every operation below autograd."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(self._store, func, args, kwargs or {})


class _Asked(TorchFunctionMode):
    """Sees what no operation tells of: a tensor's memory asked for, and `.data` assigned."""

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func == _SET_DATA:  # a new object each time that it is asked for
            return _assign(*args)
        if func in _MEMORY and args and isinstance(args[0], Deferred):
            raise _refusal(func, args[0])
        if func is Tensor.tolist and isinstance(args[0], Deferred):
            with _disable_current_modes():
                return whole(args[0]).tolist()
        return func(*args, **kwargs)


def _assign(self: Tensor, value: Any) -> None:
    """`self.data = value`."""
    if isinstance(self, Deferred) != isinstance(value, Deferred):
        raise _refusal(".data =", self if isinstance(self, Deferred) else value)
    _SET_DATA(self, value)
    if isinstance(self, Deferred):
        self.entry = value.entry


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
