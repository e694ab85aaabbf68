"""Read objects: of objects that code hands on, the values that code may read of them, by the names in that code.

    def loss(config, out, y): return out.sub(y).abs().mean() * config.scale

    loss(config, ...) in a step  ->  {"config.scale": 2.0}: `scale` is a name in code that the step reaches

An attribute that no code names may change: a count of epochs, or a log. So may one that this code writes itself, and a
container that it fills.
"""

from __future__ import annotations

import functools
import os
import sys
import weakref
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import is_dataclass
from enum import Enum
from numbers import Number
from types import BuiltinFunctionType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from fzero.base.installed import is_installed
from fzero.tracing.code_paths import Names

VALUES = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, Enum, Number)
HELD = (Tensor, FunctionType, BuiltinFunctionType, MethodType, functools.partial)
CONTAINERS = (list, tuple, dict, set, frozenset, deque)
SETTINGS = (ContextVar, type(os.environ))
"""Values of which code reads what they have at the moment."""
_LIBRARIES = (sys.stdlib_module_names | {"torch", "fzero", "optree", "einops", "numpy"}) - {"argparse", "types"}
"""Packages whose functions read no values of the user but those in their closures, and whose objects hold none."""
_CALLERS = ("fzero.hf.", "fzero.lightning.", "fzero.deepspeed.")
"""Beginnings of the names of modules that call methods of classes of the user."""
_MOST_ENTRIES = 64  # of a container that is looked at
_MOST_BYTES = 4096  # of an array
_MOST_VALUES = 300  # of an object
_DEPTH = 12
_FIRST = frozenset({"__init__", "__new__", "__post_init__"})
"""Methods that write the attributes of a new object."""
_IMPLICIT = {f"__{name}__" for name in """
    add bool call contains enter eq exit float ge getattr getattribute getitem gt index int iter le len lt missing mul
    neg next pow radd rmul rpow rsub rtruediv sub torch_function truediv
""".split()} | {"forward"}  # fmt: skip
"""Methods that code calls without their names."""
_COMPUTED = frozenset({"__getattr__", "__getattribute__", "__getitem__", "__iter__"})
NO_NAMES = Names(frozenset(), frozenset(), frozenset())


