"""Laws of the passes: each pass preserves a program's results, in the order of `shard`, in any order, and alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from hypothesis import given
from hypothesis import strategies as st

from fzero import passes
from fzero.program.program import Program
from fzero.testing.steps import TrainStep
from fzero.testing.strategies import train_steps
from property_tests.laws import everything, slow
from property_tests.running import as_written, assert_equal

REORDER = ("accumulate", "fuse")
"""Passes that keep results up to rounding: sums are taken in another order, or by a kernel that rounds elsewhere."""

Pass = Callable[[Program], Program]


def name_of(rewrite: Pass) -> str:
    return getattr(rewrite, "func", rewrite).__name__


@given(train_steps())
@everything
@slow
def test_each_pass_preserves_meaning(step: TrainStep) -> None:
    running = as_written(step)
    program, outputs = running.program, running.outputs()
    for rewrite in passes.defaults(stage=step.stage, in_place=step.donate):
        given, text = program, str(program.graph)
        program = rewrite(given)
        assert str(given.graph) == text, "a pass leaves the program that it is given as it was"
        program.graph.lint()
        before, outputs = outputs, running.outputs(program)
        assert_equal(outputs, before, step.tolerance if name_of(rewrite) in REORDER else None)
        if rewrite is passes.relieve:  # which raises no peak and moves no collective
            assert program.memory().peak <= given.memory().peak
            assert program.comm() == given.comm()


ALONE: list[Pass] = [
    passes.rematerialize,
    passes.accumulate,
    passes.coalesce,
    passes.fuse,
    passes.relieve,
    passes.split,
    passes.donate,
    passes.bucket,
]
AFTER_BUCKET: list[Pass] = [
    *ALONE[:-1],
    passes.prefetch,
    partial(passes.prefetch, memory=0),
    *(partial(passes.release, stage=stage) for stage in (1, 2, 3)),
]


@given(train_steps(), st.lists(st.sampled_from(AFTER_BUCKET), max_size=4))
@slow
def test_passes_preserve_meaning_in_any_order(step: TrainStep, order: list[Pass]) -> None:
    """Donation comes last: no other pass rewrites a program with donated arguments."""
    order = [rewrite for rewrite in order if rewrite is not passes.donate] + [passes.donate] * (passes.donate in order)
    running = as_written(step)
    program = running.program
    for rewrite in (passes.bucket, *order):
        program = rewrite(program)
    program.graph.lint()
    is_exact = not {name_of(rewrite) for rewrite in order} & set(REORDER)
    assert_equal(running.outputs(program), running.outputs(), None if is_exact else step.tolerance)


@given(train_steps())
@slow
def test_each_pass_preserves_meaning_alone(step: TrainStep) -> None:
    running = as_written(step)
    outputs = running.outputs()
    for rewrite in ALONE:
        tolerance = step.tolerance if name_of(rewrite) in REORDER else None
        assert_equal(running.outputs(rewrite(running.program)), outputs, tolerance)
