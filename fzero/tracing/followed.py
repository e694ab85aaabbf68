"""Followed functions: from a callable to what its code spells and what it holds, in which functions are followed."""

from __future__ import annotations

import functools
import os
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from importlib.util import resolve_name
from types import BuiltinFunctionType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any, NamedTuple

from torch import Tensor

from fzero.base.changes import list_defaults
from fzero.tracing.code_paths import find_paths
from fzero.tracing.read_objects import (
    CONTAINERS,
    SETTINGS,
    VALUES,
    is_computed,
    is_of_user,
    is_watched,
    list_own_attributes,
)
from fzero.values.live import LiveFunction
from fzero.values.lowering import Apply, StatefulApply

Read = Callable[[], Any]
"""A function that reads the present value of something."""
_FUNCTIONS = (FunctionType, MethodType, functools.partial)
_READS = ("get", "items", "keys", "values", "index", "count", "copy")
"""Methods by which code reads a container."""


def find_function(x: Any) -> tuple[FunctionType | None, list[str], dict[str, Read]]:
    """The Python function that a callable calls, its parameters that a caller gives by position, and functions that
    read the others: `self`, arguments of partials, default values."""
    if isinstance(x, FunctionType):
        names = list(x.__code__.co_varnames[: x.__code__.co_argcount])
        return x, names, {name: functools.partial(_read_default, x, name) for name in list_defaults(x)}
    if not isinstance(x, (MethodType, functools.partial)):
        return None, [], {}
    function, names, given = find_function(x.func if isinstance(x, functools.partial) else x.__func__)
    values = x.args if isinstance(x, functools.partial) else (x.__self__,)
    given |= {name: hold(value) for name, value in zip(names, values)}
    if isinstance(x, functools.partial):
        given |= {name: functools.partial(dict.get, x.keywords, name) for name in x.keywords}
    return function, names[len(values) :], given


def hold(value: Any) -> Read:
    """A function that returns a value, and keeps it alive only where nothing can refer to it weakly."""
    try:
        return functools.partial(_dereference, weakref.ref(value))
    except TypeError:
        return functools.partial(pass_on, value)


def _dereference(ref: weakref.ref[Any]) -> Any:
    return ref()


def pass_on(value: Any) -> Any:
    """The value itself."""
    return value


def _read_default(function: FunctionType, name: str) -> Any:
    return list_defaults(function).get(name)


def list_parts(x: Any, is_own: Callable[[Any], bool]) -> Iterable[Any]:
    """The functions that a callable, or a tuple or list of callables, holds for good: of the methods of lowered modules
    those that are the user's own."""
    if isinstance(x, functools.partial):
        return x.func, *x.args, *x.keywords.values()
    if isinstance(x, FunctionType):
        return *(_read_cell(cell) for cell in x.__closure__ or ()), *list_defaults(x).values()
    if isinstance(x, MethodType):
        return list_parts(x.__func__, is_own)
    if isinstance(x, functools._lru_cache_wrapper):
        return (x.__wrapped__,)
    if isinstance(x, (Apply, StatefulApply)):  # whose modules are copies that nobody changes
        classes = dict.fromkeys(cls for each in x.list_classes() for cls in each.__mro__ if is_watched(cls))
        return [fn for cls in classes for fn in vars(cls).values() if is_own(fn)]
    if isinstance(x, LiveFunction):
        return (x.find(),)
    if isinstance(x, (tuple, list)):
        return [part for part in x if isinstance(part, (*_FUNCTIONS, tuple, list))]
    call = getattr(type(x), "__call__", None)  # noqa: B004  a method of the class, to follow
    return (MethodType(call, x),) if isinstance(call, FunctionType) and is_of_user(call) else ()


def refresh_functions(fn: Any) -> None:
    """Make the live functions anew that a callable holds, where that is due."""
    waiting, seen = [fn], dict[int, Any]()  # values keep objects alive, so that each id is of one
    while waiting:
        each = waiting.pop()
        if id(each) not in seen:
            seen[id(each)] = each
            if isinstance(each, LiveFunction):
                each.refresh()
            waiting += list_parts(each, lambda _: False)


