"""Sharded: one global value of which each rank holds a flat slice. Torch functions follow these rules on it:

* An elementwise function stays sharded. Its other operands are sharded values of the same layout, scalars, or uniform
  tensors of the same shape.
* A reduction of all elements (`sum`, `mean`, `norm`, `max`, `min`, `all`, `any`) takes one collective and returns a
  plain 0-d tensor.
* A list function (`torch._foreach_*`) is elementwise at each position of its lists.
* Any other function gathers the value and runs on the full tensor.

Under `torch.func.vmap` a plain operand may be a batch, and a batch has no slices: its sharded operands are gathered.

A `Sharded` is a leaf to optree, so that `fzero.tree.map` sees one value. To torch.func it is a node with one child, its
slice, so that torch.func differentiates the slice.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.base import torch_private
from fzero.base.errors import FzeroError
from fzero.layout.layout import Layout, Leaf, replicated_layout
from fzero.values import rules
from fzero.values.moves import UNPARTITION_FIRST, Beside, Gather, MovePerformer, Take, UseReplicated


class Form(NamedTuple):
    """All of a `Sharded` but its elements. A program that was traced for a value fits every value of an equal form."""

    layout: Layout
    leaf: int
    on: MovePerformer
    dtype: torch.dtype | None
    device: torch.device | None


class Sharded:
    """A value of global `shape`, of which this rank holds the slice `local`.

    `local` is 1-d: the elements `layout.part(index, rank)` of the flattened value. With a replicated layout `local` is
    the full value, in its shape. `on` performs the moves of the value. A `Sharded` is immutable: write `p = p - g`.
    """

    __slots__ = ("_full", "_level", "_local", "form")

    def __init__(self, local: Tensor, layout: Layout, index: int, on: MovePerformer) -> None:
        self._local: Tensor | None = local
        self.form = Form(layout, index, on, local.dtype, local.device)
        self._full: Tensor | None = None
        self._level = torch_private.depth() if on.is_tracing else 0

    @classmethod
    def of_form(cls, local: Tensor, form: Form) -> Sharded:
        """A value of a known form. Steps return their state so: equal forms are then the same object, and comparing the
        arguments of the next call takes no time."""
        value = cls.__new__(cls)
        value._local, value.form, value._full = local, form, None
        value._level = torch_private.depth() if form.on.is_tracing else 0
        return value

    @property
    def layout(self) -> Layout:
        """Where the leaves of the value's bucket lie."""
        return self.form.layout

    @property
    def index(self) -> int:
        """The position of the value's leaf among the leaves of `layout`."""
        return self.form.leaf

    @property
    def on(self) -> MovePerformer:
        """What performs the moves of the value."""
        return self.form.on

    @property
    def local(self) -> Tensor:
        """This rank's slice.

        Raises:
            FzeroError: when this value was donated to a step.
        """
        if self._local is None:
            raise FzeroError(
                self.path,
                "this value was donated to a step that updated it in place",
                "use the value that the step returned, or make the step with shard(..., donate=False)",
            )
        return self._local

    def give_up(self) -> None:
        """Drop the slice, because a step reuses its memory. This value cannot be used afterwards."""
        self._local = None

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
        """The full value, a plain tensor, the same on every rank. The transpose scatters the cotangent.

        In a trace, all uses within one torch.func transform share one gather. So autograd sums the cotangents of all
        uses, and the sum is scattered once.
        """
        if self._full is not None:
            return self._full
        if self.layout.replicated:
            full = UseReplicated.apply(self.local, self.on, self.path)
        else:
            full = Gather.apply(self.local, self.on, self.layout, self.index)
        # A gather under no_grad or of an inner transform has no cotangent for later uses: do not share it.
        if self.on.is_tracing and torch.is_grad_enabled() and self._level == torch_private.depth():
            self._full = full
        return full

    def with_local(self, local: Tensor) -> Sharded:
        """A value of the same leaf and layout with the slice `local`."""
        return Sharded(local, self.layout, self.index, self.on)

    def slice_of(self, full: Tensor) -> Sharded:
        """The value whose full tensor is `full`, a uniform tensor of the global shape. Inverse of `full_tensor`."""
        if self.layout.replicated:
            return self.with_local(full)
        value = self.with_local(Take.apply(full, self.on, self.layout, self.index))
        value._full = full if self.on.is_tracing and torch.is_grad_enabled() else None
        return value

    def new_zeros(self, *shape: Any, dtype: torch.dtype | None = None) -> Sharded:
        """A replicated value of zeros on this value's mesh: every rank holds all of them. For a step count, say."""
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


