"""Ranks in different public calls, or with different results of one step: every rank is told, and all go on.

`python tests/ranks/pairs.py 2` tries all pairs of calls.
"""

from __future__ import annotations

import pytest
from pairs import CALLS, ENGINE, EXCHANGES, Case, list_sample, run_all


def list_failures(world: int, cases: list[Case]) -> list[str]:
    """The cases that not every rank was told about by name, with what ranks saw."""
    outcomes = run_all(world, cases)
    assert list(outcomes) == cases
    return [
        f"{outcome}: {mine} | {theirs}: {[each[:3] for each in row]}"
        for (mine, theirs), (outcome, row) in outcomes.items()
        if outcome != "named"
    ]


def test_the_sample_has_each_call_twice() -> None:
    named = [name for case in list_sample() for name in case]
    assert {named.count(name) for name in CALLS | ENGINE} == {2}


@pytest.mark.parametrize("world", [2, 3])
def test_every_rank_is_told_of_other_results_and_of_other_calls(world: int) -> None:
    exchanges = list(EXCHANGES)[:: world - 1]
    assert list_failures(world, [*((name, name) for name in exchanges), *list_sample(2 * world - 3)]) == []
