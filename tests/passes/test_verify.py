"""The verify pass refuses each mistake of the catalogue, and on virtual ranks each is seen to be one."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from mistakes import IMPURE, IN_A_PASS, UNSEEN, Good, Mistake
from programs import Outputs, layers, on_rows
from torch import Tensor

from fzero.base.errors import FzeroError
from fzero.execution import lockstep
from fzero.passes import verify
from fzero.program.program import Program

SHOWN = {name: mistake for name, mistake in IN_A_PASS.items() if mistake.shows}
BASES = {str(mistake.base): mistake.base for mistake in IN_A_PASS.values()}


class Outcome(NamedTuple):
    """What a program returns, and the arguments that it must not change, rank by rank."""

    results: Outputs
    kept: Outputs


def outcome(good: Good, program: Program) -> Outcome:
    """Of a program of the good step."""
    given = good.case.arguments()
    results = lockstep.run(program, given)
    return Outcome(results, [[x for x, arg in zip(row, program.arguments) if not arg.donated] for row in given])


def same(a: Outcome, b: Outcome) -> bool:
    """Bit for bit."""
    return all(map(same_tensors, [*a.results, *a.kept], [*b.results, *b.kept]))


def same_tensors(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return len(ours) == len(theirs) and all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(ours, theirs))


@pytest.mark.parametrize("mistake", IN_A_PASS.values(), ids=IN_A_PASS)
def test_a_mistake_of_a_pass_is_refused_with_its_message(mistake: Mistake) -> None:
    with pytest.raises(FzeroError) as error:
        verify(mistake.seeded(), stage=3)
    assert re.search(mistake.message, str(error.value)), error.value


@pytest.mark.parametrize("mistake", SHOWN.values(), ids=SHOWN)
def test_it_is_a_mistake_for_ranks_crash_or_compute_something_else(mistake: Mistake) -> None:
    good = mistake.base()
    expected = outcome(good, good.program)
    try:
        got = outcome(good, mistake.seeded())
    except Exception:
        return
    assert not same(got, expected)


@pytest.mark.parametrize("base", BASES.values())
def test_the_good_programs_are_accepted(base: Callable[[], Good]) -> None:
    _, program, stage = base()
    assert verify(program, stage=stage) is program


@pytest.mark.parametrize("mistake", UNSEEN.values(), ids=UNSEEN)
def test_what_is_wrong_on_every_rank_alike_is_not_seen(mistake: Mistake) -> None:
    good, seeded = mistake.base(), mistake.seeded()
    verify(seeded, stage=3)
    assert not same(outcome(good, seeded), outcome(good, good.program))


@pytest.mark.parametrize(("step", "where"), IMPURE.values(), ids=IMPURE)
def test_a_step_that_writes_into_what_is_not_its_own_is_refused(step: Callable[..., Any], where: str) -> None:
    with pytest.raises(FzeroError, match="writes into it, but a step is a pure function") as error:
        on_rows(step, layers(1)).trace()
    assert error.value.where == where
