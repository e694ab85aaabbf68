"""Changes of Python objects: which of them make the next call of a function another one.

A function that counts its calls is no function of its arguments: a trace, and a module whose attributes are reset, would
see the first call for ever. What a call stores for the first time, such as a cache, a table or a flag, is no such change.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

_VALUES = (bool, int, float, complex, str, bytes)


class Content(NamedTuple):
    """What a container held at some time: its items by key, and whether they are a sequence."""

    items: dict[Any, Any]
    is_sequence: bool


def take_content(value: Any) -> Content | None:
    """The present content of a dict, a list, a deque, or of the attributes of an object; None for other objects."""
    if isinstance(value, dict):
        return Content(dict(value), False)
    if isinstance(value, (list, deque)):
        return Content(dict(enumerate(value)), True)
    attributes = getattr(value, "__dict__", None)
    return Content(dict(attributes), False) if isinstance(attributes, dict) else None


def find_changes(before: Content, after: Content) -> Iterator[tuple[Any, str]]:
    """`(key, what happened)` of the changes that make a next call another one: of a number, a string or a flag to
    another, and of the length of a sequence."""
    if before.is_sequence and len(before.items) != len(after.items):
        yield None, f"from {len(before.items)} to {len(after.items)} entries"
    for key, value in before.items.items():
        new = after.items.get(key)
        if new is value or not isinstance(value, _VALUES) or not isinstance(new, _VALUES):
            continue
        is_set = value is False and new is True  # once: a flag
        if not is_set and (type(new) is not type(value) or new != value) and (new == new or value == value):
            yield key, f"from {value!r:.40} to {new!r:.40}"
