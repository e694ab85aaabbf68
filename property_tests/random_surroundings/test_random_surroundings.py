"""Steps that read objects around them follow these, whatever holds a value and whatever code reads it."""

from __future__ import annotations

import pytest

from property_tests.random_surroundings.judge import describe, judge
from property_tests.seeds import BAD

SEEDS = range(200)


def test_steps_follow_their_surroundings(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("ERROR", "fzero")
    judged = [judge(seed) for seed in SEEDS]
    bad = [f"{describe(seed)}\n{verdict}: {detail}" for seed, verdict, detail in judged if verdict in BAD]
    assert not bad, "\n".join(bad[:3])
    assert sum(verdict == "equal" for _, verdict, _ in judged) > 0.9 * len(SEEDS)
