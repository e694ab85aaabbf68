"""Judges a seed: whether a step that reads its surroundings follows a change of them as plain torch does."""

from __future__ import annotations

import random
import textwrap
from typing import Any, NamedTuple

import torch

import fzero
from fzero import FzeroError
from property_tests.random_surroundings.holders import HOLDERS, READERS, ROOTS


class Case(NamedTuple):
    """Holders from the root inwards, how code reads them, and where it has the root from. The value of holder `at` is
    what changes."""

    holders: tuple[str, ...]
    reader: str
    root: str
    at: int


def draw_case(seed: int) -> Case:
    """The case of a seed."""
    draws = random.Random(seed)
    holders = tuple(draws.choice(list(HOLDERS)) for _ in range(draws.randint(1, 3)))
    return Case(holders, draws.choice(list(READERS)), draws.choice(list(ROOTS)), draws.randrange(len(holders)))


def write(case: Case) -> str:
    """The code of a case: it defines `step`."""

    def read(name: str) -> str:
        for each in case.holders:
            name = HOLDERS[each].spelled.format(name)
        return name

    root = "self.root" if case.root == "self" else "root"
    source = READERS[case.reader].format(root=root, read_root=read(root), read_held=read("held"))
    head, _, step = source.rpartition("def step(")
    if case.root == "self":
        method = textwrap.indent("def step(" + step.replace("x)", "self, x)", 1), "    ")
        return head + ROOTS["self"].format(method=method)
    return ROOTS[case.root].format(
        source=source,
        indented=textwrap.indent(source, "    "),
        with_default=head + "def step(" + step.replace("x)", "x, root=root)", 1),
        with_argument=head + "def step(" + step.replace("x)", "x, root)", 1),
    )


def describe(seed: int) -> str:
    """What a seed draws, with its code."""
    return f"{seed}: {draw_case(seed)}\n{write(draw_case(seed))}"


def judge(seed: int) -> tuple[int, str, str]:
    """`(seed, verdict, what is wrong)`."""
    torch.set_num_threads(1)
    case = draw_case(seed)
    made = _make(case, 2.0)
    known: dict[str, Any] = {"root": made[0], "__name__": __name__}
    exec(compile(write(case), f"surroundings {seed}", "exec"), known)
    step, args = known["step"], (made[0],) if case.root == "an argument" else ()
    x, sharded = torch.ones(2, 3), fzero.simulate(step, fzero.VirtualMesh(fsdp=2))
    for value in (None, 5.0, 7.0):
        if value is not None:  # the same holder, with another value in it
            inner = _make(case._replace(holders=case.holders[case.at + 1 :]), value)[0]
            HOLDERS[case.holders[case.at]].put(made[case.at], inner)
        expected = step(x, *args)
        try:
            found = sharded(x, *args)
        except FzeroError as error:
            return seed, "refused", str(error)
        except Exception as error:
            return seed, "raw", f"{type(error).__name__}: {error}"
        if not torch.equal(found, expected):
            return seed, "wrong", f"{found.unique().tolist()}, and plain torch {expected.unique().tolist()}"
    return seed, "equal", ""


def _make(case: Case, value: Any) -> list[Any]:
    """The objects from the root inwards, and the value behind them."""
    found = [value]
    for each in reversed(case.holders):
        found.insert(0, HOLDERS[each].make(found[0]))
    return found
