"""Random lists of layers train as plain torch trains them; `make layers` runs hundreds."""

from __future__ import annotations

from property_tests.random_layers.judge import judge
from property_tests.seeds import BAD

SEEDS = range(12)


def test_random_layers_are_those_of_plain_torch_or_refused() -> None:
    found = [judge(seed) for seed in SEEDS]
    assert [each for each in found if each[1] in BAD] == []
    assert sum(verdict in ("equal", "copied") for _, verdict, _ in found) > len(SEEDS) // 2
    assert sum(verdict == "copied" for _, verdict, _ in found) > len(SEEDS) // 6
