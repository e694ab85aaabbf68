"""The law of programs in a folder: what comes from a file is the program that was traced, and where a step has no file,
the logger says why. Steps that have to have one are in `tests/cache`."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from programs import Case

import fzero
from fzero import tree
from fzero.passes import defaults
from fzero.program.open import find_difference
from fzero.program.program import Program
from fzero.rank_pipeline import RankPipeline
from fzero.ranks.virtual import virtual
from fzero.testing.steps import TrainStep
from fzero.testing.strategies import train_steps
from property_tests.laws import everything, slow
from property_tests.random_axes.judge import draw_case, run_on_ranks
from property_tests.running import assert_equal


class Counting(RankPipeline[Program]):
    traces = 0

    def program(self, args: tuple[Any, ...]) -> Program:
        self.traces += 1
        return super().program(args)


@contextmanager
def messages() -> Iterator[list[str]]:
    """What the logger "fzero" says in a block, at level info."""
    said, log = list[str](), logging.getLogger("fzero")
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield said
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


@given(train_steps())
@slow
@everything
def test_a_random_step_from_a_file_is_the_one_that_was_traced(step: TrainStep) -> None:
    args = (*step.partition(), *step.batch())
    leaves, treedef = tree.flatten(args)
    rows = fzero.simulate(step, step.mesh)._select_rank(0, treedef, leaves)
    passes = defaults(stage=step.stage, in_place=step.donate)
    with tempfile.TemporaryDirectory() as folder, messages() as said:
        first, second = (
            Counting(step, virtual(step.mesh), passes, lambda on, program: program, cache=folder) for _ in range(2)
        )
        traced, restored = first.prepare(rows, treedef), second.prepare(rows, treedef)
    assert first.traces == 1 and (second.traces == 0 or any("is traced" in message for message in said))
    assert find_difference(restored, traced) is None
    assert restored.lines() == traced.lines() and str(restored) == str(traced)
    case = Case(step, step.mesh, args)
    assert_equal(case.run(restored), case.run(traced), None)


@pytest.mark.parametrize("seed", [0, 6, 8, 12, 14, 20, 159])
def test_a_random_model_on_axes_from_files_is_the_one_that_was_traced(seed: int, tmp_path: Path) -> None:
    made: list[Counting] = []

    def simulate(fn: Any, mesh: Any, **how: Any) -> Any:
        simulated = fzero.simulate(fn, mesh, **how)
        plain = simulated._pipeline
        given = fn, virtual(mesh), plain.passes, plain.finish
        made.append(Counting(*given, cache=tmp_path, model_axes=plain._model_axes))
        simulated._pipeline = made[-1]
        return simulated

    case = draw_case(seed)
    traced, restored = run_on_ranks(case, simulate), run_on_ranks(case, simulate)
    assert [x.traces for x in made] == [1, 0]
    torch.testing.assert_close(restored, traced, rtol=0, atol=0)
