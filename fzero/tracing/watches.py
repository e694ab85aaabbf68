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

import functools
import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from importlib.util import resolve_name
from types import BuiltinFunctionType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any, NamedTuple

from torch import Tensor

from fzero.base.changes import list_defaults
from fzero.base.installed import find_package, is_installed
from fzero.base.torch_private import version_of
from fzero.program.program import Program
from fzero.tracing.code_paths import Names, find_names, find_paths, has_fills
from fzero.tracing.read_objects import (
    CONTAINERS,
    HELD,
    NO_NAMES,
    SETTINGS,
    VALUES,
    ReadObject,
    describe_entries,
    describe_value,
    is_caller,
    is_computed,
    is_of_user,
    is_watched,
    writes_attributes,
)
from fzero.values.lowering import Apply, StatefulApply
from fzero.values.sharded import Sharded

_ABSENT = object()
_FUNCTIONS = (FunctionType, MethodType, functools.partial)
_READS = ("get", "items", "keys", "values", "index", "count", "copy")
"""Methods by which code reads a container."""
_MOST = 1000  # functions that are looked at


class Watch(NamedTuple):
    """A value as it was when a step was traced. `read` returns the present one, and `describe` makes a key of it;
    `name` is the user's name for it."""

    name: str
    read: Callable[[], Any]
    key: Any
    describe: Callable[[Any], Any] = describe_entries

    @property
    def is_unchanged(self) -> bool:
        return self.describe(self.read()) == self.key

    @property
    def changed(self) -> str:
        """The names of what has changed in it."""
        now = self.describe(self.read())
        if not isinstance(self.key, dict):
            return self.name
        return ", ".join(name for name in {**self.key, **now} if self.key.get(name, _ABSENT) != now.get(name, _ABSENT))


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


def find_watches(fn: Callable[..., Any], args: Iterable[Any] = ()) -> list[Watch]:
    """Watches of the values that `fn` reads from its surroundings, when it is called with these leaves, some of which
    may be functions and objects."""
    search = _Search(fn)
    search.follow(
        [fn, *(search.take(f"argument {i}", x) for i, x in enumerate(args) if not isinstance(x, (Tensor, Sharded)))]
    )
    return search.list_watches()


class _Search:
    """Functions that are followed, from each to what it names, and the values that they read.

    The code of a user hands on objects. Of installed packages only numbers are watched that functions read which this
    code calls, and functions of the user that these call.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        root = _find_function(fn)[0]
        self._package = "" if root is None else find_package(root.__code__.co_filename)
        self._seen = set[Any]()
        self._found = dict[Any, Watch]()
        self._objects = dict[Any, tuple[str, _Read]]()
        self._names = NO_NAMES

    def follow(self, waiting: list[Any]) -> None:
        """Follow functions, then those that may be called by way of the objects that these hand on."""
        count = -1
        while len(self._seen) > count:
            count = len(self._seen)
            while waiting and len(self._seen) < _MOST:
                waiting += self._enter(waiting.pop())
            names, objects = self._names, list(self._objects.values())
            waiting += (x for name, read in objects for x in ReadObject(name, read(), names).functions)

    def take(self, name: str, value: Any) -> Any:
        """A value that is read by a name, and does not change itself."""
        if not isinstance(value, (*VALUES, *HELD)) and is_watched(value):
            self._objects[id(value), name] = name, functools.partial(_pass, value)
        return value

    def _enter(self, each: Any) -> list[Any]:
        """Take what a value reads, if it is a function, and return what it leads to."""
        function, _, given = _find_function(each)
        owner = each.__self__ if isinstance(each, MethodType) else None
        key = id(function or each), id(owner), isinstance(each, functools.partial)
        if key in self._seen:
            return []
        self._seen.add(key)
        found = list(_list_parts(each))
        if function is None or not is_of_user(function):
            return found
        is_own = self._is_own(function)
        self._note_names(function, is_own)
        held = (*VALUES, *HELD, *SETTINGS, *(() if has_fills(function.__code__) else CONTAINERS)) if is_own else VALUES
        for name, read, is_written in _list_variables(function, given):
            value = read()
            if is_written and isinstance(value, (*VALUES, *HELD, *CONTAINERS)):
                continue
            if isinstance(value, held):
                self._found[key, name] = Watch(name, read, describe_entries(value))
            if not is_own:
                found += [value] if self._is_followed(value, function) else []
                continue
            if isinstance(value, CONTAINERS) <= isinstance(value, held) and not isinstance(value, (*VALUES, *HELD)):
                self._objects[key, name] = name, read
            found.append(value)
        return found

    def _is_own(self, function: FunctionType) -> bool:
        """Whether a function is one of the user's, of no installed package but that of the step itself."""
        file = function.__code__.co_filename
        is_here = not is_installed(file) or (self._package != "" and find_package(file) == self._package)
        return is_here and not is_caller(function)

    def _is_followed(self, value: Any, caller: FunctionType) -> bool:
        """Whether a function that a package calls may be one of the user's, or leads to one."""
        function = _find_function(value)[0]
        return function is not None and (self._is_own(function) or (is_caller(caller) and is_of_user(function)))

    def _note_names(self, function: FunctionType, is_own: bool) -> None:
        mine, known = find_names(function.__code__), self._names
        written = mine.written if writes_attributes(function) else frozenset[str]()
        read, filled = (mine.read, mine.filled) if is_own else (frozenset[str](), frozenset[str]())
        self._names = Names(known.read | read, known.written | written, known.filled | filled)

    def list_watches(self) -> list[Watch]:
        """The watches of all that was found, those of objects by the names in all code."""
        names, done = self._names, set[Any]()

        def describe(name: str, value: Any) -> dict[str, Any]:
            return ReadObject(name, value, names).values

        for key, (name, read) in self._objects.items():
            value = read()
            if (id(value), name) in done or not (found := describe(name, value)):
                continue
            done.add((id(value), name))
            self._found[key] = Watch(name, read, found, functools.partial(describe, name))
        return list(self._found.values())


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
    if isinstance(x, functools._lru_cache_wrapper):
        return (x.__wrapped__,)
    if isinstance(x, (Apply, StatefulApply)):  # whose modules are copies that nobody changes
        own = (cls for each in x.list_classes() for cls in each.__mro__ if _is_own(cls))
        return [fn for cls in own for fn in vars(cls).values() if isinstance(fn, FunctionType)]
    if isinstance(x, (tuple, list)):
        return [part for part in x if isinstance(part, (*_FUNCTIONS, tuple, list))]
    call = getattr(type(x), "__call__", None)  # noqa: B004  a method of the class, to follow
    return (MethodType(call, x),) if isinstance(call, FunctionType) and is_of_user(call) else ()


