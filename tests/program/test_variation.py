"""Variation: the plain arguments that a value's variation between ranks comes from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from programs import MESH, Case, layers, loss

import fzero
from fzero import tree
from fzero.program.variation import find_sources, is_in_place_of_state

HELD = fzero.partition(layers(1), MESH)
PLAIN = {"m": {"layers": [{"b": torch.zeros(10)}]}, "count": torch.zeros(())}
X = torch.ones(4, 5)


def write(p: Any, state: Any, x: Any) -> Any:
    total = torch.zeros(5)
    total[:2].add_(x.sum())
    return total * 2


STEPS: dict[str, tuple[Callable[..., Any], list[str]]] = {
    "a batch": (lambda p, state, x: x * 2, ["2"]),
    "a state": (lambda p, state, x: p["layers"][0]["b"] * 2, []),
    "a gathered leaf and a batch": (lambda p, state, x: x @ p["layers"][0]["w"], ["2"]),
    "two": (lambda p, state, x: x.sum() * state["count"], ["1.count", "2"]),
    "a mean over ranks": (lambda p, state, x: fzero.pmean(x, "fsdp") + state["count"], ["1.count"]),
    "a gradient": (lambda p, state, x: fzero.grad(loss)(p, x)["layers"][0]["b"], []),
    "what was written through a view": (write, ["2"]),
}


@pytest.mark.parametrize("name", STEPS)
def test_sources_of_a_result(name: str) -> None:
    step, expected = STEPS[name]
    program = Case(step, MESH, (HELD, PLAIN, X)).trace_as_written()
    (result,) = program.output.args[0]
    assert [argument.path for argument in find_sources(program, result)] == expected


def test_what_is_in_the_place_of_state() -> None:
    state = {"mu": tree.map(torch.zeros_like, layers(1)), "scale": torch.ones(3)}
    held = fzero.partition(layers(1), fzero.VirtualMesh(fsdp=1))
    program = fzero.simulate(lambda *args: args[3], 1, passes=()).trace(held, state, torch.zeros(()), X)
    plain = [argument for argument in program.arguments if argument.bucket is None]
    found = {argument.path for argument in plain if is_in_place_of_state(program, argument)}
    assert found == {"1.mu.layers.0.b", "1.mu.layers.0.w", "1.scale", "2"}
