"""One seed: its step, and the verdict on it."""

from __future__ import annotations

import warnings
from typing import NamedTuple

import torch

from property_tests.random_steps.draw import draw
from property_tests.random_steps.grammar import WAITING
from property_tests.random_steps.judge import Verdict, judge
from property_tests.random_steps.program import Program

ATTEMPTS = 5


class Outcome(NamedTuple):
    """A seed, its step and the verdict on it."""

    seed: int
    program: Program
    verdict: Verdict


def prepare() -> None:
    """Set up a process that runs seeds: one thread, no warnings."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")


def run(seed: int, waiting: frozenset[str] = frozenset(WAITING)) -> Outcome:
    """The outcome of a seed: of the first of its steps that plain torch accepts."""
    for attempt in range(ATTEMPTS):
        program = draw(seed, attempt, waiting)
        verdict = judge(program)
        if verdict.outcome != "invalid":
            break
    return Outcome(seed, program, verdict)
