"""Formulas: numbers that are computed from sizes, as texts of Python: `(size // 2)*hidden`.

A formula has names, numbers, operators, comparisons, and functions of `math` and few others: nothing else runs.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

LEAST, MOST = 2, 2**30
"""The range of an open size. torch broadcasts a size of 1, and 0 leaves nothing: each has programs of its own."""
_FUNCTIONS: dict[str, Any] = {
    "abs": abs,
    "bool": bool,
    "float": float,
    "int": int,
    "max": max,
    "min": min,
    "round": round,
}
_KINDS = (ast.Expression, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.IfExp, ast.Load,
          ast.operator, ast.unaryop, ast.boolop, ast.cmpop)  # fmt: skip


def compile_formulas(names: Sequence[str], formulas: Sequence[str]) -> Callable[[Sequence[int]], Sequence[Any]]:
    """A function of the values of names that returns those of formulas, as Python computes them."""
    code = ", ".join(f"({formula})" for formula in formulas)
    takes = f"lambda values: (lambda {', '.join(names)}: ({code}{',' if formulas else ''}))(*values)"
    function: Callable[[Sequence[int]], Sequence[Any]] = eval(takes, {"__builtins__": _FUNCTIONS, "math": math})
    return function


def is_formula(names: Sequence[str], text: str) -> bool:
    """Whether a text is a formula of these names."""
    try:
        return all(name.isidentifier() for name in names) and _is_formula(ast.parse(text, mode="eval"), set(names))
    except (SyntaxError, ValueError, RecursionError):
        return False


def _is_formula(node: ast.AST, names: set[str]) -> bool:
    if isinstance(node, ast.Name):
        return node.id in names
    if isinstance(node, ast.Constant):
        return type(node.value) in (int, float, bool)
    if isinstance(node, ast.Call):
        function = node.func
        is_math = (
            isinstance(function, ast.Attribute) and _is_named(function.value, {"math"}) and function.attr in dir(math)
        )
        is_known = (is_math or _is_named(function, _FUNCTIONS.keys())) and not node.keywords
        return is_known and all(_is_formula(x, names) for x in node.args)
    return isinstance(node, _KINDS) and all(_is_formula(x, names) for x in ast.iter_child_nodes(node))


def _is_named(node: ast.AST, names: Any) -> bool:
    return isinstance(node, ast.Name) and node.id in names


class Condition(NamedTuple):
    """A formula that has to be true, and the user's line that asked, "" for torch's own code."""

    formula: str
    line: str


@dataclass(frozen=True)
class Conditions:
    """What sizes by these names have to fulfil."""

    names: tuple[str, ...]
    rows: tuple[Condition, ...]

    @cached_property
    def _check(self) -> Callable[[Sequence[int]], Sequence[Any]]:
        return compile_formulas(self.names, [row.formula for row in self.rows])

    def find_broken(self, values: Sequence[int], least: int = LEAST) -> str | None:
        """The first condition that these sizes do not fulfil, with the user's line that asked. None where they fulfil
        all of them. Sizes below `least` fulfil none."""
        if any(not least <= value <= MOST for value in values):
            return f"a size of {min(values)} has a program of its own"
        try:
            checked = self._check(values)
        except ZeroDivisionError:
            return f"a size of {min(values)} has a program of its own"
        for row, holds in zip(self.rows, checked):
            if not holds:
                return f"{row.formula} for {dict(zip(self.names, values))}, asked by {row.line or 'torch'}"
        return None
