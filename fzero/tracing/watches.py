"""Watches: values that a step reads from its surroundings, and that its trace writes into the program as numbers.

A step should take what it needs as arguments. Where it does not, the program is right as long as these values stay.
Watched is

* what the code of a step spells as a path: `rate` of a closure or a global, `self.rate` of a bound method,
  `config.rate`, `config["rate"]` and `getattr(config, "rate")`, also by a local variable (`c = config`) or a property;
* what a parameter has by default or by `functools.partial`;
* the entries of a short list, tuple, dict or set at a path;
* likewise in the Python functions that the step reaches so.

Not watched is what the code reaches in other ways: by a parameter of a function that the step calls, in a loop over a
list of objects.
"""

from __future__ import annotations

import dis
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from numbers import Number
from types import BuiltinFunctionType, CodeType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.base.changes import list_defaults
from fzero.base.torch_private import version_of
from fzero.program.program import Program

_VALUES = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, Enum, Number)
_FUNCTIONS = (FunctionType, MethodType, functools.partial)
_HELD = (Tensor, FunctionType, BuiltinFunctionType, functools.partial)
_CONTAINERS = (list, tuple, dict, set, frozenset)
_READS = ("get", "items", "keys", "values", "index", "count", "copy")
"""Methods by which code reads a container."""
_MOST_ENTRIES = 64  # of a container that is looked at
_LIBRARIES = frozenset({"torch", "fzero", "optree", "einops", "numpy"})
"""Packages whose functions read no values of the user but those in their closures."""
_MOST = 1000  # functions that are looked at


class Watch(NamedTuple):
    """A value as it was when a step was traced. `read` returns the present one; `name` is the user's name for it."""

    name: str
    read: Callable[[], Any]
    key: Any

    @property
    def is_unchanged(self) -> bool:
        return _describe_entries(self.read()) == self.key


