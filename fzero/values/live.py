"""Live functions: a function that is another one where what it was made of has changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class LiveFunction:
    """`find()`, called. `refresh()` makes it anew where that is due, and returns what programs that call it depend on:
    how often each of the things that it was made of has changed, by their names. It is called before each trace, and
    before each call of a program."""

    not_described = ("refresh",)  # what it leads to is described (`fzero.cache.describe`)

    def __init__(self, find: Callable[[], Callable[..., Any]], refresh: Callable[[], dict[str, int]]) -> None:
        self.find, self.refresh = find, refresh

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.find()(*args, **kwargs)