def _read_cell(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing is assigned yet
        return None


class Variable(NamedTuple):
    """A path in the code of a function: its name, the names on it, the function that reads its value, what that reads
    from, and whether the code writes it."""

    name: str
    names: tuple[str, ...]
    read: Read
    origin: int
    is_written: bool


def list_variables(fn: FunctionType, given: dict[str, Read]) -> Iterator[Variable]:
    """The paths in the code of a function, whose parameters are `given` or not. Of what the code writes only globals
    and attributes of classes, which it makes once."""
    code, known = fn.__code__, fn.__globals__
    cells = {name: functools.partial(_read_cell, cell) for name, cell in zip(code.co_freevars, fn.__closure__ or ())}
    paths = find_paths(code)
    root: Any
    for path in (*paths.read, *paths.written):
        if path.kind == "GLOBAL":
            root = functools.partial(dict.get, known, path.root) if path.root in known else None
        elif path.kind == "MODULE":
            root = functools.partial(_find_module, path.root, known.get("__package__"))
        else:
            root = given.get(path.root) or (cells.get(path.root) if path.kind == "CELL" else None)
        is_written = path in paths.written
        if root is not None and not (is_written and path.steps and not isinstance(root(), type)):
            origin, *_ = root.args
            read = functools.partial(_follow, root, path.steps)
            yield Variable(str(path), path.names, read, id(origin), is_written)


def _find_module(name: str, package: str | None) -> Any:
    """The module that code in a package imports by a name."""
    return sys.modules.get(resolve_name(name, package) if name[:1] == "." and package else name)


def _follow(root: Callable[[], Any], steps: tuple[tuple[bool, Any], ...]) -> Any:
    """The value at a path, or the first one on it that is no plain object, dict, list or tuple: a container of which a
    method is called, the function of a property, an object whose class computes what it has. None where it ends.

    Attributes are found without a call of properties and `__getattr__`, which may do anything.
    """
    value: Any = root()
    for is_item, name in steps:
        is_method = not is_item and name in _READS and isinstance(value, (*CONTAINERS, *SETTINGS))
        if is_method or isinstance(value, (*VALUES, Tensor, *_FUNCTIONS)):
            return value
        held = list_own_attributes(value)
        if is_item:
            if not _has_entries(value, name):
                return value if hasattr(type(value), "__getitem__") else None
            try:
                value = value[name]
            except LookupError:
                return None
        elif name in held and not isinstance(value, type):
            if isinstance(value, ModuleType) and isinstance(held[name], BuiltinFunctionType):
                return value  # which keeps it: torch.tanh
            value = held[name]
        else:
            value = _find_in_class(value, name)
    return value


def _has_entries(value: Any, key: Any) -> bool:
    """Whether an object has entries by such keys, and gives them without code of the user."""
    cls = type(value)
    if isinstance(key, int) and (isinstance(value, (list, tuple, deque)) or cls.__module__ == "numpy"):
        return cls.__getitem__ in (list.__getitem__, tuple.__getitem__, deque.__getitem__) or cls.__module__ == "numpy"
    is_dict = isinstance(value, dict) and cls.__getitem__ is dict.__getitem__ and not hasattr(cls, "__missing__")
    return is_dict or isinstance(value, type(os.environ))


def _find_in_class(owner: Any, name: str) -> Any:
    """An attribute that a class has for its objects, or for itself; the object where that is computed."""
    cls: Any = owner if isinstance(owner, type) else type(owner)
    value: Any = next((vars(each)[name] for each in cls.__mro__ if name in vars(each)), None)
    instance = None if owner is cls else owner
    if isinstance(value, property) and isinstance(value.fget, FunctionType) and instance is not None:
        return MethodType(value.fget, owner)
    is_bound = isinstance(value, (FunctionType, MemberDescriptorType)) or name in getattr(type(owner), "_fields", ())
    if isinstance(value, (classmethod, staticmethod)) or (is_bound and instance is not None):
        with suppress(AttributeError):  # of a slot without a value
            return value.__get__(instance, cls)
        return None
    is_plain = value is not None and not hasattr(type(value), "__get__")
    return owner if not is_plain and is_watched(owner) and is_computed(type(owner)) else value  # type: ignore[arg-type]
