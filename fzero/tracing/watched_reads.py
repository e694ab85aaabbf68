"""Reads of attributes that are noted while code runs, and an index that notes who looks at it."""

from __future__ import annotations

import functools
import sys
from abc import ABCMeta
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, cast

from torch import nn

Note = Callable[[str, Any], Any]
"""Called with the name and the value of an attribute that is read. What it returns is what the reader gets, whose frame
is the second one above that of the call."""

_notes: ContextVar[Mapping[int, Note] | None] = ContextVar("fzero_notes", default=None)


@contextmanager
def watch_reads(objects: Iterable[tuple[Any, Note]]) -> Iterator[Callable[[Any], bool]]:
    """In this context, reads of these objects' attributes are noted. Gives a function that says whether one of the
    objects can be watched."""
    found = [(x, note, cast(Any, type(x))) for x, note in objects]
    watched = {id(x): (x, note, _watch_class(cls), cls) for x, note, cls in found}
    token = _notes.set({**(_notes.get() or {}), **{key: note for key, (_, note, _, _) in watched.items()}})
    try:
        for x, _, cls, own in watched.values():
            x.__class__ = cls or own
        yield lambda x: watched[id(x)][2] is not None
    finally:
        for x, _, _, own in watched.values():
            x.__class__ = own
        _notes.reset(token)


@functools.lru_cache(256)
def _watch_class(cls: Any) -> Any:
    """A class whose objects note what is read of them. None for a class of a user's metaclass, which may do something
    where another one is made of it, and for one of objects of another layout."""
    if type(cls) not in (type, ABCMeta):
        return None

    def read(self: Any, name: str) -> Any:
        note = (_notes.get() or {}).get(id(self))
        x = cls if name == "__class__" else cls.__getattribute__(self, name)
        return x if note is None else note(name, x)

    base = nn.Module if issubclass(cls, nn.Module) else _Plain
    made = type(cls)(cls.__name__, (base,), {"__getattribute__": read, "__module__": cls.__module__})
    try:
        made.__bases__ = (cls,)  # afterwards: no `__init_subclass__` is told, as of no class that a user makes
    except TypeError:  # of a class with slots
        return None
    return made


class _Plain:
    """A class of objects that have a dict."""


class LayerIndex:
    """The index of a layer in the hands of its code: an int that calls `look` where someone looks at it, with the
    name of the module whose code does."""

    def __init__(self, value: int, look: Callable[[str], None]) -> None:
        self._value, self._look = value, look

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return int

    def __getattr__(self, name: str) -> Any:
        self._look("")
        return getattr(self._value, name)


def _define(name: str) -> Callable[..., Any]:
    method = getattr(int, name)

    def call(self: LayerIndex, *given: Any) -> Any:
        self._look(sys._getframe(1).f_globals.get("__name__", ""))
        return method(self._value, *given)

    return call


_OF_OBJECTS = frozenset(dir(object)) - {
    "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__hash__", "__repr__", "__str__", "__format__",
    "__reduce_ex__",
}  # fmt: skip
for _name in (name for name in dir(int) if name.startswith("__") and name not in _OF_OBJECTS):
    setattr(LayerIndex, _name, _define(_name))
