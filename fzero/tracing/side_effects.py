"""Side effects of a trace: Python objects that a step changed while it was traced.

A program has tensors only. A step that counts its calls in an attribute, takes the next entry of a list, or draws from
Python's random numbers would be traced at its first call, which then runs for ever.
"""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from types import FunctionType
from typing import Any

from fzero.base.changes import Content, find_changes, is_read
from fzero.base.errors import FzeroError
from fzero.base.reachable import Walked, is_of_fzero, is_step, list_children, walk_with_contents


class SideEffects:
    """What the objects that a step reaches hold before its trace."""

    def __init__(self, name: str, fn: Any) -> None:
        self._name = name
        self._reached: list[tuple[str, Any, Content]] = []
        for place, value, held in walk_with_contents(name, fn):
            if not is_of_fzero(type(value)) or is_step(value):
                self._reached.append((place, value, _describe(value, held)))
        self._draws = dict(_describe_draws())

    def check(self, walked: Walked) -> None:
        """Look for changes after the trace, where a walk from the step has found `walked`.

        Raises:
            FzeroError: naming the attribute, variable or entry.
        """
        now = {(name, id(value)): held for name, value, held in walked if held}
        for name, value, before in self._reached:
            held = now.get((name, id(value))) or list_children(name, value)
            for key, change in find_changes(value, before, _describe(value, held)):
                place = name if key is None else key
                functions = (x for _, x, _ in self._reached if isinstance(x, FunctionType))
                if before.states.get(key) or is_read(place, functions):
                    raise _refuse(place, change)
        for library, state in _describe_draws():
            if self._draws.get(library, state) != state:
                problem = f"draws from the generator of {library}: each call would use the numbers of the first"
                raise FzeroError(self._name, problem, "draw with torch, or give what was drawn as an argument")


def _describe(value: Any, held: Iterable[tuple[str, Any]]) -> Content:
    """What an object holds that may count: by the names that a user would write."""
    return Content.of(held, isinstance(value, (list, deque)))


def _refuse(place: str, change: str) -> FzeroError:
    problem = f"the step changes it {change} while it is traced, and reads it: each call would be the first one"
    return FzeroError(place, problem, "give what changes as an argument, and return its next value")


def _describe_draws() -> Iterator[tuple[str, Any]]:
    """`(library, state)` of the global generators of random numbers."""
    yield "random", random.getstate()
    if "numpy" in sys.modules:
        state = sys.modules["numpy"].random.get_state()
        yield "numpy.random", (state[1].tobytes(), *state[2:])
