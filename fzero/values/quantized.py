"""Quantized: a value that is stored as codes and scales, and reads as an ordinary floating tensor.

A `Quantized` is a tree of two leaves, `codes` and `scales`. So it is partitioned, saved, loaded and given to a step as
any two leaves are: a gather moves the codes as they are stored. Both are frozen. To torch a `Quantized` is a tensor:
each function of it is that of the dequantized value.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any, TypeGuard

import optree
import torch
from torch import Tensor

from fzero.base import torch_private, tree
from fzero.base.errors import FzeroError
from fzero.layout.splits import find_part_shape
from fzero.program import ops
from fzero.program.blockwise import Coding, dequantize
from fzero.program.records import record
from fzero.values import rules
from fzero.values.functions import is_sharded
from fzero.values.views import apply_to_copies

_WAY_OUT = "train other leaves beside it, such as the factors of LoRA, or partition it without fzero.quantize"


class Quantized(Tensor):
    """A tensor of `coding.shape` and `coding.dtype`, held as `codes` and `scales`: plain tensors, or `Sharded` values.

    Immutable, and frozen. One whose codes are split over model axes has the `shape` of this rank's part.
    """

    codes: Any
    scales: Any
    coding: Coding
    is_frozen = True
    is_read_first = True
    """A function of a `Quantized` and of a `Sharded` is one of the dequantized value and the `Sharded`."""

    def __new__(cls, codes: Any, scales: Any, coding: Coding) -> Quantized:
        device = getattr(codes, "device", None) or "cpu"  # a tree may hold anything in the places of leaves
        shape = coding.shape
        if is_sharded(codes) and codes.form.layout.splits > 1:
            shape = find_part_shape(shape, _count_runs(codes), codes.form.layout.splits)
        value: Quantized = torch_private.make_wrapper_subclass(cls, shape, dtype=coding.dtype, device=device)
        value.codes, value.scales, value.coding = codes, scales, coding
        return value

    def __init__(self, *of: Any) -> None:
        pass  # `__new__` did it; the constructor of Tensor takes no arguments

    @property
    def path(self) -> str:
        """The dotted path of a value that was partitioned; empty for another."""
        return getattr(self.codes, "path", "").rpartition(".")[0]

    @property
    def grad(self) -> None:  # type: ignore[override]
        """None: it is frozen."""

    @property
    def global_shape(self) -> torch.Size:
        """The shape of the whole value."""
        return torch.Size(self.coding.shape)

    def full_tensor(self) -> Tensor:
        """The dequantized value, a plain tensor: of a split one this rank's part. A step dequantizes at each use, and
        keeps nothing of it in between."""
        codes, scales = (x.full_tensor() if is_sharded(x) else x for x in (self.codes, self.scales))
        _, *rest = self.coding
        given = codes, scales, list(self.shape), *rest, self.path
        if not (self.coding.double_quant and is_sharded(self.codes) and self.codes.form.layout.splits > 1):
            return dequantize(*given)
        layout = self.codes.form.layout  # scales of a group belong to several parts: so each rank has all of them
        position = self.codes.on.perform(record(ops.axis_index), layout.split_axis, codes.device)
        return dequantize(*given, position, _count_runs(self.codes), layout.splits)

    def read_as(self, dtype: torch.dtype) -> Quantized:
        """The value with the same codes and scales, whose elements are rounded to another dtype."""
        return Quantized(self.codes, self.scales, self.coding._replace(dtype=dtype))

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, kwargs = rules.name_of(func), kwargs or {}
        if name in rules.METADATA:
            with torch.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if name in rules.REFUSED or (args and is_quantized(args[0]) and rules.is_in_place(func, kwargs)):
            given = torch_private.pytree_leaves((args, kwargs), is_leaf=is_quantized)
            path = next(x.path for x in given if is_quantized(x))
            raise FzeroError(
                path or "a quantized leaf",
                f"is quantized: {name} would differentiate it or change it in place",
                _WAY_OUT,
            )
        copies: list[tuple[str, Tensor]] = []
        args, kwargs = _read_all((args, kwargs), copies)
        return apply_to_copies(func, args, kwargs, copies)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """A kernel of torch that was called past `__torch_function__`, on the dequantized value."""
        args, kwargs = _read_all((args, kwargs or {}))
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Quantized:
        return Quantized(copy.deepcopy(self.codes, memo), copy.deepcopy(self.scales, memo), self.coding)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Quantized, (self.codes, self.scales, self.coding)

    def __repr__(self) -> str:  # type: ignore[override]
        shape, dtype, bits, block, levels, double_quant = self.coding
        name, of = str(dtype).removeprefix("torch."), "" if levels == "even" else f" of {levels}"
        held = f"as {bits} bits{of} in blocks of {block}{', scales as 8 bits' if double_quant else ''}"
        return f"Quantized({self.path or 'value'}: {name}{list(shape)} {held})"

    __hash__ = object.__hash__  # by identity: __eq__ is elementwise, as a tensor's


def _count_runs(codes: Any) -> int:
    """The runs, in the whole leaf, of what one rank has of split codes."""
    split = codes.form.layout.leaves[codes.index].split
    return 1 if split is None else split.parts


def is_quantized(value: Any) -> TypeGuard[Quantized]:
    """Whether `value` is a `Quantized`."""
    return isinstance(value, Quantized)


def map_quantized_leaves(fn: Callable[[Quantized], Any], values: tree.Tree) -> tree.Tree:
    """A tree with each `Quantized` of it replaced by what `fn` returns for it."""
    leaves, treedef = tree.flatten(values, is_leaf=is_quantized)
    if not any(map(is_quantized, leaves)):
        return values
    return tree.unflatten(treedef, [fn(x) if is_quantized(x) else x for x in leaves])


def read_quantized_leaves(values: tree.Tree) -> tree.Tree:
    """A tree with each `Quantized` of it dequantized, for functions that would compute with codes and scales."""
    return map_quantized_leaves(Quantized.full_tensor, values)


def _read_all(given: Any, copies: list[tuple[str, Tensor]] | None = None) -> Any:
    """A structure with each `Quantized` of it dequantized. A `Sharded` stays the same object, which remembers that it
    was gathered. Adds to `copies` the path and the dequantized value of each that was partitioned, outside of a step.
    """

    def read(x: Any) -> Any:
        if not is_quantized(x):
            return x
        full = x.full_tensor()
        if copies is not None and is_sharded(x.codes) and not x.codes.on.is_tracing:
            copies.append((x.path, full))
        return full

    return torch_private.map_pytree(read, given, is_leaf=lambda x: isinstance(x, Tensor))


def _flatten(value: Quantized) -> tuple[list[Any], Coding]:
    if torch_private.is_called_by_functorch():
        problem = "is quantized, and a transform of torch.func is given it to differentiate or to map"
        raise FzeroError(value.path or "a quantized leaf", problem, _WAY_OUT)
    return [value.codes, value.scales], value.coding


def _unflatten(children: Iterable[Any], coding: Coding) -> Quantized:
    return Quantized(*children, coding)


_register: Any = optree.register_pytree_node  # whose types want a Collection
_register(
    Quantized,
    lambda value: ((value.codes, value.scales), value.coding, value.coding.keys),
    lambda coding, children: Quantized(*children, coding),
    namespace=tree.NAMESPACE,
)
torch_private.register_pytree_node(Quantized, _flatten, _unflatten, serialized_type_name="fzero.Quantized")
