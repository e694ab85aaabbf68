"""Watches: values that a step reads from its surroundings, and that its trace writes into the program as numbers.

A step should take what it needs as arguments. Where it does not, the program is right as long as these values stay.
Watched is what the code of a step spells as a path: `rate` of a closure or a global, `self.rate` of a bound method,
`config.rate` and `config["rate"]`; and likewise in the Python functions that the step reaches by such paths, as closure
variables, as default values or by `functools.partial`. Not watched is what the code reaches in other ways: by a local
variable, by `getattr`, in a loop over a list.
"""

from __future__ import annotations

import dis
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FunctionType, MemberDescriptorType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.base.torch_private import version_of
from fzero.program.program import Program

_VALUES = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_FUNCTIONS = (FunctionType, MethodType, functools.partial)
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
        return describe_value(self.read()) == self.key


class _Identity:
    """Equal for the same object only. Does not keep the object alive."""

    def __init__(self, value: Any) -> None:
        self._ref = weakref.ref(value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self._ref() is not None and self._ref() is other._ref()


def describe_value(value: Any) -> Any:
    """A key that is equal for values that make equal programs.

    1, 1.0 and True differ, and so do 0.0 and -0.0. NaN equals itself. Two tensors differ, and so do two functions. A
    plain object is known by its attributes that are such values.
    """
    if isinstance(value, (Tensor, FunctionType, functools.partial)):
        return _Identity(value)
    if isinstance(value, (*_VALUES, type)) or not hasattr(value, "__dict__"):
        return type(value), repr(value) if isinstance(value, (float, complex)) else value
    return type(value), value, {k: describe_value(v) for k, v in vars(value).items() if isinstance(v, _VALUES)}


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
    found: dict[tuple[int, str], Watch] = {}
    queue, seen = [fn], set[int]()
    while queue and len(seen) < _MOST:
        each = queue.pop()
        function = each.__func__ if isinstance(each, MethodType) else each
        if id(function) in seen:
            continue
        seen.add(id(function))
        queue += _list_parts(each)
        if isinstance(function, FunctionType) and _is_of_user(function):
            for name, read in _list_variables(function, each):
                value = read()
                if isinstance(value, (*_VALUES, Tensor, FunctionType, functools.partial)):
                    found[id(function), name] = Watch(name, read, describe_value(value))
                queue.append(value)
    return list(found.values())


def _list_parts(x: Any) -> Iterable[Any]:
    """The functions that a callable, or a tuple or list of callables, holds for good."""
    if isinstance(x, functools.partial):
        return x.func, *x.args, *x.keywords.values()
    if isinstance(x, FunctionType):
        cells = [_read_cell(cell) for cell in x.__closure__ or ()]
        return *cells, *(x.__defaults__ or ()), *(x.__kwdefaults__ or {}).values()
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


def _list_variables(fn: FunctionType, bound: Any) -> Iterator[tuple[str, Callable[[], Any]]]:
    """`(path, function that reads it)` of each path in the code of a function, `bound` to an object or not."""
    cells = dict(zip(fn.__code__.co_freevars, fn.__closure__ or ()))
    owner = fn.__code__.co_varnames[0] if isinstance(bound, MethodType) and fn.__code__.co_argcount else None
    for path in _list_paths(fn.__code__):
        read: Callable[[], Any]
        if path.root == owner and path.kind != "GLOBAL":
            read = functools.partial(_follow, lambda: bound.__self__, path.steps)
        elif path.kind == "CELL" and path.root in cells:
            read = functools.partial(_follow, functools.partial(_read_cell, cells[path.root]), path.steps)
        elif path.kind == "GLOBAL" and path.root in fn.__globals__:
            read = functools.partial(_follow, functools.partial(fn.__globals__.get, path.root), path.steps)
        else:
            continue
        yield str(path), read


def _follow(root: Callable[[], Any], steps: tuple[tuple[bool, Any], ...]) -> Any:
    """The value at a path, or the first one on it that is no plain object, dict, list or tuple. None where it ends.

    Attributes are found without properties and `__getattr__`, which may do anything.
    """
    value: Any = root()
    for is_item, name in steps:
        if isinstance(value, (*_VALUES, Tensor, *_FUNCTIONS)):
            return value
        if is_item:
            found = isinstance(value, dict) or (isinstance(value, (list, tuple)) and isinstance(name, int))
            try:
                value = value[name] if found else None
            except LookupError:
                return None
        elif name in getattr(value, "__dict__", ()):
            value = vars(value)[name]
        else:
            owner = value
            value = next((vars(cls)[name] for cls in type(value).__mro__ if name in vars(cls)), None)
            if isinstance(value, (FunctionType, MemberDescriptorType)) or name in getattr(owner, "_fields", ()):
                value = value.__get__(owner)  # a method, a slot, a field of a NamedTuple
    return value


_ROOTS = {"LOAD_FAST": "LOCAL", "LOAD_DEREF": "CELL", "LOAD_CLASSDEREF": "CELL", "LOAD_GLOBAL": "GLOBAL"}


_WRITES = ("STORE_DEREF", "STORE_GLOBAL", "STORE_ATTR")


@functools.lru_cache(maxsize=4096)
def _list_paths(code: CodeType, is_inner: bool = False) -> frozenset[_Path]:
    """The paths in the code of a function, and in that of the functions inside it, whose locals are their own. Without
    the variables and attributes that the code itself writes: it would be traced at each call for a count of its calls.
    """
    found: set[_Path] = set()
    written = {each.argval for each in dis.get_instructions(code) if each.opname in _WRITES}
    path: _Path | None = None
    item: Any = None
    for each in dis.get_instructions(code):
        is_pair = isinstance(each.argval, tuple) and "FAST" in each.opname  # two variables, loaded by one instruction
        name = each.argval[-1] if is_pair else each.argval
        kind = next((_ROOTS[root] for root in _ROOTS if each.opname.startswith(root)), None)
        if path is not None and each.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            path = path._replace(steps=(*path.steps, (False, name)))
        elif path is not None and each.opname in ("LOAD_CONST", "LOAD_SMALL_INT"):
            item = name
        elif path is not None and (each.opname == "BINARY_SUBSCR" or each.argrepr == "[]") and item is not None:
            path, item = path._replace(steps=(*path.steps, (True, item))), None
        else:
            found |= {path} - {None}  # type: ignore[arg-type]
            path, item = _Path(kind, name, ()) if kind and not (is_inner and kind == "LOCAL") else None, None
    own = {path for path in found if (path.steps[-1][1] if path.steps else path.root) not in written}
    inner = (_list_paths(x, True) for x in code.co_consts if isinstance(x, CodeType))
    return frozenset(own).union(*inner)
