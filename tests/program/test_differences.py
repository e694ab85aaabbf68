"""Two programs are compared by what they say, and not by the order in which a set tells its items."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from typing import Any

import torch
from torch import Tensor

import fzero
from fzero.program.open import find_difference
from fzero.program.program import Program
from fzero.program.records import find_loops

MESH = fzero.VirtualMesh(fsdp=2)


def find_sets() -> tuple[frozenset[str], frozenset[str]]:
    """Equal sets of axes whose texts differ, which depends on the hashes of this process."""
    pairs = (map(frozenset, (each, reversed(each))) for each in permutations([f"axis{i}" for i in range(32)], 2))
    return next((a, b) for a, b in pairs if repr(a) != repr(b))


def trace_loop() -> Program:
    def step(w: Any, x: Tensor) -> Any:
        return fzero.accumulate(lambda w, x: ((x * w).sum(), torch.tensor(len(x))), 2)(w, x)

    return fzero.simulate(step, MESH).trace(fzero.partition(torch.randn(4), MESH), torch.randn(8, 4))


def set_kind(program: Program, kind: Any) -> Program:
    """A copy of a program, with a kind for the results of it and of its loop's body."""
    made = program.copy()
    for node, body in find_loops(made.graph).items():
        results = tuple(replace(x, kind=kind) for x in body.results)
        node.args = (replace(body, results=results), *node.args[1:])
    return replace(made, results=tuple(replace(x, kind=kind) for x in made.results))


def test_sets_that_tell_their_items_in_another_order() -> None:
    a, b = find_sets()
    program = trace_loop()
    assert find_difference(set_kind(program, a), set_kind(program, b)) is None


def test_another_kind_is_a_difference() -> None:
    program = trace_loop()
    kinds = [frozenset({"fsdp"}), frozenset({"fsdp", "tp"})]
    assert find_difference(*(set_kind(program, kind) for kind in kinds)) == "results"
    inside = [replace(set_kind(program, kind), results=program.results) for kind in kinds]
    found = find_difference(*inside)
    assert found is not None and "loop" in found


def test_a_constant_that_does_not_equal_itself_is_no_difference() -> None:
    program = trace_loop()
    results = [tuple(replace(x, constant=float("nan")) for x in program.results) for _ in range(2)]
    assert find_difference(*(replace(program, results=each) for each in results)) is None