class _Identity:
    """Equal for the same object only. Does not keep the object alive."""

    def __init__(self, value: Any) -> None:
        self._ref = weakref.ref(value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self._ref() is not None and self._ref() is other._ref()


def _identify(value: Any) -> Any:
    """A key that is equal for the same object, or where nothing can refer to that weakly, for the same class."""
    try:
        return _Identity(value)
    except TypeError:
        return type(value)


def describe_value(value: Any) -> Any:
    """A key that is equal for values that make equal programs.

    1, 1.0 and True differ, and so do 0.0 and -0.0. NaN equals itself. Two tensors differ, and so do two functions. A
    plain object is known by its class and its attributes, what these hold included.
    """
    if isinstance(value, MethodType):
        return _identify(value.__func__), _identify(value.__self__)
    if isinstance(value, HELD):
        return _identify(value)
    if isinstance(value, CONTAINERS):
        return describe_entries(value)
    if isinstance(value, (*VALUES, type)) or not is_watched(value):
        is_rounded = isinstance(value, Number) and not isinstance(value, int)
        return type(value), repr(value) if is_rounded else value
    return type(value), value, ReadObject("", value).values


def describe_entries(value: Any, depth: int = 3) -> Any:
    """A key that is equal for containers of equal values: of other objects, their classes."""
    if not isinstance(value, CONTAINERS):
        return describe_value(value) if isinstance(value, (*VALUES, *HELD)) else type(value)
    if len(value) > _MOST_ENTRIES or not depth:
        return type(value)
    return type(value), [describe_entries(x, depth - 1) for x in (value.items() if isinstance(value, dict) else value)]


def _describe_buffer(value: Any) -> Any:
    """The elements of a short array."""
    try:
        held = memoryview(value)
        return held.format, held.shape, held.tobytes() if held.nbytes <= _MOST_BYTES else None
    except (TypeError, ValueError, BufferError):  # of objects, or of no array
        return type(value)


class ReadObject:
    """The values that code with these `names`, or any, may read of an object, and of what that holds: `values` by their
    paths, and `functions` that may be called on the way."""

    def __init__(self, name: str, value: Any, names: Names | None = None) -> None:
        self.values, self.functions = dict[str, Any](), list[Callable[..., Any]]()
        self._reads_all, self._names = names is None, names or NO_NAMES
        self._paths = dict[int, str]()  # of the objects that were looked at
        self._add(name, value, 0)

    def _add(self, path: str, value: Any, depth: int) -> None:
        if len(self.values) >= _MOST_VALUES:
            return
        if isinstance(value, (*VALUES, *HELD)):
            self.values[path] = describe_value(value)
            if isinstance(value, (FunctionType, MethodType, functools.partial)):
                self.functions.append(value)
            if isinstance(value, functools.partial) and depth < _DEPTH:
                self._add_entries(f"{path}.args", value.args, depth)
                self._add_entries(f"{path}.keywords", value.keywords, depth)
        elif isinstance(value, type(os.environ)):
            self.values[path] = dict(value)
        elif isinstance(value, ContextVar):
            self._add(f"{path}.get()", value.get(None), depth)
        elif isinstance(value, weakref.ref):
            self._add(f"{path}()", value(), depth)
        elif isinstance(value, (bytearray, array)) or type(value).__module__ == "numpy":
            self.values[path] = _describe_buffer(value)
        elif id(value) in self._paths:
            self.values[path] = self._paths[id(value)]
        elif depth < _DEPTH:
            self._paths[id(value)] = path
            if is_watched(value):
                self._add_attributes(path, value, depth)
            if isinstance(value, CONTAINERS):
                self._add_entries(path, value, depth)

    def _add_entries(self, path: str, value: Any, depth: int) -> None:
        self.values[path] = type(value), len(value)
        if len(value) > _MOST_ENTRIES:
            return
        for key, x in value.items() if isinstance(value, dict) else enumerate(value):
            self._add(f"{path}[{key!r}]", x, depth + 1)

    def _add_attributes(self, path: str, value: Any, depth: int) -> None:
        is_class = isinstance(value, type)
        self.values[path] = _identify(value) if is_class else type(value)
        held = {} if is_class else dict(self._list_attributes(value))
        for name, x in held.items():
            is_filled = name in self._names.filled and isinstance(x, (list, dict, set, deque))
            if not (name in self._names.written or is_filled):
                self._add(f"{path}.{name}", x, depth + 1)
        for cls in (value if is_class else type(value)).__mro__:
            if not _is_of_library(cls.__module__):
                read = {x for x in vars(cls) if x[:2] != "__"} if self._reads_all else self._names.read | _IMPLICIT
                read = read | _FIRST if is_class else read
                for name in vars(cls).keys() & read - held.keys():
                    self._add_of_class(f"{path}.{name}", None if is_class else value, cls, name, depth)

    def _list_attributes(self, value: Any) -> Iterator[tuple[str, Any]]:
        """The attributes of an object itself that code may read."""
        held = list_own_attributes(value)
        is_any = self._reads_all or is_computed(type(value))  # type: ignore[arg-type]
        read = self._names.read.union(held) if is_any else self._names.read
        if isinstance(value, nn.Module):
            tables = (held[name] for name in ("_parameters", "_buffers", "_modules"))
            yield from (each for table in tables for each in table.items() if each[1] is not None)
            if _is_of_library(type(value).__module__):  # whose code reads all
                yield from ((name, x) for name, x in held.items() if isinstance(x, VALUES))
                return
            yield "training", held["training"]
        for name in read.intersection(held):
            yield name, held[name]
        for cls in type(value).__mro__:
            for name in vars(cls) if self._reads_all else read.intersection(vars(cls)):
                if isinstance(slot := vars(cls)[name], MemberDescriptorType):
                    with suppress(AttributeError):  # of a slot without a value
                        yield name, slot.__get__(value, cls)

    def _add_of_class(self, path: str, owner: Any, cls: type, name: str, depth: int) -> None:
        """What code may read of a class, for an object or without one."""
        x: Any = vars(cls)[name]
        if isinstance(x, classmethod):
            owner = cls if owner is None else type(owner)
        x = x.fget if isinstance(x, property) else x.func if isinstance(x, functools.cached_property) else x
        x = x.__func__ if isinstance(x, (staticmethod, classmethod)) else x
        if isinstance(x, FunctionType) and not (is_dataclass(cls) and x.__code__.co_filename == "<string>"):
            self.values[path] = _identify(x)  # of a dataclass not the methods that Python wrote, which read all fields
            is_alone = owner is None or isinstance(vars(cls)[name], staticmethod)
            self.functions.append(x if is_alone else MethodType(x, owner))
        elif not hasattr(type(x), "__get__"):
            self._add(path, x, depth + 1)


@functools.lru_cache(4096)
def is_computed(cls: type) -> bool:
    """Whether code of a class computes by which names attributes are read."""
    if issubclass(cls, ModuleType):
        return False  # a package that imports its modules when they are read
    held = [vars(x) for x in cls.__mro__ if x not in (object, nn.Module)]
    names = {name for each in held for name in each}
    return bool(names & _COMPUTED) or any(_is_of_user_get(x) for each in held for x in each.values())


def _is_of_user_get(x: Any) -> bool:
    """Whether an attribute of a class is a descriptor whose code is the user's."""
    get = getattr(type(x), "__get__", None)
    return isinstance(get, FunctionType) and is_of_user(get)


def list_own_attributes(value: Any) -> Mapping[str, Any]:
    """The attributes that an object itself has in its dict, found without code of its class."""
    try:
        found: Mapping[str, Any] = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return found


def is_watched(value: Any) -> bool:
    """Whether an object is one whose attributes are the user's: not one of a library, but for a module of layers."""
    if isinstance(value, ModuleType):
        return not _is_of_library(value.__name__) and not is_installed(getattr(value, "__file__", None) or "")
    cls = value if isinstance(value, type) else type(value)
    return isinstance(value, nn.Module) or not _is_of_library(cls.__module__)


def is_plain_object(value: Any) -> bool:
    """Whether a value is an object that is known by its attributes."""
    return is_watched(value) and not isinstance(value, (*CONTAINERS, Mapping, type))


def is_of_user(fn: FunctionType) -> bool:
    """Whether code of a function may read values of the user."""
    return not _is_of_library(fn.__module__) or is_caller(fn)


def is_caller(fn: FunctionType) -> bool:
    """Whether a function of fzero calls methods of classes of the user, such as `compute_loss` of a Trainer."""
    return (fn.__module__ or "").startswith(_CALLERS)


def _is_of_library(module: str | None) -> bool:
    return (module or "").partition(".")[0] in _LIBRARIES


def writes_attributes(fn: FunctionType) -> bool:
    """Whether what a function writes are attributes of objects that were there before."""
    return fn.__name__ not in _FIRST