def _make_operator(name: str) -> Callable[..., Any]:
    method = getattr(Tensor, name)

    def operator(self: Sharded, *args: Any) -> Any:
        return _apply(method, (self, *args), {})

    operator.__name__ = name
    return operator


for _name in rules.OPERATORS:
    setattr(Sharded, _name, _make_operator(_name))
Sharded.__hash__ = object.__hash__  # type: ignore[method-assign]  # by identity: __eq__ is elementwise, as a tensor's


class _Context(NamedTuple):
    """All of a value but its slice: the context of the pytree node.

    torch.func compares the contexts of a primal and its tangent. Where they differ, its error prints both.
    """

    layout: Layout
    leaf: int
    on: MovePerformer

    def __repr__(self) -> str:
        return f"{self.layout.leaves[self.leaf].path} on {self.layout.mesh}"


def _unflatten(slices: Iterable[Any], context: _Context) -> Sharded:
    """The value of one slice, where torch.func rebuilds a pytree.

    Raises:
        FzeroError: for a slice of another shape than the rank holds: a batch of slices, or a slice of a slice.
    """
    (local,) = slices
    if not isinstance(local, Tensor):  # torch.func also builds trees of dimensions, one for each slice
        return Sharded.of_form(local, Form(*context, dtype=None, device=None))
    value = Sharded(local, *context)
    held = value.shape if value.layout.replicated else torch.Size([len(value.part)])
    if local.shape != held:
        raise FzeroError(
            value.path,
            f"a transform maps over this leaf, to slices of {list(local.shape)} where a rank holds {list(held)}: "
            "jacrev, jacfwd, hessian, and in_dims and out_dims of vmap know no dimensions of a Sharded",
            UNPARTITION_FIRST,
        )
    return value


torch_private.register_pytree_node(
    Sharded,
    lambda value: ([value.local], _Context(value.layout, value.index, value.on)),
    _unflatten,
    serialized_type_name="fzero.Sharded",
)


def is_sharded(value: Any) -> bool:
    """Whether `value` is a `Sharded`."""
    return isinstance(value, Sharded)


