"""Spent: parameters whose values are in slices. A use of the old values is an error that says so."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from fzero.base import torch_private
from fzero.base.errors import FzeroError

_STRUCTURE = {
    *("shape", "size", "numel", "nelement", "ndim", "dim", "stride", "dtype", "itemsize", "element_size", "nbytes"),
    *("device", "layout", "is_cuda", "is_cpu", "is_meta", "is_sparse", "is_leaf", "requires_grad", "grad_fn"),
    *("is_contiguous", "is_floating_point", "is_complex", "_backward_hooks", "_post_accumulate_grad_hooks"),
}
"""The attributes and methods of a tensor that need no values, and change nothing."""

Refuse = Callable[[str], FzeroError]
"""(what is asked of a parameter) -> the error."""


class Spent(Tensor):
    """A parameter without values, on a device. It has the structure of `like`; all else raises what `refuse` makes."""

    _refuse: Refuse
    _may_freeze = False  # whether `requires_grad` may change

    @staticmethod
    def __new__(cls, like: Tensor, device: torch.device, refuse: Refuse) -> Spent:
        self: Spent = torch_private.make_wrapper_subclass(
            cls, like.size(), dtype=like.dtype, device=device, requires_grad=like.requires_grad
        )
        self._refuse = refuse
        vars(self)["_is_param"] = True  # for isinstance(x, nn.Parameter), as torch marks parameters of other classes
        return self

    def __init__(self, like: Tensor, device: torch.device, refuse: Refuse) -> None:
        pass

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_read = func.__name__ == "__get__"
        name = func.__self__.__name__ if func.__name__ in ("__get__", "__set__") else func.__name__
        may_freeze = name in ("requires_grad", "requires_grad_") and args[0]._may_freeze
        if (name in _STRUCTURE and func.__name__ != "__set__") or may_freeze:
            with torch.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        spent = torch_private.pytree_leaves((args, kwargs))
        first = next(x for x in spent if isinstance(x, Spent))
        raise first._refuse(f".{name}" if is_read else name)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        first = next(x for x in torch_private.pytree_leaves((args, kwargs)) if isinstance(x, Spent))
        raise first._refuse(func.__name__)

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise self._refuse("copy.deepcopy")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise self._refuse("pickle")

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Spent(shape={tuple(self.shape)}, dtype={self.dtype}, values in slices)"

    __hash__ = Tensor.__hash__


def spend_model(module: nn.Module, device: torch.device, refuse: Callable[[str, str], FzeroError]) -> None:
    """Take the values of a module's parameters: whoever holds a parameter holds a `Spent` on `device` from now on.
    A parameter that torch does not let go, because a graph or a weak reference holds it, is replaced in the module
    alone, and torch refuses to differentiate the graph. `refuse(path, what)` makes the error for the use `what` of a
    parameter; `path` is "" for a use of the module."""
    for path, parameter in list(module.named_parameters()):
        spent: Any = Spent(parameter, device, functools.partial(refuse, path))
        try:
            torch.utils.swap_tensors(parameter, spent)
        except RuntimeError:
            _replace(module, parameter, spent)
    module.register_load_state_dict_pre_hook(functools.partial(_refuse_load, refuse))


@contextmanager
def let_freeze(module: nn.Module) -> Iterator[None]:
    """A context in which code may set `requires_grad` of spent parameters, as peft does to switch adapters. At its end
    each is as before."""
    before = [(x, x.requires_grad) for x in module.parameters() if isinstance(x, Spent)]
    for x, _ in before:
        x._may_freeze = True
    try:
        yield
    finally:
        for x, requires_grad in before:
            x.requires_grad_(requires_grad)
            x._may_freeze = False


def _refuse_load(refuse: Callable[[str, str], FzeroError], module: nn.Module, *_: Any) -> None:
    if any(isinstance(x, Spent) for x in module.parameters()):  # no copy that was given values
        raise refuse("", "load_state_dict")


def _replace(module: nn.Module, old: Tensor, new: Any) -> None:
    for each in module.modules():
        for name, parameter in each.named_parameters(recurse=False, remove_duplicate=False):
            if parameter is old:
                setattr(each, name, new)
