"""The ways in which a step uses a leaf with one operator."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from conformance.database import DEVICE

import fzero


class Form(NamedTuple):
    """A way to call an operator `op` with the first argument `x` and the others.

    `leaves` says which tensors of a sample are partitioned: the `first`; each of the `others`, alone; `all` of them; or
    the first and all in turn, from sample to sample.
    """

    call: Callable[[Any, Any, tuple[Any, ...], dict[str, Any]], Any]
    exists: Callable[[Any], bool] = lambda op: True
    leaves: str = "turn"
    differentiates: bool = False
    batches: bool = False  # whether the tensors that are not partitioned are batches, which differ between ranks
    writes_leaf: bool = False  # whether the operator would write to a leaf: then it must be refused


def call_function(op: Any, x: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return op(x, *args, **kwargs)


def call_method(op: Any, x: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return getattr(x, op.method_variant.__name__)(*args, **kwargs)


def call_unbound(op: Any, x: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return op.method_variant(x, *args, **kwargs)


def call_operator(op: Any, x: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return op.operator_variant(x, *args, **kwargs)


def call_in_place(op: Any, x: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What an in-place form makes of `x`, and what it returns."""
    variant = op.inplace_variant
    change = getattr(x, variant.__name__) if has_method(variant) else functools.partial(variant, x)
    return [x, change(*args, **kwargs)]


def change_clone(op: Any, x: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return call_in_place(op, x.clone(), args, kwargs)


def change_result(op: Any, x: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """In place on a result that is a plain tensor in a sharded step too."""
    return call_in_place(op, torch.stack((x, x))[0], args, kwargs)


def write_out(op: Any, x: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What `out=` is filled with: tensors of the shapes that `kwargs["out"]` lists."""
    shapes = kwargs["out"]
    out = [torch.zeros(shape, dtype=dtype, device=DEVICE) for shape, dtype in shapes]
    op(x, *args, **{**kwargs, "out": out[0] if len(out) == 1 else tuple(out)})
    return out


def write_leaf(op: Any, x: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`x` is filled with the operator's result for the arguments `kwargs["of"]`."""
    given, args, kwargs = kwargs["of"]
    op(given, *args, **{**kwargs, "out": x})
    return x


def has_method(variant: Any) -> bool:
    """Whether a variant of an operator is a method of tensors. Some are functions that call with `inplace=True`."""
    return hasattr(torch.Tensor, getattr(variant, "__name__", "<lambda>"))


def is_sharded(value: Any) -> bool:
    return isinstance(value, fzero.Sharded)


FORMS = {
    "value": Form(call_function, leaves="first", differentiates=True),
    "others": Form(call_function, leaves="others", differentiates=True),
    "all": Form(call_function, leaves="all", differentiates=True),
    "batch": Form(call_function, leaves="first", differentiates=True, batches=True),
    "method": Form(call_method, lambda op: has_method(op.method_variant)),
    "unbound": Form(call_unbound, lambda op: has_method(op.method_variant)),
    "operator": Form(call_operator, lambda op: op.operator_variant is not None),
    "state": Form(call_function, leaves="first"),
    "in_place": Form(change_clone, lambda op: op.inplace_variant is not None, differentiates=True),
    "in_place_result": Form(change_result, lambda op: op.inplace_variant is not None, differentiates=True),
    "in_place_leaf": Form(call_in_place, lambda op: op.inplace_variant is not None, writes_leaf=True),
    "out": Form(write_out, lambda op: op.supports_out),
    "out_leaf": Form(write_leaf, lambda op: op.supports_out, leaves="first", writes_leaf=True),
}
"""Each form by its name. `value` to `batch` call the function. `state` returns the result as the leaf's new state."""
