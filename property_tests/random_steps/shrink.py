"""Shrinking: a small step that still has the same outcome, found by dropping one thing after the other."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from property_tests.random_steps.judge import Verdict, judge
from property_tests.random_steps.program import Program

Change = Callable[[Program], Program]
SIMPLEST = {"h": ("x",), "u": ('p["w"]', 'p["b"]')}
"""First letter of a variable -> what may be read instead."""


def shrink(
    program: Program, verdict: Verdict, judge: Callable[[Program], Verdict] = judge, budget: int = 150
) -> tuple[Program, Verdict]:
    """A smaller program with its verdict, after at most `budget` trials. A program whose error reads otherwise is
    another failure, except that all wrong values count as one."""
    is_smaller = True
    while is_smaller and budget > 0:
        is_smaller = False
        for change in _changes(program):
            smaller = change(program)
            if smaller == program or budget <= 0:
                continue
            budget -= 1
            found = judge(smaller)
            if found.outcome == verdict.outcome and (found.outcome == "wrong" or found.reason == verdict.reason):
                program, verdict, is_smaller = smaller, found, True
    return program, verdict


def _changes(program: Program) -> Iterator[Change]:
    """Ways to take something out of a program, the largest first. A change that no longer fits changes nothing."""
    yield _set(loss=(), own={}, rowwise={}, terms=("x.mean()",))
    yield _set(metrics=())
    yield _set(update=("new = dict(p)",))
    yield _set(own={}, rowwise={})
    yield _set(between="", held="")
    yield lambda now: replace(now, rows=now.rows[:1], contexts=now.contexts[:1])
    yield lambda now: replace(now, rows=now.rows[:2], contexts=now.contexts[:2])
    yield lambda now: replace(now, contexts=("",) * len(now.rows))
    for name in ("metrics", "update", "terms", "loss"):
        for statement in reversed(getattr(program, name)):
            yield _drop(name, statement)
    for name in ("rowwise", "own"):
        for key in getattr(program, name):
            yield lambda now, name=name, key=key: replace(
                now, **{name: {k: v for k, v in getattr(now, name).items() if k != key}}
            )
    for statement in program.loss:
        match = re.match(r"([hu]\d+) = ", statement)
        for other in SIMPLEST[match[1][0]] if match else ():
            yield _substitute(match[1], other)
            yield _drop("loss", statement)
    yield _drop_leaves
    yield lambda now: replace(now, layers=min(now.layers, 1))
    for changed in (
        {"on_host": "", "on_disk": ""},
        {"chunk": None},
        {"memory": None},
        {"is_dynamic": False},
        {"layers": 0},
        {"dtype": "float64"},
        {"gradients": "fzero"},
    ):
        yield _set(**changed)
    for leaf in program.shapes:
        yield _widen(leaf)
    yield lambda now: replace(now, rows=(1,) * len(now.rows))
    for changed in ({"mesh": (("fsdp", 2),)}, {"donate": False}, {"stage": 3}):
        yield _set(**changed)


def _set(**fields: Any) -> Change:
    return lambda now: replace(now, **fields)


def _drop(name: str, statement: str) -> Change:
    """Drop a statement; the update keeps one that makes new parameters."""

    def change(now: Program) -> Program:
        rest = tuple(other for other in getattr(now, name) if other != statement)
        if name == "update" and not any("new = " in other for other in rest):
            rest = ("new = dict(p)", *rest)
        return replace(now, **{name: rest or (("x.mean()",) if name == "terms" else ())})

    return change


def _substitute(name: str, other: str) -> Change:
    """Read `other` instead of the variable `name`."""

    def swap(text: str) -> str:
        return text if text.startswith(f"{name} = ") else re.sub(rf"\b{name}\b", other, text)

    def change(now: Program) -> Program:
        return replace(
            now,
            loss=tuple(map(swap, now.loss)),
            terms=tuple(map(swap, now.terms)),
            rowwise={key: swap(text) for key, text in now.rowwise.items()},
            own={key: swap(text) for key, text in now.own.items()},
        )

    return change


def _widen(leaf: str) -> Change:
    """Make a leaf float64."""

    def change(now: Program) -> Program:
        if leaf not in now.shapes:
            return now
        shape, _, deviation = now.shapes[leaf]
        return replace(now, shapes={**now.shapes, leaf: (shape, "float64", deviation)})

    return change


def _drop_leaves(now: Program) -> Program:
    """Drop the leaves that nothing names."""
    used = {name: of for name, of in now.shapes.items() if f'p["{name}"]' in now.text or f'new["{name}"]' in now.text}
    return replace(now, shapes=used or {"b": now.shapes.get("b", ((now.width,), "float64", 0.5))})