class _Identity:
    """Equal for the same object only. Does not keep the object alive."""

    def __init__(self, value: Any) -> None:
        self._ref = weakref.ref(value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self._ref() is not None and self._ref() is other._ref()


def describe_value(value: Any) -> Any:
    """A key that is equal for values that make equal programs.

    1, 1.0 and True differ, and so do 0.0 and -0.0. NaN equals itself. Two tensors differ, and so do two functions. A
    plain object is known by its attributes that are such values, or tuples of them.
    """
    if isinstance(value, _HELD):
        return _Identity(value)
    if isinstance(value, (*_VALUES, type)) or not hasattr(value, "__dict__"):
        is_rounded = isinstance(value, Number) and not isinstance(value, int)
        return type(value), repr(value) if is_rounded else value
    attributes = vars(value).items()
    held = {k: describe_value(v) for k, v in attributes if isinstance(v, _VALUES)}
    return type(value), value, held | {k: _describe_entries(v) for k, v in attributes if type(v) is tuple}


def _describe_entries(value: Any, depth: int = 3) -> Any:
    """A key that is equal for containers of equal values: of other objects, their classes."""
    if not isinstance(value, _CONTAINERS):
        return describe_value(value) if isinstance(value, (*_VALUES, *_HELD)) else type(value)
    if len(value) > _MOST_ENTRIES or not depth:
        return type(value)
    return type(value), [_describe_entries(x, depth - 1) for x in (value.items() if isinstance(value, dict) else value)]


def watch_elements(program: Program, watches: Iterable[Watch]) -> list[Watch]:
    """Watches of the elements of captured tensors that stand in the program as numbers.

    These are the tensors that Python has read, and those that are watched but are no constants of the program. An
    inference tensor does not count its changes: its elements are not watched.
    """
    held = {id(x) for x in program.constants.values()}
    given = ((x.name, x.read()) for x in watches)
    absent = [(name, x) for name, x in given if isinstance(x, Tensor) and id(x) not in held]
    return [
        Watch(f"elements of {name}", functools.partial(version_of, x), describe_value(version_of(x)))
        for name, x in (*absent, *(("a captured tensor", x) for x in program.read))
    ]


def find_watches(fn: Callable[..., Any]) -> list[Watch]:
    """Watches of the values that `fn` reads from its surroundings."""
    found: dict[tuple[Any, str], Watch] = {}
    queue, seen = [fn], set[Any]()
    while queue and len(seen) < _MOST:
        each = queue.pop()
        function, _, given = _find_function(each)
        key = id(function or each), id(getattr(each, "__self__", None)), isinstance(each, functools.partial)
        if key in seen:
            continue
        seen.add(key)
        queue += _list_parts(each)
        if function is not None and _is_of_user(function):
            kinds = (*_VALUES, *_HELD, *(() if _fills(function.__code__) else _CONTAINERS))
            for name, read in _list_variables(function, given):
                value = read()
                if isinstance(value, kinds):
                    found[key, name] = Watch(name, read, _describe_entries(value))
                queue.append(value)
    return list(found.values())


_Read = Callable[[], Any]


def _find_function(x: Any) -> tuple[FunctionType | None, list[str], dict[str, _Read]]:
    """The Python function that a callable calls, its parameters that a caller gives by position, and functions that
    read the others: `self`, arguments of partials, default values."""
    if isinstance(x, FunctionType):
        names = list(x.__code__.co_varnames[: x.__code__.co_argcount])
        return x, names, {name: functools.partial(_read_default, x, name) for name in list_defaults(x)}
    if not isinstance(x, (MethodType, functools.partial)):
        return None, [], {}
    function, names, given = _find_function(x.func if isinstance(x, functools.partial) else x.__func__)
    values = x.args if isinstance(x, functools.partial) else (x.__self__,)
    given |= {name: functools.partial(_pass, value) for name, value in zip(names, values)}
    if isinstance(x, functools.partial):
        given |= {name: functools.partial(x.keywords.get, name) for name in x.keywords}
    return function, names[len(values) :], given


def _pass(value: Any) -> Any:
    return value


def _read_default(function: FunctionType, name: str) -> Any:
    return list_defaults(function).get(name)


def _list_parts(x: Any) -> Iterable[Any]:
    """The functions that a callable, or a tuple or list of callables, holds for good."""
    if isinstance(x, functools.partial):
        return x.func, *x.args, *x.keywords.values()
    if isinstance(x, FunctionType):
        return *(_read_cell(cell) for cell in x.__closure__ or ()), *list_defaults(x).values()
    if isinstance(x, MethodType):
        return _list_parts(x.__func__)
    if isinstance(x, (tuple, list)):
        return [part for part in x if isinstance(part, (*_FUNCTIONS, tuple, list))]
    call = getattr(type(x), "__call__", None)  # noqa: B004  a method of the class, to follow
    return (MethodType(call, x),) if isinstance(call, FunctionType) and _is_of_user(call) else ()


def _is_of_user(fn: FunctionType) -> bool:
    return (fn.__module__ or "").partition(".")[0] not in _LIBRARIES


def _read_cell(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing is assigned yet
        return None


class _Path(NamedTuple):
    """`root.a["b"]` in the code of a function: the root is a "LOCAL", "CELL" or "GLOBAL" variable."""

    kind: str
    root: str
    steps: tuple[tuple[bool, Any], ...]  # (whether it is an item, its name)

    def __str__(self) -> str:
        return self.root + "".join(f"[{name!r}]" if is_item else f".{name}" for is_item, name in self.steps)


def _list_variables(fn: FunctionType, given: dict[str, _Read]) -> Iterator[tuple[str, _Read]]:
    """`(path, function that reads it)` of each path in the code of a function, whose parameters are `given` or not."""
    closed = zip(fn.__code__.co_freevars, fn.__closure__ or ())
    cells = {name: functools.partial(_read_cell, cell) for name, cell in closed}
    root: _Read | None
    for path in _list_paths(fn.__code__):
        if path.kind == "GLOBAL":
            root = functools.partial(fn.__globals__.get, path.root) if path.root in fn.__globals__ else None
        else:
            root = given.get(path.root) or (cells.get(path.root) if path.kind == "CELL" else None)
        if root is not None:
            yield str(path), functools.partial(_follow, root, path.steps)


def _follow(root: Callable[[], Any], steps: tuple[tuple[bool, Any], ...]) -> Any:
    """The value at a path, or the first one on it that is no plain object, dict, list or tuple: a container of which a
    method is called, the function of a property. None where it ends.

    Attributes are found without a call of properties and `__getattr__`, which may do anything.
    """
    value: Any = root()
    for is_item, name in steps:
        is_method = not is_item and name in _READS and isinstance(value, _CONTAINERS)
        if is_method or isinstance(value, (*_VALUES, Tensor, *_FUNCTIONS)):
            return value
        if is_item:
            is_row = isinstance(value, (list, tuple)) or type(value).__module__ == "numpy"
            found = isinstance(value, dict) or (is_row and isinstance(name, int))
            try:
                value = value[name] if found else None
            except LookupError:
                return None
        elif name in getattr(value, "__dict__", ()):
            held = vars(value)[name]
            if isinstance(value, ModuleType) and isinstance(held, BuiltinFunctionType):
                return value  # which keeps it: torch.tanh
            value = held
        else:
            owner = value
            value = next((vars(cls)[name] for cls in type(value).__mro__ if name in vars(cls)), None)
            if isinstance(value, (FunctionType, MemberDescriptorType)) or name in getattr(owner, "_fields", ()):
                value = value.__get__(owner)  # a method, a slot, a field of a NamedTuple
            elif isinstance(value, property) and isinstance(value.fget, FunctionType):
                return MethodType(value.fget, owner)
    return value


_ROOTS = {"LOAD_FAST": "LOCAL", "LOAD_DEREF": "CELL", "LOAD_CLASSDEREF": "CELL", "LOAD_GLOBAL": "GLOBAL"}


_WRITES = ("STORE_DEREF", "STORE_GLOBAL", "STORE_ATTR")
_MOST_ALIASES = 3  # of `a = config.a; b = a.b; c = b.c`


@functools.lru_cache(maxsize=4096)
def _fills(code: CodeType) -> bool:
    """Whether a code writes an entry of some container, which may be a cache."""
    return any(each.opname in ("STORE_SUBSCR", "DELETE_SUBSCR") for each in dis.get_instructions(code))


@functools.lru_cache(maxsize=4096)
def _list_paths(code: CodeType) -> frozenset[_Path]:
    """The paths in the code of a function, and in that of the functions inside it. Without the variables and attributes
    that the code itself writes: it would be traced at each call for a count of its calls."""
    found, aliases = _read_code(code)
    for _ in range(_MOST_ALIASES):
        found |= {
            path._replace(kind=other.kind, root=other.root, steps=other.steps + path.steps)
            for path in found
            for other in aliases.get(path.root, ())
            if path.kind != "GLOBAL" and path.steps
        }
    return frozenset(found)


def _read_code(code: CodeType, is_inner: bool = False) -> tuple[set[_Path], dict[str, set[_Path]]]:
    """The paths in a code and in the functions inside it, whose parameters are their own; and local variables, each
    with the paths that are stored in it."""
    found: set[_Path] = set()
    aliases: dict[str, set[_Path]] = {}
    instructions = list(dis.get_instructions(code))
    written = {(each.opname == "STORE_ATTR", each.argval) for each in instructions if each.opname in _WRITES}
    path: _Path | None = None
    item: Any = None
    for each in instructions:
        is_pair = isinstance(each.argval, tuple) and "FAST" in each.opname  # two variables in one instruction
        name = each.argval[-1] if is_pair else each.argval
        kind = next((_ROOTS[root] for root in _ROOTS if each.opname.startswith(root)), None)
        if path is not None and each.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            path = path._replace(steps=(*path.steps, (False, name)))
        elif path is not None and each.opname in ("LOAD_CONST", "LOAD_SMALL_INT"):
            item = name if item is None else item
        elif path is not None and (each.opname == "BINARY_SUBSCR" or each.argrepr == "[]") and item is not None:
            path, item = path._replace(steps=(*path.steps, (True, item))), None
        else:
            if path is not None:
                is_stored = each.opname.startswith(("STORE_FAST", "STORE_DEREF")) and item is None
                is_asked = each.opname in ("PRECALL", "CALL", "CALL_FUNCTION") and isinstance(item, str)  # getattr
                if is_stored:
                    aliases.setdefault(each.argval[0] if is_pair else name, set()).add(path)
                found |= {path, *([path._replace(steps=(*path.steps, (False, item)))] if is_asked else [])}
            path, item = _Path(kind, name, ()) if kind else None, None
    found = {
        path for path in found if (bool(path.steps), path.steps[-1][1] if path.steps else path.root) not in written
    }
    if is_inner:
        parameters = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        found = {path for path in found if path.kind != "LOCAL" or path.root not in parameters}
    for inner, stored in (_read_code(x, True) for x in code.co_consts if isinstance(x, CodeType)):
        found |= inner
        for name, paths in stored.items():
            aliases.setdefault(name, set()).update(paths)
    return found, aliases
