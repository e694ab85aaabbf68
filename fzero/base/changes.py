"""Changes of Python objects: which of them make the next call of a function another one.

A function that counts its calls is no function of its arguments: a trace, and a module whose attributes are reset, see
the first call for ever. Two changes do not matter: what is stored for the first time, such as a cache, a table or a
flag; and a number that code only counts, and never reads.
"""

from __future__ import annotations

import array
import dis
import functools
import gc
import itertools
import operator
import pickle
import random
import re
from collections import deque
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType, GeneratorType
from typing import Any, NamedTuple

_VALUES = (bool, int, float, complex, str, bytes)
_OF_NUMPY = ("Generator", "RandomState", "ndarray")
"""Classes of numpy whose objects change."""
_MOST = 1 << 16  # bytes of an array that is looked at
_COUNTS = frozenset({"COPY", "DUP_TOP", "DUP_TOP_TWO", "SWAP", "ROT_TWO", "ROT_THREE", "LOAD_CONST", "LOAD_SMALL_INT"})
_COUNTS |= {"BINARY_OP", "INPLACE_ADD", "BINARY_ADD", "BINARY_SUBSCR", "PRECALL", "CACHE"}
"""Instructions between the load and the store of `x += 1` and `x["k"] += 1`."""
_STORES = ("STORE_ATTR", "STORE_DEREF", "STORE_GLOBAL", "STORE_SUBSCR")
_ADDS = ("append", "appendleft", "add", "extend", "insert", "update")


class Content(NamedTuple):
    """What an object held at some time: its items by key, and whether they are a sequence. `states` describes items
    that change when they are used, such as iterators."""

    items: dict[Any, Any]
    is_sequence: bool
    states: dict[Any, str]

    @classmethod
    def of(cls, items: Iterable[tuple[Any, Any]], is_sequence: bool = False) -> Content:
        held = dict(items)
        return cls(held, is_sequence, {key: _describe_state(x) for key, x in held.items() if _is_stateful(x)})


def take_content(value: Any) -> Content | None:
    """The present content of a dict, a list, a deque, or of the attributes of an object; None for other objects."""
    if isinstance(value, dict):
        return Content.of(value.items())
    if isinstance(value, (list, deque)):
        return Content.of(enumerate(value), True)
    attributes = getattr(value, "__dict__", None)
    return Content.of(attributes.items()) if isinstance(attributes, dict) else None


def find_changes(owner: Any, before: Content, after: Content) -> Iterator[tuple[Any, str]]:
    """`(key, what happened)` of the changes of an object that may make a next call another one: of a number, a string
    or a flag to another, of the length of a sequence (whose key is None), of an iterator or a generator of numbers. An
    attribute that an object lacked had the value of its class."""
    if before.is_sequence and len(before.items) != len(after.items):
        yield None, f"from {len(before.items)} to {len(after.items)} entries"
    for key, new in after.items.items():
        value = before.items[key] if key in before.items else _find_default(owner, key)
        if new is value:
            if key in before.states and after.states[key] != before.states[key]:
                yield key, f"from {before.states[key]:.60} to {after.states[key]:.60}"
            continue
        if not isinstance(value, _VALUES) or not isinstance(new, _VALUES):
            continue
        is_set = value is False and new is True  # once: a flag
        if not is_set and (type(new) is not type(value) or new != value) and (new == new or value == value):
            yield key, f"from {value!r:.40} to {new!r:.40}"


def _find_default(owner: Any, key: Any) -> Any:
    name = key.rpartition(".")[2] if isinstance(key, str) else ""
    return next((vars(cls)[name] for cls in type(owner).__mro__ if name in vars(cls)), None)


def _is_stateful(value: Any) -> bool:
    """Whether an object changes when it is used: an iterator of Python, a generator of numbers, or an array."""
    return _has_states(type(value))  # type: ignore[arg-type]  # a class is taken for unhashable


@functools.lru_cache(1 << 12)
def _has_states(cls: type) -> bool:
    is_iterator = hasattr(cls, "__next__") and cls.__module__ in ("builtins", "itertools")
    is_of_numpy = cls.__name__ in _OF_NUMPY and cls.__module__.startswith("numpy")
    return is_iterator or is_of_numpy or cls in (random.Random, array.array)


def _describe_state(value: Any) -> str:
    """What such an object will give next, as far as it can be told without asking it."""
    if isinstance(value, itertools.count):
        return repr(value)
    if isinstance(value, GeneratorType):
        frame = value.gi_frame
        held = {} if frame is None else {k: v for k, v in frame.f_locals.items() if isinstance(v, _VALUES)}
        return f"{value.__name__} at {None if frame is None else frame.f_lasti} with {held}"
    if hasattr(value, "__next__"):
        inner = [x for held in gc.get_referents(value) for x in (held if isinstance(held, tuple) else (held,))]
        states = [_describe_state(x) for x in inner if _is_stateful(x)]
        return " and ".join(states or [f"{operator.length_hint(value)} entries left"])
    if getattr(value, "nbytes", 0) > _MOST or getattr(getattr(value, "dtype", None), "hasobject", False):
        return ""
    return f"{type(value).__name__} in state {hash(pickle.dumps(value)):x}"


def is_read(place: str, functions: Iterable[FunctionType]) -> bool:
    """Whether one of these functions reads a place, such as `self.count` or `count["k"]`, other than to count in it or
    to add to it. Another variable or attribute of the same name counts too."""
    path = re.sub(r"(\[[^\]]*\])+$", "", place)
    name = path.rpartition(".")[2]
    return any(_reads(x.__code__, name, path == name and name in list_defaults(x)) for x in functions)


def list_defaults(function: FunctionType) -> dict[str, Any]:
    """The default values of the parameters of a function."""
    code, defaults = function.__code__, function.__defaults__ or ()
    positional = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
    return {**dict(zip(positional, defaults)), **(function.__kwdefaults__ or {})}


def _reads(code: CodeType, name: str, is_parameter: bool = False) -> bool:
    if is_parameter or name in code.co_names or name in code.co_freevars or name in code.co_cellvars:
        found = [each for each in dis.get_instructions(code) if each.opname != "CACHE"]
        for i, each in enumerate(found):
            is_load = each.opname.startswith("LOAD") and each.opname not in ("LOAD_CONST", "LOAD_CLOSURE")
            if is_load and each.argval == name and not _only_counts(found[i + 1 :], name):
                return True
    return any(_reads(x, name) for x in code.co_consts if isinstance(x, CodeType))


def _only_counts(following: list[dis.Instruction], name: str) -> bool:
    """Whether what was loaded goes only into a place of the same name, or is added to."""
    for each in following:
        if each.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            return each.argval in _ADDS
        if each.opname in _STORES:
            return each.opname == "STORE_SUBSCR" or each.argval == name
        if each.opname not in _COUNTS:
            return False
    return False