def _apply(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`func(*args, **kwargs)` by its rule in `rules`; without a rule, the function of the gathered values."""
    name = rules.name_of(func)
    if rules.is_in_place(func, kwargs):
        first = next(x for x in (*args, *kwargs.values()) if _has_sharded(x))
        path = first.path if is_sharded(first) else ""
        raise FzeroError(path, f"{name} would change a value in place", "a Sharded is immutable; write p = p + u")
    if name in rules.LIST_REDUCTIONS:
        return [rules.LIST_REDUCTIONS[name](x, *args[1:], **kwargs) for x in args[0]]
    if name in rules.LIST_OPS or (name.startswith("_foreach_") and name not in rules.GATHERED_LIST_OPS):
        return _apply_to_lists(func, args, kwargs)
    if name in rules.ELEMENTWISE:
        anchor = _find_anchor(args, kwargs)
        if anchor is not None:
            return _apply_elementwise(func, anchor, args, kwargs)
    if name in rules.REDUCTIONS and args and is_sharded(args[0]):
        result = _reduce(rules.REDUCTIONS[name], *args, **kwargs)
        if result is not None:
            return result
    gathered_args, gathered_kwargs = torch_private.map_pytree(_gather, (args, kwargs), is_leaf=is_sharded)
    return func(*gathered_args, **gathered_kwargs)


def _reduce(rule: Callable[..., Tensor | None], x: Sharded, *args: Any, **kwargs: Any) -> Tensor | None:
    """The result of a rule for full reductions; None where the value is to be gathered instead."""
    if x.layout.replicated or _is_computed_in_full(x):
        return None
    return rule(x.local, x.leaf, x.on, *args, **kwargs)


def _gather(x: Any) -> Any:
    return x.full_tensor() if isinstance(x, Sharded) else x


def _has_sharded(x: Any) -> bool:
    return is_sharded(x) or (isinstance(x, (list, tuple)) and any(map(is_sharded, x)))


def _find_anchor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sharded | None:
    """The operand whose layout the result of an elementwise function has. None where all operands are to be gathered:

    * the operands broadcast, or
    * a plain operand may be a batch of vmap, or
    * a 0-d leaf meets a plain 0-d tensor and one of them is differentiated, as a weight meets this rank's own loss.
    """
    operands = [x for x in (*args, *kwargs.values()) if isinstance(x, (Sharded, Tensor))]
    values = [x for x in operands if isinstance(x, Sharded)]
    if not values:
        return None
    anchor = max(values, key=lambda x: (x.ndim > 0, not x.layout.replicated))
    has_plain = len(values) < len(operands)
    if has_plain and (torch_private.in_vmap() or (anchor.ndim == 0 and _is_differentiated(operands))):
        return None
    fits = all(x.ndim == 0 or tuple(x.shape) == tuple(anchor.shape) for x in operands)
    return anchor if fits else None


def _is_differentiated(operands: list[Any]) -> bool:
    return torch_private.in_forward_mode() or any(x.requires_grad for x in operands)


def _is_computed_in_full(anchor: Sharded) -> bool:
    """Whether functions beside `anchor` run on full values, in a trace of forward mode or of second derivatives.

    There torch creates tensors by size. The size of a slice differs between ranks, but one program serves all ranks.
    """
    is_sliced = anchor.on.is_tracing and not anchor.layout.replicated
    return is_sliced and (torch_private.in_forward_mode() or torch_private.in_second_order())


def _apply_elementwise(func: Callable[..., Any], anchor: Sharded, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An elementwise function of this rank's slices, its tensors wrapped as values of the anchor's layout."""
    result = func(*(_to_slice(x, anchor) for x in args), **{key: _to_slice(x, anchor) for key, x in kwargs.items()})
    return torch_private.map_pytree(lambda x: _wrap(x, anchor) if isinstance(x, Tensor) else x, result)


def _wrap(x: Tensor, anchor: Sharded) -> Sharded:
    """The value of the anchor's layout from a result on slices, or on full values."""
    return anchor.slice_of(x) if _is_computed_in_full(anchor) else anchor.with_local(x)


def _to_slice(x: Any, anchor: Sharded) -> Any:
    """The operand `x` as a slice that pairs with the anchor's, or in full where functions run on full values."""
    if _is_computed_in_full(anchor):
        return _gather(x)
    if isinstance(x, Sharded):
        if x.layout == anchor.layout and x.index == anchor.index:
            return x.local
        x = x.full_tensor()
    if not isinstance(x, Tensor) or anchor.layout.replicated:
        return x
    if x.ndim == 0 and anchor.ndim > 0:
        return Beside.apply(x, anchor.on, anchor.path)
    return anchor.slice_of(x).local


def _apply_to_lists(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A function of lists of equal length, elementwise at each position. Each position has an anchor of its own."""
    rows = list(zip(*(x for x in args if isinstance(x, (list, tuple)) and any(map(_is_value, x)))))
    anchors = [_find_anchor(row, {}) for row in rows]
    first = next((anchor for anchor in anchors if anchor is not None), None)

    def to_slices(x: Any) -> Any:
        if isinstance(x, (list, tuple)) and any(map(_is_value, x)):
            return [_gather(item) if anchor is None else _to_slice(item, anchor) for item, anchor in zip(x, anchors)]
        x = _gather(x)
        if first is None or _is_computed_in_full(first) or not isinstance(x, Tensor) or x.ndim:
            return x
        return Beside.apply(x, first.on, first.path)

    result = func(*map(to_slices, args), **{key: to_slices(x) for key, x in kwargs.items()})
    if result is None:
        return None
    # One list, or a tuple of lists: `scale_by_adam` returns three.
    columns = result if isinstance(result, tuple) and result and isinstance(result[0], (list, tuple)) else (result,)
    wrapped = [[x if anchor is None else _wrap(x, anchor) for x, anchor in zip(column, anchors)] for column in columns]
    return tuple(wrapped) if columns is result else wrapped[0]


def _is_value(x: Any) -> bool:
    return isinstance(x, (Sharded, Tensor))
