"""Sharded: one global value of which each rank holds a flat slice, and the rules by which torch functions take it.

* Elementwise with sharded values of the same layout, scalars, or uniform tensors of the same shape: stays sharded.
* A reduction of everything (`sum`, `mean`, `norm`, `max`, `min`, `all`, `any`): one collective, a plain 0-d tensor.
* List ops (`torch._foreach_*`): elementwise, position by position.
* Anything else: the value is gathered and the plain function runs.

Under `torch.func.vmap` a plain operand may be a batch, of which there are no slices: beside one a value is gathered.

A `Sharded` is a leaf to optree, so that `fzero.tree.map` sees one value, and a node to torch.func, which differentiates
its slice.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as torch_pytree
from torch import Tensor

from fzero.base import torch_private
from fzero.base.errors import FzeroError
from fzero.layout.layout import Layout, Leaf, replicated_layout
from fzero.values import rules
from fzero.values.moves import WHOLE_FIRST, Beside, Gather, Primitives, Take, Whole


class Sharded:
    """A value of global `shape`, of which this rank holds `local`.

    `local` is the 1-d slice `layout.part(index, rank)` of the flattened value; for a replicated layout it is the value
    itself, in its shape. A `Sharded` is immutable: write `p = p - g`.
    """

    __slots__ = ("_full", "_level", "_local", "_signature", "index", "layout", "on")

    def __init__(self, local: Tensor, layout: Layout, index: int, on: Primitives) -> None:
        self._local: Tensor | None = local
        self._signature: tuple[Any, ...] | None = None
        self.layout, self.index, self.on = layout, index, on
        self._full: Tensor | None = None
        self._level = torch_private.depth() if on.is_tracing else 0

    @property
    def local(self) -> Tensor:
        """This rank's slice.

        Raises:
            FzeroError: when a step has taken this value's memory for its result.
        """
        if self._local is None:
            raise FzeroError(
                self.path,
                "this value was donated to a step that updated it in place",
                "use the value that the step returned, or make the step with shard(..., donate=False)",
            )
        return self._local

    @property
    def signature(self) -> tuple[Any, ...]:
        """What of it decides whether a traced program fits it. Made once; raises as `local`."""
        if self._signature is None:
            self._signature = self.layout, self.index, self.on, self.local.dtype, self.local.device
        return self._signature

    def give_up(self) -> None:
        """Let go of the slice, whose memory a step takes: this value cannot be used any more."""
        self._local = self._signature = None

    @property
    def leaf(self) -> Leaf:
        """Path and global shape."""
        return self.layout.leaves[self.index]

    @property
    def path(self) -> str:
        """Dotted path in the tree that was partitioned."""
        return self.leaf.path

    @property
    def shape(self) -> torch.Size:
        """The global shape."""
        return torch.Size(self.leaf.shape)

    @property
    def part(self) -> range:
        """The elements of the flattened value that this rank holds."""
        return self.layout.part(self.index, self.on.rank)

    @property
    def dtype(self) -> torch.dtype:
        return self.local.dtype

    @property
    def device(self) -> torch.device:
        return self.local.device

    @property
    def ndim(self) -> int:
        return len(self.leaf.shape)

    @property
    def requires_grad(self) -> bool:
        return self.local.requires_grad

    def dim(self) -> int:
        return self.ndim

    def numel(self) -> int:
        return self.leaf.numel

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def is_floating_point(self) -> bool:
        return self.dtype.is_floating_point

    def full_tensor(self) -> Tensor:
        """The whole value, a plain tensor that is the same on every rank. Its transpose scatters the cotangent.

        In a trace all uses within one torch.func transform share one gather, so that their cotangents are summed first
        and scattered once.
        """
        if self._full is not None:
            return self._full
        if self.layout.replicated:
            full = Whole.apply(self.local, self.on, self.path)
        else:
            full = Gather.apply(self.local, self.on, self.layout, self.index)
        if self.on.is_tracing and torch.is_grad_enabled() and self._level == torch_private.depth():
            self._full = full
        return full

    def with_local(self, local: Tensor) -> Sharded:
        """A value of this layout with another slice."""
        return Sharded(local, self.layout, self.index, self.on)

    def slice_of(self, full: Tensor) -> Sharded:
        """This rank's slice of `full`, a uniform tensor of the global shape: the inverse of `full_tensor`."""
        if self.layout.replicated:
            return self.with_local(full)
        value = self.with_local(Take.apply(full, self.on, self.layout, self.index))
        value._full = full if self.on.is_tracing and torch.is_grad_enabled() else None
        return value

    def new_zeros(self, *shape: Any, dtype: torch.dtype | None = None) -> Sharded:
        """Zeros that every rank of this value's mesh holds whole: a step count, say."""
        local = self.local.new_zeros(*shape, dtype=dtype)
        return Sharded(local, replicated_layout(local.shape, self.layout.mesh), 0, self.on)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _apply(func, args, kwargs or {})

    def __getattr__(self, name: str) -> Any:
        attribute = None if name.startswith("_") else getattr(Tensor, name, None)
        if attribute is None:
            raise AttributeError(f"Sharded has no attribute {name!r}")
        if callable(attribute):
            return functools.partial(_apply_method, attribute, self)
        return getattr(self.full_tensor(), name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Sharded:
        return self.with_local(self.local.clone())

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        held = "replicated" if self.layout.replicated else f"[{self.part.start}:{self.part.stop}] of {self.numel()}"
        rank = "every rank" if self.on.rank is None else f"rank {self.on.rank}"
        where = f"{self.layout.bucket!r}, {rank} of {self.layout.world}"
        state = str(self._local.dtype).removeprefix("torch.") if self._local is not None else "donated"
        return f"Sharded({self.path or 'value'}: {state}{list(self.shape)}, {held}, bucket {where})"


def _apply_method(method: Callable[..., Any], self: Sharded, *args: Any, **kwargs: Any) -> Any:
    return _apply(method, (self, *args), kwargs)


def _operator(name: str) -> Callable[..., Any]:
    method = getattr(Tensor, name)

    def operator(self: Sharded, *args: Any) -> Any:
        return _apply(method, (self, *args), {})

    operator.__name__ = name
    return operator


for _name in rules.OPERATORS:
    setattr(Sharded, _name, _operator(_name))
Sharded.__hash__ = object.__hash__  # type: ignore[method-assign]  # __eq__ is elementwise, as a tensor's


class _Place(NamedTuple):
    """A value without its slice. torch.func compares that of a primal and its tangent, and prints both where they
    differ."""

    layout: Layout
    leaf: int
    on: Primitives

    def __repr__(self) -> str:
        return f"{self.layout.leaves[self.leaf].path} on {self.layout.mesh}"


def _rebuilt(slices: Iterable[Any], place: _Place) -> Sharded:
    """The value of one slice, as torch.func rebuilds it.

    Raises:
        FzeroError: for a batch of slices, or a slice of a slice.
    """
    (local,) = slices
    value = Sharded(local, *place)
    held = value.shape if value.layout.replicated else torch.Size([len(value.part)])
    if isinstance(local, Tensor) and local.shape != held:
        raise FzeroError(
            value.path,
            f"a transform maps over this leaf, to slices of {list(local.shape)} where a rank holds {list(held)}: "
            "jacrev, jacfwd, hessian, and in_dims and out_dims of vmap know no dimensions of a Sharded",
            WHOLE_FIRST,
        )
    return value


torch_pytree.register_pytree_node(
    Sharded,
    lambda value: ([value.local], _Place(value.layout, value.index, value.on)),
    _rebuilt,
    serialized_type_name="fzero.Sharded",
)


def is_sharded(value: Any) -> bool:
    """Whether `value` is a `Sharded`."""
    return isinstance(value, Sharded)


def _apply(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The rule of `func`, or gather and run."""
    name = rules.name_of(func)
    if rules.mutates(func, kwargs):
        first = next(x for x in (*args, *kwargs.values()) if _contains_sharded(x))
        path = first.path if is_sharded(first) else ""
        raise FzeroError(path, f"{name} would change a value in place", "a Sharded is immutable; write p = p + u")
    if name in rules.LIST_REDUCTIONS:
        return [rules.LIST_REDUCTIONS[name](x, *args[1:], **kwargs) for x in args[0]]
    if name in rules.LIST_OPS or (name.startswith("_foreach_") and name not in rules.WHOLE_LIST_OPS):
        return _listwise(func, args, kwargs)
    if name in rules.ELEMENTWISE:
        like = _anchor(args, kwargs)
        if like is not None:
            return _elementwise(func, like, args, kwargs)
    if name in rules.REDUCTIONS and args and is_sharded(args[0]):
        result = _reduced(rules.REDUCTIONS[name], *args, **kwargs)
        if result is not None:
            return result
    gathered_args, gathered_kwargs = torch_pytree.tree_map(_gathered, (args, kwargs), is_leaf=is_sharded)
    return func(*gathered_args, **gathered_kwargs)


def _reduced(rule: Callable[..., Tensor | None], x: Sharded, *args: Any, **kwargs: Any) -> Tensor | None:
    if x.layout.replicated or _runs_whole(x):
        return None
    return rule(x.local, x.leaf, x.on, *args, **kwargs)


def _gathered(x: Any) -> Any:
    return x.full_tensor() if isinstance(x, Sharded) else x


def _contains_sharded(x: Any) -> bool:
    return is_sharded(x) or (isinstance(x, (list, tuple)) and any(map(is_sharded, x)))


def _anchor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sharded | None:
    """The operand whose layout the elementwise result has; None where the operands must be gathered: they broadcast,
    one may be a batch of vmap, or a 0-d leaf meets a plain 0-d tensor that is being differentiated, as a weight meets
    a rank's own loss."""
    operands = [x for x in (*args, *kwargs.values()) if isinstance(x, (Sharded, Tensor))]
    values = [x for x in operands if isinstance(x, Sharded)]
    if not values:
        return None
    like = max(values, key=lambda x: (x.ndim > 0, not x.layout.replicated))
    if len(values) < len(operands) and (torch_private.in_vmap() or (like.ndim == 0 and _is_differentiated(operands))):
        return None
    fits = all(x.ndim == 0 or tuple(x.shape) == tuple(like.shape) for x in operands)
    return like if fits else None


def _is_differentiated(operands: list[Any]) -> bool:
    return torch_private.in_forward_mode() or any(x.requires_grad for x in operands)


def _runs_whole(like: Sharded) -> bool:
    """Whether functions of `like` are computed on its whole value. In a trace of forward mode and of second derivatives
    they are: there torch makes tensors by size, a slice's differs between ranks, and one program serves them all."""
    is_sliced = like.on.is_tracing and not like.layout.replicated
    return is_sliced and (torch_private.in_forward_mode() or torch_private.in_second_order())


def _elementwise(func: Callable[..., Any], like: Sharded, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    result = func(*(_operand(x, like) for x in args), **{key: _operand(x, like) for key, x in kwargs.items()})
    return torch_pytree.tree_map(lambda x: _result(x, like) if isinstance(x, Tensor) else x, result)


def _result(x: Tensor, like: Sharded) -> Sharded:
    """What was made of operands beside `like`, as a value of its layout."""
    return like.slice_of(x) if _runs_whole(like) else like.with_local(x)


def _operand(x: Any, like: Sharded) -> Any:
    """`x` as it stands beside `like`."""
    if _runs_whole(like):
        return _gathered(x)
    if isinstance(x, Sharded):
        if x.layout == like.layout and x.index == like.index:
            return x.local
        x = x.full_tensor()
    if not isinstance(x, Tensor) or like.layout.replicated:
        return x
    if x.ndim == 0 and like.ndim > 0:
        return Beside.apply(x, like.on, like.path)
    return like.slice_of(x).local


def _listwise(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An op on lists of equal length: position by position elementwise, each result as its position's first operand."""
    rows = list(zip(*(x for x in args if isinstance(x, (list, tuple)) and any(map(_is_value, x)))))
    likes = [_anchor(row, {}) for row in rows]
    first = next((like for like in likes if like is not None), None)

    def operand(x: Any) -> Any:
        if isinstance(x, (list, tuple)) and any(map(_is_value, x)):
            return [_gathered(item) if like is None else _operand(item, like) for item, like in zip(x, likes)]
        x = _gathered(x)
        if first is None or _runs_whole(first) or not isinstance(x, Tensor) or x.ndim:
            return x
        return Beside.apply(x, first.on, first.path)

    result = func(*map(operand, args), **{key: operand(x) for key, x in kwargs.items()})
    if result is None:
        return None
    columns = result if isinstance(result, tuple) and result and isinstance(result[0], (list, tuple)) else (result,)
    wrapped = [[x if like is None else _result(x, like) for x, like in zip(column, likes)] for column in columns]
    return tuple(wrapped) if columns is result else wrapped[0]


def _is_value(x: Any) -> bool:
    return isinstance(x, (Sharded, Tensor))
