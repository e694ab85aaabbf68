"""Watches: values that a step reads from its surroundings, and that its trace writes into the program as numbers.

A step should take what it needs as arguments. Where it does not, the program is right as long as these values stay.
Watched is

* what the code of a step spells as a path: `rate` of a closure or a global, `self.rate` of a bound method,
  `config.rate`, `config["rate"]` and `getattr(config, "rate")`, what a parameter has by default or by
  `functools.partial`, what the code imports, variables of the context and of the environment;
* of an object at the end of a path, which the code hands on, loops over or calls: the attributes that have a name in
  code, the entries of short containers, and what these hold;
* likewise in the functions that the step reaches so, and in methods of objects whose names are in code.

Not watched are files, the clock, entries of long containers, and what only code reads that is called by way of a value
of the trace.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable
from types import FunctionType, MethodType
from typing import Any, NamedTuple

from torch import Tensor

from fzero.base.installed import find_package, is_installed
from fzero.base.torch_private import version_of
from fzero.program.program import Program
from fzero.tracing.code_paths import Names, find_names
from fzero.tracing.followed import Read, find_function, hold, list_parts, list_variables, pass_on
from fzero.tracing.read_objects import (
    CONTAINERS,
    HELD,
    NO_NAMES,
    VALUES,
    ReadObject,
    describe_value,
    is_caller,
    is_of_user,
    writes_attributes,
)
from fzero.values.live import LiveFunction
from fzero.values.sharded import Sharded

_ABSENT = object()
_MOST = 1000  # functions that are looked at


class Watch(NamedTuple):
    """A value as it was when a step was traced. `read` returns the present one, and `describe` makes a key of it;
    `name` is the user's name for it."""

    name: str
    read: Callable[[], Any]
    key: Any
    describe: Callable[[Any], Any] = describe_value

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


def _get_environment() -> Any:
    return os.environ


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
        root = find_function(fn)[0]
        self._package = "" if root is None else find_package(root.__code__.co_filename)
        self._seen = set[Any]()
        self._found = dict[tuple[int, str], Watch]()
        self._objects = dict[tuple[int, str], Read]()
        self._names = NO_NAMES

    def follow(self, waiting: list[Any]) -> None:
        """Follow functions, then those that may be called by way of the objects that these hand on."""
        count = -1
        while len(self._seen) > count:
            count = len(self._seen)
            while waiting and len(self._seen) < _MOST:
                waiting += self._enter(waiting.pop())
            names = self._names
            waiting += (
                x for (_, name), read in self._objects.items() for x in ReadObject(name, read(), names).functions
            )

    def take(self, name: str, value: Any) -> Any:
        """A value that is read by a name, and does not change itself."""
        self._note(id(value), name, value, hold(value))
        return value

    def _enter(self, each: Any) -> list[Any]:
        """Take what a value reads, if it is a function, and return what it leads to."""
        function, _, given = find_function(each)
        owner = each.__self__ if isinstance(each, MethodType) else None
        key = id(function or each), id(owner), isinstance(each, functools.partial)
        if key in self._seen:
            return []
        self._seen.add(key)
        found = list(list_parts(each, self._is_own))
        if isinstance(each, LiveFunction):
            self._found[id(each), "the model"] = Watch("the model", each.refresh, each.refresh(), pass_on)
        if function is None or not is_of_user(function):
            return found
        is_own = self._is_own(function)
        self._note_names(function, is_own)
        filled = find_names(function.__code__).filled
        for variable in list_variables(function, given):
            name, read, origin = variable.name, variable.read, variable.origin
            value = read()
            if value is os.getenv:
                value, read = os.environ, _get_environment
            if variable.is_written and isinstance(value, (*VALUES, *HELD, *CONTAINERS)):
                continue
            is_filled = isinstance(value, CONTAINERS) and not filled.isdisjoint(variable.names)
            if isinstance(value, VALUES) or (is_own and not is_filled):
                self._note(origin, name, value, read)
            if is_own or self._is_followed(value, function):
                found.append(value)
        return found

    def _note(self, origin: int, name: str, value: Any, read: Read) -> None:
        if isinstance(value, (*VALUES, Tensor)):
            self._found[origin, name] = Watch(name, read, describe_value(value))
        else:
            self._objects[origin, name] = read

    def _is_own(self, function: Any) -> bool:
        """Whether a value is a function of the user's, of no installed package but that of the step itself."""
        if not isinstance(function, FunctionType) or not is_of_user(function) or is_caller(function):
            return False
        file = function.__code__.co_filename
        return not is_installed(file) or (self._package != "" and find_package(file) == self._package)

    def _is_followed(self, value: Any, caller: FunctionType) -> bool:
        """Whether a function that a package calls may be one of the user's, or leads to one."""
        function = find_function(value)[0]
        return function is not None and (self._is_own(function) or (is_caller(caller) and is_of_user(function)))

    def _note_names(self, function: FunctionType, is_own: bool) -> None:
        mine, known = find_names(function.__code__), self._names
        written = mine.written if writes_attributes(function) else frozenset[str]()
        read, filled = (mine.read, mine.filled) if is_own else (frozenset[str](), frozenset[str]())
        self._names = Names(known.read | read, known.written | written, known.filled | filled)

    def list_watches(self) -> list[Watch]:
        """The watches of all that was found, those of objects by the names in all code."""
        names = self._names

        def describe(name: str, value: Any) -> dict[str, Any]:
            return ReadObject(name, value, names).values

        for (origin, name), read in self._objects.items():
            found = describe(name, read())
            if found:
                self._found[origin, name] = Watch(name, read, found, functools.partial(describe, name))
        return list(self._found.values())
