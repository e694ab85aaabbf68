"""A function that is given to a transform stays as it is: name, attributes, code and defaults."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fzero
from fzero import VirtualMesh
from fzero.training.programs import compile_function

MESH = VirtualMesh(fsdp=2)
MAKERS: dict[str, Callable[[Any], Any]] = {
    "compile_function": lambda function: compile_function(function, MESH, title="Trainer: a step"),
    "simulate": lambda function: fzero.simulate(function, MESH),
    "grad": fzero.grad,
    "value_and_grad": fzero.value_and_grad,
    "remat": fzero.remat,
    "precision": fzero.precision(torch.float32),
}


def describe(function: Any) -> dict[str, Any]:
    names = (*functools.WRAPPER_ASSIGNMENTS, "__code__", "__defaults__", "__kwdefaults__")
    return {name: getattr(function, name) for name in names} | vars(function)


@pytest.mark.parametrize("name", MAKERS)
def test_a_given_function_stays_as_it_is(name: str) -> None:
    def square(x: Tensor, power: int = 2) -> Tensor:
        return (x**power).sum()

    square.note = "the user's"  # type: ignore[attr-defined]
    before = describe(square)
    made, params = MAKERS[name](square), torch.ones(4)
    made(fzero.partition(params, MESH) if name in ("compile_function", "simulate") else params)
    assert describe(square) == before


def test_the_programs_of_one_function_have_names_of_their_own(caplog: pytest.LogCaptureFixture) -> None:
    def square(x: Tensor, rows: Tensor) -> Tensor:
        return (x * rows).sum()

    params = fzero.partition(torch.ones(4), MESH)
    steps = [compile_function(square, MESH, title=title) for title in ("first", "second")]
    with caplog.at_level("WARNING", "fzero"):
        for step in steps:
            for rows in (2, 4):
                step(params, torch.ones(rows, 4))
    told = [record.getMessage().partition(" is traced again")[0] for record in caplog.records]
    assert told == ["first(x, rows)", "second(x, rows)"]
