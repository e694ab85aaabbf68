"""Rebinding: functions that hold a module become functions that hold a copy of the module.

`copy.deepcopy` copies objects, and takes functions as they are. The copy of a module whose `forward` was replaced by a
closure over its own forward, or that has a hook which closes over another submodule, would call the original. So
`copy_and_bind` makes new functions of those that hold a part of the module: with new cells, which hold copies.
"""

from __future__ import annotations

import copy
import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

from fzero.base.errors import FzeroError
from fzero.base.reachable import is_of_library, list_contents, list_globals, walk_inside

_FUNCTIONS = (FunctionType, MethodType, functools.partial)
_HOLDERS = (nn.Module, Tensor, *_FUNCTIONS, list, tuple, dict)
_MOST = 1000  # objects below a global that are looked at
_WAY_OUT = "hold the module in a closure, an argument of functools.partial or an attribute, or give that to lower too"


def copy_and_bind(module: nn.Module, memo: dict[int, Any], stale: Iterable[Tensor]) -> nn.Module:
    """A deep copy of a module that holds no part of the module itself, and none of the tensors `stale`, which depend
    on its parameters. `memo` has the copies of tensors, by id.

    Raises:
        FzeroError: naming the attribute that has no copy; and the function that holds the module in a place that cannot
            be changed: a global, a class, a cache.
    """
    parts = {id(x) for x in (*module.modules(), *module.parameters(), *module.buffers(), *stale)}
    held = {id(value): value for _, value in walk_inside("", module, without=memo)}
    holding = _find_holders(held, parts)
    memo.update((id(each), each) for each in list(sys.modules.values()))  # Python has no copies of its modules
    bind = _Binder(memo, holding | parts)
    for each in holding:
        bind.add(held[each])
    try:
        made = copy.deepcopy(module, memo)
        bind.finish()
    except FzeroError:
        raise
    except Exception as error:
        raise _refuse_attribute(module, error) from error
    for name, problem in _find_parts(made, parts):
        raise FzeroError(name, f"{problem}: a function of tensors would use the parameters of the original", _WAY_OUT)
    return made


def _find_holders(held: dict[int, Any], parts: set[int]) -> set[int]:
    """The ids of the objects among `held` through which a part of the module can be reached."""
    holders: dict[int, set[int]] = {}
    for key, value in held.items():
        for _, child in list_contents("", value):
            holders.setdefault(id(child), set()).add(key)
    found, waiting = set[int](), list(parts)
    while waiting:
        new = holders.get(waiting.pop(), set()) - found
        found |= new
        waiting += new
    return found


class _Binder:
    """Puts new functions into `memo`, in the places of those that are added, and fills them with copies."""

    def __init__(self, memo: dict[int, Any], changed: set[int]) -> None:
        self._memo, self._changed = memo, changed
        self._cells: dict[int, tuple[CellType, CellType]] = {}  # by the id of the old cell
        self._functions: list[tuple[FunctionType, FunctionType]] = []
        self._values: list[tuple[_Later, Callable[[], Any]]] = []

    def add(self, value: Any) -> None:
        """Replace a function, a stored method of one, or a weak reference."""
        if isinstance(value, FunctionType):
            cells = tuple(map(self._new_cell, value.__closure__ or ()))
            made = FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, cells or None)
            made.__qualname__, made.__module__, made.__doc__ = value.__qualname__, value.__module__, value.__doc__
            self._functions.append((value, made))
            self._memo[id(value)] = made
        elif isinstance(value, MethodType) and id(value.__func__) in self._changed:
            self._add_later(value, _Call(), lambda: MethodType(self._copy(value.__func__), self._copy(value.__self__)))
        elif isinstance(value, weakref.ref):
            self._add_later(value, _Return(), lambda: self._copy(value()))

    def finish(self) -> None:
        """Fill the cells, and what else the new functions hold."""
        for old, new in self._cells.values():
            new.cell_contents = self._copy(old.cell_contents)
        for function, made in self._functions:
            made.__defaults__, made.__kwdefaults__ = map(self._copy, (function.__defaults__, function.__kwdefaults__))
            vars(made).update(self._copy(vars(function)))
        for later, make in self._values:
            later.value = make()

    def _add_later(self, value: Any, made: _Later, make: Callable[[], Any]) -> None:
        self._values.append((made, make))
        self._memo[id(value)] = made

    def _new_cell(self, cell: CellType) -> CellType:
        """The cell of a new function: the old one where it holds nothing of the module."""
        try:
            is_changed = id(cell.cell_contents) in self._changed
        except ValueError:  # a variable that is not assigned yet
            is_changed = False
        return self._cells.setdefault(id(cell), (cell, CellType()))[1] if is_changed else cell

    def _copy(self, value: Any) -> Any:
        return copy.deepcopy(value, self._memo)


