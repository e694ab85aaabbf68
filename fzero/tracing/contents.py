"""Contents: what objects hold, themselves and through what they hold, and whether they hold it still."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from contextvars import ContextVar
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn

from fzero.base.reachable import is_of_fzero, is_of_library, is_of_no_one, list_contents
from fzero.values.layers import is_handed_over

_MOST = 20_000
"""Objects that are looked at."""


class HeldContents:
    """What some objects held when they were added, by identity. Parameters of modules do not count. `is_known` is false
    where that is too much to look at."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[Any, list[Any]]] = {}
        self.is_known = True

    def add(self, root: Any) -> None:
        """Note what an object holds, and what that holds in its turn."""
        waiting = [root]
        while waiting:
            value = waiting.pop()
            if id(value) in self._held or _is_empty(value):
                continue
            if len(self._held) == _MOST:
                self.is_known = False
                return
            held = _list_contents_of(value)
            self._held[id(value)] = value, held
            waiting += held

    def holds(self, wanted: Sequence[Any]) -> bool:
        """Whether one of the objects holds one of those wanted."""
        ids = set(map(id, wanted))
        return any(id(x) in ids for _, held in self._held.values() for x in held)

    def is_same(self) -> bool:
        """Whether all objects hold what they held."""
        for value, before in self._held.values():
            now = _list_contents_of(value)
            if len(now) != len(before) or not all(map(operator.is_, now, before)):
                return False
        return True


def _is_empty(value: Any) -> bool:
    if isinstance(value, (Tensor, ModuleType, BuiltinFunctionType)):
        return True
    if isinstance(value, (type, FunctionType)):
        return is_of_library(value.__module__)
    return is_of_no_one(value)


def _list_contents_of(value: Any) -> list[Any]:
    """What an object holds itself, with keys, and its class where that is a user's."""
    if isinstance(value, dict):
        held = [*_list_items(value), *_list_items(getattr(value, "__dict__", {}))]
    elif isinstance(value, nn.Module):
        held = _list_module(value)
    elif isinstance(value, ContextVar):
        return [value.get(None)]
    elif isinstance(value, type):
        return [x for cls in value.__mro__ if not is_of_library(cls.__module__) for x in _list_items(vars(cls))]
    else:
        held = [x for _, x in list_contents("", value)]
    cls = type(value)
    return held if is_of_library(cls.__module__) or is_of_fzero(cls) else [*held, cls]


def _list_module(module: nn.Module) -> list[Any]:
    """What a module holds. Its tables are known by what they hold: a call of a lowered module makes them anew."""
    held: list[Any] = []
    for name, x in vars(module).items():
        if name != "_parameters" and not (name == "forward" and is_handed_over(x)):
            held += [name, *_list_items(x)] if isinstance(x, dict) else [name, x]
    return held


def _list_items(table: Any) -> list[Any]:
    return [*table, *table.values()]
