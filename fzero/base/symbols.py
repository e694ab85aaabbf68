"""Symbols: sizes that a trace leaves open, and the conditions that the trace asked of them.

A symbol stands for a size, such as the length of a batch. It computes like the number that it was made with, its
example. Where Python or torch decides by it, the decision goes as for the example, and becomes a condition: a program
with open sizes is right for the numbers that fulfil all conditions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from fzero.base.formulas import LEAST, MOST, Condition, Conditions, compile_formulas
from fzero.base.torch_private_symbols import (
    is_whole_float,
    make_environment,
    make_number,
    make_source,
    remember_results,
    write_expressions,
)

Symbol = (torch.SymInt, torch.SymFloat, torch.SymBool)


def is_open(x: Any) -> bool:
    """Whether a number is computed from symbols."""
    return isinstance(x, Symbol)


class Symbols:
    """The open sizes of a trace, in the order in which they were opened. `find_line` returns the user's line that is
    running. With `remembers` each sum and product of sizes is computed once. `differ` says that ranks may have other
    sizes at the same time."""

    def __init__(self, find_line: Callable[[], str] = lambda: "", remembers: bool = True, differ: bool = False) -> None:
        self.differ = differ
        self._lines: list[str] = []
        self._remembers = remembers
        self.env = make_environment(self._lines, find_line)
        self.examples: list[int] = []
        self.sizes: list[torch.SymInt] = []
        self._symbols: list[Any] = []
        self._conditions: Conditions | None = None

    def open(self, example: int) -> torch.SymInt:
        """A new symbol with this example, from `LEAST` on."""
        from torch.fx.experimental.symbolic_shapes import DimDynamic, constrain_range

        source = make_source(f"size_{len(self._symbols)}")
        symbol = self.env.create_symbol(example, source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None)
        size: Any = self.env.create_symintnode(symbol, hint=example, source=source)
        if self._remembers:
            remember_results(size)
        constrain_range(size, min=LEAST, max=MOST)
        self._symbols.append(symbol)
        self.sizes.append(size)
        self.examples.append(example)
        return size

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the sizes in formulas."""
        return tuple(map(str, self._symbols))

    @property
    def conditions(self) -> Conditions:
        """What was asked of the sizes so far."""
        guards = self.env.guards
        if self._conditions is None or len(self._conditions.rows) != len(guards):  # a pass may ask, too
            written = write_expressions([guard.expr for guard in guards])
            never = ("False and " if adds_floats(guard.expr) else "" for guard in guards)
            rows = (Condition(fails + text, line) for fails, text, line in zip(never, written, self._lines))
            self._conditions = Conditions(self.names, tuple(rows))
        return self._conditions

    def find_broken(self, values: Sequence[int]) -> str | None:
        """As `Conditions.find_broken`, of `conditions`."""
        return self.conditions.find_broken(values)

    def write_keys(self, keys: Iterable[Any]) -> list[str]:
        """The formulas of numbers that have these keys."""
        return write_expressions([expression for _, expression in keys])

    def evaluator(self, keys: Iterable[Any]) -> Callable[[Sequence[int]], Sequence[Any]]:
        """A function of sizes that returns the values of numbers that have these keys."""
        return compile_formulas(self.names, self.write_keys(keys))

    def copy(self, sizes: Sequence[int]) -> tuple[Symbols, Callable[[Any], Any]]:
        """The same symbols with these sizes for their examples and without conditions; and a function that returns the
        number of a key there, and what is no key as it is. No two traces of torch may compute with the same numbers."""
        made = Symbols(remembers=False)
        for size in sizes:
            made.open(size)
        renamed = dict(zip(self._symbols, made._symbols))

        def find(key: Any) -> Any:
            return make_number(made.env, key[0], key[1].xreplace(renamed)) if isinstance(key, tuple) else key

        return made, find


def adds_floats(expression: Any) -> bool:
    """Whether an expression has sums or products of floats. torch's symbols put constants of these together, and Python
    rounds after each. A sum of whole numbers is exact in any order."""
    is_whole = expression.is_Add and all(map(is_whole_float, expression.args))
    is_float = (expression.is_Add or expression.is_Mul) and not (expression.is_integer or is_whole)
    return is_float or any(map(adds_floats, expression.args))


def key_of(number: Any) -> Any:
    """What is equal for numbers that are computed alike."""
    return type(number), number.node.expr


def is_same_number(a: Any, b: Any) -> bool:
    """Whether two numbers are equal at all sizes, as far as expanding their products shows."""
    if not is_open(a) and not is_open(b):
        return bool(a == b)
    if not is_open(a) or not is_open(b):
        return False
    return key_of(a) == key_of(b) or bool((a.node.expr - b.node.expr).expand() == 0)
