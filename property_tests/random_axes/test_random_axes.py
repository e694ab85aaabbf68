"""Random models on axes train as one device does; `make axes` runs thousands."""

from __future__ import annotations

import pytest

from property_tests.random_axes.judge import draw_case, judge

SEEDS = (0, 1, 2, 3, 5, 8, 20, 159)
"""20 sums over a split leaf under second derivatives, 159 has parts in a loop alone, and 3 computes a weight from two
leaves: wrong, raw and wrong, once."""


@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_model_is_that_of_one_device_or_refused(seed: int) -> None:
    _, verdict, detail = judge(seed)
    assert verdict in ("equal", "refused"), f"{draw_case(seed)}\n{detail}"


def test_most_random_models_are_not_refused() -> None:
    assert sum(judge(seed)[1] == "equal" for seed in SEEDS) > 4