def _is_own(cls: type) -> bool:
    """Whether a class is of a file of the user's, and of no installed package."""
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    return cls.__module__ == "__main__" or (file is not None and not is_installed(file) and is_watched(cls))


def _read_cell(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing is assigned yet
        return None


def _list_variables(fn: FunctionType, given: dict[str, _Read]) -> Iterator[tuple[str, _Read, bool]]:
    """`(path, function that reads it, whether the code writes it)` of each path in the code of a function, whose
    parameters are `given` or not. Of what code writes only globals and attributes of classes, which it makes once."""
    closed = zip(fn.__code__.co_freevars, fn.__closure__ or ())
    cells = {name: functools.partial(_read_cell, cell) for name, cell in closed}
    root: _Read | None
    paths = find_paths(fn.__code__)
    for path in (*paths.read, *paths.written):
        if path.kind == "GLOBAL":
            root = functools.partial(fn.__globals__.get, path.root) if path.root in fn.__globals__ else None
        elif path.kind == "MODULE":
            root = functools.partial(_find_module, path.root, fn.__globals__.get("__package__"))
        else:
            root = given.get(path.root) or (cells.get(path.root) if path.kind == "CELL" else None)
        is_written = path in paths.written
        if root is not None and not (is_written and path.steps and not isinstance(root(), type)):
            yield str(path), functools.partial(_follow, root, path.steps), is_written


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
        held = getattr(value, "__dict__", {})
        if is_item:
            is_row = isinstance(value, (list, tuple, deque)) or type(value).__module__ == "numpy"
            if not (isinstance(value, (dict, type(os.environ))) or (is_row and isinstance(name, int))):
                return value if hasattr(type(value), "__getitem__") and is_watched(value) else None
            try:
                value = value[name]
            except LookupError:
                return None
        elif name in held and not isinstance(value, type):
            if isinstance(value, ModuleType) and isinstance(held[name], BuiltinFunctionType):
                return value  # which keeps it: torch.tanh
            value = held[name]
        else:
            owner, is_class = value, isinstance(value, type)
            classes = (owner if is_class else type(owner)).__mro__
            value = next((vars(cls)[name] for cls in classes if name in vars(cls)), None)
            if isinstance(value, property) and isinstance(value.fget, FunctionType) and not is_class:
                return MethodType(value.fget, owner)
            is_bound = isinstance(value, (FunctionType, MemberDescriptorType))
            is_bound |= name in getattr(type(owner), "_fields", ())
            if isinstance(value, (classmethod, staticmethod)) or (is_bound and not is_class):
                value = value.__get__(None if is_class else owner, owner if is_class else type(owner))
            elif value is None or hasattr(type(value), "__get__"):
                return owner if is_computed(type(owner)) and is_watched(owner) else value  # type: ignore[arg-type]
    return value
