"""View: what a read of a leaf outside of a step returns, where plain torch returns a view of the leaf.

A leaf is gathered for a read such as `p[0]` or `p.T`. The result lies in the gathered copy, and a write to it would be
lost: in plain torch it is a write to the leaf. So a `View` reads as any tensor does, and cannot be written to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fzero.base import torch_private
from fzero.base.errors import FzeroError
from fzero.values import rules

AUTOGRAD = frozenset({"requires_grad", "requires_grad_", "grad", "retain_grad", "register_hook", "backward"})
"""Names of functions that change what autograd knows of a tensor, and no element."""


class View(Tensor):
    """A view of a copy of the leaf at `path`. Functions of it return plain tensors, and views of it are `View`s."""

    path: str
    is_read_first = True
    """A function of a `View` and of a `Sharded` is one of a plain tensor and the `Sharded`."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, rules.name_of(func)
        if name in rules.METADATA or name in AUTOGRAD:
            with torch.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        views = list(_find_views((*args, *kwargs.values())))
        for written in _find_views([rules.find_target(func, args, kwargs)]):
            raise _refuse(written.path, name)
        if name in rules.MEMORY and (name == "dlpack" or not torch_private.is_called_by_torch()):
            raise FzeroError(views[0].path, f"{name} would hand out memory of a view of this leaf", "give a clone()")
        if not all(issubclass(each, View) or each in (Tensor, torch.nn.Parameter) for each in types):
            args, kwargs = torch_private.map_pytree_only(View, View.as_plain, (args, kwargs))
            return apply_to_copies(func, args, kwargs, [(x.path, x.as_plain()) for x in views])
        with torch.DisableTorchFunctionSubclass():
            return apply_to_copies(func, args, kwargs, [(x.path, x) for x in views])

    def as_plain(self) -> Tensor:
        """The same view as a plain tensor."""
        with torch.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return memo.setdefault(id(self), self.clone())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.clone().__reduce_ex__(protocol)

    def __format__(self, spec: str) -> str:
        return self.as_plain().__format__(spec)

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        return self.as_plain().__repr__(**options)


def apply_to_copies(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], copies: Sequence[tuple[str, Tensor]]
) -> Any:
    """`func(*args, **kwargs)`, some of whose operands are copies of leaves, given as `(path, copy)`, or views of such.
    Results that share memory with one of them are `View`s, or read-only arrays of numpy.

    Raises:
        FzeroError: for a function that writes into a copy.
    """
    name = rules.name_of(func)
    memories = [torch_private.unwrap(copy) for _, copy in copies]
    before = [(torch_private.version_of(x), x.clone() if name in rules.MOVES_STATISTICS else x) for x in memories]
    result = func(*args, **kwargs)
    for (path, _), x, (version, elements) in zip(copies, memories, before):
        if torch_private.version_of(x) != version or not (x is elements or _is_equal(x, elements)):
            raise _refuse(path, name)
    if hasattr(result, "flags"):  # an array of numpy
        result.flags.writeable = False
    if isinstance(result, Tensor):
        return _protect(result, copies)
    if isinstance(result, Iterator):
        return iter([_protect(x, copies) for x in result])
    return torch_private.map_pytree(lambda x: _protect(x, copies), result)


def _protect(x: Any, copies: Sequence[tuple[str, Tensor]]) -> Any:
    """A `View` in the place of a tensor that lies in memory of a copy; anything else itself."""
    if not isinstance(x, Tensor) or x.layout is not torch.strided:
        return x
    for path, copy in copies:
        if torch_private.is_alias(torch_private.unwrap(x), torch_private.unwrap(copy)):
            view = x.as_subclass(View)
            view.path = path
            return view
    return x


def _find_views(given: Iterable[Any]) -> Iterator[View]:
    """The views among operands, and in lists of them."""
    for x in given:
        if isinstance(x, View):
            yield x
        elif isinstance(x, (list, tuple)):
            yield from _find_views(x)
        elif isinstance(x, dict):
            yield from _find_views(x.values())


def _is_equal(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.nan_to_num(), b.nan_to_num())


def _refuse(path: str, name: str) -> FzeroError:
    return FzeroError(
        path,
        f"{name} would write into a copy of this leaf, because leaves are gathered for functions outside of a step",
        "write p = p + u, change a part with fzero.update_leaf(params, path, fn), or write into a clone()",
    )