class _Later:
    """What is put into a copy before its `value` is there. An object, so that a copy of the copy finds the value."""

    value: Any


class _Call(_Later):
    """A method of a copy."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.value(*args, **kwargs)


class _Return(_Later):
    """In the place of a weak reference."""

    def __call__(self) -> Any:
        return self.value


def _find_parts(made: nn.Module, parts: set[int]) -> Iterator[tuple[str, str]]:
    """`(name, problem)` of the places below a copy from which a part of the original can be reached."""
    by_class: dict[type, list[str]] = {}
    for path, child in made.named_modules():
        for key, value in vars(child).items():
            for found in _walk_to_modules(value):
                if id(found) in parts:
                    yield _join(path, key), f"holds the original {type(found).__name__} in a {type(value).__name__}"
                for variable in _find_in_globals(found, parts) if isinstance(found, FunctionType) else ():
                    yield _join(path, key), f"is a function that uses the original by the global {variable!r}"
        cls = type(child)
        if cls not in by_class:
            by_class[cls] = list(_find_in_class(cls, parts))
        for key in by_class[cls]:
            yield _join(path, key), f"is a function of the class {cls.__name__} that holds the original"


def _find_in_class(cls: type, parts: set[int]) -> Iterator[str]:
    """The functions of a class, or of one that it is derived from, whose closure holds a part of the module with a
    tensor in it. A part without tensors, as in `def __init__(self, activation=nn.ReLU())`, holds no parameter."""
    for key, value in ((key, x) for each in cls.__mro__ for key, x in vars(each).items()):
        is_closure = isinstance(value, FunctionType) and value.__closure__
        held = [x for _, x in walk_inside("", value, _MOST) if id(x) in parts] if is_closure else []
        if any(isinstance(x, Tensor) for x in held):
            yield key


def _walk_to_modules(value: Any) -> Iterator[Any]:
    """What can be reached from an attribute of a module, up to modules and tensors."""
    waiting, seen = [value], set[int]()
    while waiting:
        each = waiting.pop()
        if id(each) not in seen:
            seen.add(id(each))
            yield each
            if isinstance(each, ModuleType):
                waiting += _list_holders(each)
            elif not isinstance(each, (nn.Module, Tensor)):
                waiting += [child for _, child in list_contents("", each)]


def _list_holders(module: ModuleType) -> list[Any]:
    """The globals of a module of Python, and modules of its package, that may hold a user's tensor. A library has
    none."""
    package = module.__name__.partition(".")[0]
    if is_of_library(package):
        return []
    held = [x for key, x in vars(module).items() if not key.startswith("__")]
    of_package = [x for x in held if isinstance(x, ModuleType) and x.__name__.partition(".")[0] == package]
    return of_package + [x for x in held if isinstance(x, _HOLDERS)]


def _find_in_globals(function: FunctionType, parts: set[int]) -> Iterator[str]:
    """The globals of a function that are a part of the module, or hold one as functions and containers do."""
    for variable, value in list_globals(function):
        if isinstance(value, _HOLDERS) and any(id(x) in parts for _, x in walk_inside(variable, value, _MOST)):
            yield variable


def _refuse_attribute(module: nn.Module, error: Exception) -> FzeroError:
    """The error for an object that cannot be copied, with the attribute that holds it."""
    for path, child in module.named_modules():
        for key, value in vars(child).items():
            for each in () if key == "_modules" else _walk_to_modules(value):
                if isinstance(each, nn.Module):
                    continue
                try:
                    copy.copy(each)
                except Exception:
                    problem = f"holds a {type(each).__name__}, which cannot be copied: {error}"
                    return FzeroError(_join(path, key), problem, "take it out of the module, or keep it in a global")
    return FzeroError(type(module).__name__, f"cannot be copied: {error}", "give the module a __deepcopy__")


def _join(path: str, key: str) -> str:
    return f"{path}.{key}".lstrip(".")
