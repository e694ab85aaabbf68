"""Calls: what a step called during a trace, by which traces of other sizes are compared.

torch decides by sizes how it computes: one row needs no copy where two rows need one. A trace of two rows is right for
one row, too, where the step calls the same functions on the same tensors, and each returns one of the same shape: a
function is what it is documented to be, whichever way it takes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from fzero.base.symbols import Symbols, is_open, key_of
from fzero.base.torch_private import FakeTensor, storage_key, unwrap
from fzero.base.user_line import current_user_line
from fzero.values.sharded import Sharded

_ATOMS = (bool, int, float, complex, str, bytes, type(None), type(...), torch.dtype, torch.device)


class _Seen:
    """A tensor of a call: its number, in the order in which the trace met tensors, its dtype and shape, and the key of
    its memory."""

    def __init__(self, number: int, x: Tensor, key: int | None) -> None:
        self.form, self.key = (number, x.dtype, tuple(x.shape)), key


class Calls:
    """The calls of torch functions by a step, in their order, each with its arguments and what it returned."""

    def __init__(self) -> None:
        self.begin(())

    def begin(self, given: Sequence[Tensor]) -> None:
        """Forget what was noted: a trace begins, of a step with these arguments."""
        self._rows: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._kept: list[Tensor] = []  # no other object gets the `id` of one that is kept
        self.note("takes", list(given), None)

    def note(self, func: Callable[..., Any] | str, given: Any, returned: Any) -> None:
        """Note a call."""
        self._rows.append((current_user_line(), func, self._describe(given), self._describe(returned)))

    def finish(self, written: Collection[int]) -> None:
        """Tell apart the memory of tensors where the program writes into it, by the keys of such memory: else it does
        not matter whether a function returns a copy or a view."""
        places = dict[int | None, int]()

        def place(x: Any) -> Any:
            if isinstance(x, tuple):
                return tuple(map(place, x))
            if not isinstance(x, _Seen):
                return x
            return (*x.form, places.setdefault(x.key, len(places)) if x.key in written else None)

        self._rows = list(map(place, self._rows))
        self._numbers, self._kept = {}, []

    def fill(self, symbols: Symbols, sizes: Sequence[int]) -> list[Any]:
        """The calls with these sizes in the place of open ones."""
        keys = dict[Any, int]()

        def number(x: Any) -> None:
            if isinstance(x, tuple):
                for item in x:
                    number(item)
            elif is_open(x):
                keys.setdefault(key_of(x), len(keys))

        def fill(x: Any) -> Any:
            if isinstance(x, tuple):
                return tuple(map(fill, x))
            return values[keys[key_of(x)]] if is_open(x) else x

        number(tuple(self._rows))
        values = symbols.evaluator(keys)(sizes)
        return list(map(fill, self._rows))

    def find_difference(self, symbols: Symbols, sizes: Sequence[int], other: Calls) -> str | None:
        """The user's line of the first call that differs from one of another trace, with these sizes in the place of
        open ones. None where all are equal."""
        rows = self.fill(symbols, sizes), other._rows
        for mine, theirs in zip(*rows):
            if mine != theirs:
                return str(theirs[0])
        return None if len(rows[0]) == len(rows[1]) else str(max(rows, key=len)[-1][0])

    def _describe(self, x: Any) -> Any:
        """What is equal for equal arguments of two traces."""
        if isinstance(x, Tensor):
            return self._see(x.local if isinstance(x, Sharded) else x)
        if isinstance(x, _ATOMS) or is_open(x):
            return x
        if isinstance(x, (list, tuple)):
            return tuple(map(self._describe, x))
        if isinstance(x, dict):
            return tuple((key, self._describe(value)) for key, value in x.items())
        if isinstance(x, slice):
            return slice, *map(self._describe, (x.start, x.stop, x.step))
        return type(x)

    def _see(self, x: Tensor) -> _Seen:
        inner = unwrap(x)
        if id(inner) not in self._numbers:
            self._numbers[id(inner)] = len(self._kept)
            self._kept.append(inner)
        number = self._numbers[id(inner)] if isinstance(inner, FakeTensor) else id(inner)
        return _Seen(number, x, storage_key(inner) if inner.layout == torch.strided else None)
