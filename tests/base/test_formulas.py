"""Formulas: texts that compute numbers from sizes, and nothing else."""

from __future__ import annotations

import pytest

from fzero.base.formulas import Condition, Conditions, compile_formulas, is_formula


@pytest.mark.parametrize(
    "text",
    [
        "s0",
        "3",
        "(s0*s1 // 2) % 7",
        "-s0 + 1.5",
        "math.floor(s0/2)",
        "max(s0, s1, 2)",
        "s0 < 3 and not s1 == 4",
        "True",
    ],
)
def test_what_is_a_formula(text: str) -> None:
    assert is_formula(("s0", "s1"), text)
    compile_formulas(("s0", "s1"), [text])((5, 6))


@pytest.mark.parametrize(
    "text",
    [
        "", "s2", "math", "s0; s1", "s0.real", "'text'", "print(s0)", "eval('s0')", "max", "max(s0, key=int)", "[s0]",
        "math.floor.__self__", "(lambda: s0)()", "().__class__", "s0 if s0", "s0\ns1", "(s0 := 3)", "max(*s0)", "s0[0]",
        "f'{s0}'", "[x for x in (s0,)]", "s0 " + "+ s0" * 10**5,
    ],
)  # fmt: skip
def test_what_is_none(text: str) -> None:
    assert not is_formula(("s0", "s1"), text)


def test_names_are_names() -> None:
    assert not is_formula(("s0=print(1)",), "1")


def test_a_condition_that_is_broken_is_named_with_its_line() -> None:
    conditions = Conditions(("s0",), (Condition("s0 % 2 == 0", ""), Condition("s0 < 10", "model.py:3")))
    assert conditions.find_broken([8]) is None
    assert conditions.find_broken([12]) == "s0 < 10 for {'s0': 12}, asked by model.py:3"
    assert conditions.find_broken([7]) == "s0 % 2 == 0 for {'s0': 7}, asked by torch"
    assert conditions.find_broken([1]) == "a size of 1 has a program of its own"
