"""Schedules with optax's names at every step, against their formulas in Python numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from schedule_references import (
    TAILS,
    WEIGHTS,
    Formula,
    inverse_sqrt,
    piecewise_interpolation,
    share,
    warmup_inverse_sqrt,
    warmup_stable_decay,
)

from fzero import FzeroError, optim

STEPS = range(130)
ROUNDING = {"rel": 1.2e-7, "abs": 0}  # a schedule rounds once, to float32: half a unit is 6e-8


def check(schedule: Any, formula: Formula) -> None:
    got = [schedule(torch.tensor(count, dtype=torch.int32)) for count in STEPS]
    assert {(x.dtype, x.shape) for x in got} == {(torch.float32, ())}
    assert [x.item() for x in got] == pytest.approx([formula(count) for count in STEPS], **ROUNDING)


@pytest.mark.parametrize("power", [1, 2, 0.5, 3.3])
@pytest.mark.parametrize(("steps", "begin"), [(10, 0), (50, 7), (200, 1)])
def test_polynomial(power: float, steps: int, begin: int) -> None:
    schedule = optim.polynomial_schedule(1.5, 0.25, power, steps, begin)
    check(schedule, lambda count: 0.25 + 1.25 * (1 - share(count, begin, steps)) ** power)


def test_linear_is_polynomial_of_power_one() -> None:
    check(optim.linear_schedule(0.5, 2.0, 40, 3), lambda count: 0.5 + 1.5 * share(count, 3, 40))


@pytest.mark.parametrize("exponent", [1.0, 2.5])
def test_cosine_decay_with_an_exponent(exponent: float) -> None:
    schedule = optim.cosine_decay_schedule(2.0, 77, 0.1, exponent)
    check(schedule, lambda count: 2 * (0.9 * (0.5 + 0.5 * math.cos(math.pi * min(count / 77, 1))) ** exponent + 0.1))


@pytest.mark.parametrize("staircase", [False, True])
@pytest.mark.parametrize(("rate", "end"), [(0.9, None), (0.9, 0.5), (1.1, 1.5)])
def test_exponential_decay(rate: float, end: float | None, staircase: bool) -> None:
    bound = {None: lambda x: x, 0.5: lambda x: max(x, 0.5), 1.5: lambda x: min(x, 1.5)}[end]
    schedule = optim.exponential_decay(1.0, 10, rate, 5, staircase, end)
    round_down = math.floor if staircase else lambda x: x
    check(schedule, lambda count: bound(rate ** round_down(max(count - 5, 0) / 10)))


@pytest.mark.parametrize("schedule", [optim.exponential_decay(0.5, 10, 0.0), optim.exponential_decay(0.5, 0, 0.9)])
def test_exponential_decay_without_a_rate_or_steps_is_constant(schedule: Any) -> None:
    check(schedule, lambda count: 0.5)


def test_inverse_square_root_is_vaswanis() -> None:
    check(optim.warmup_inverse_sqrt_schedule(0.0, 0.5, 30), warmup_inverse_sqrt(0.5, 30))
    check(optim.inverse_sqrt_schedule(0.5, 7), inverse_sqrt(0.5, 7))


@pytest.mark.parametrize("decay", TAILS)
def test_warmup_stable_decay(decay: Any) -> None:
    schedule = optim.warmup_stable_decay_schedule(0.125, 1.0, 20, 50, 40, 0.25, decay)
    check(schedule, warmup_stable_decay(0.125, 1.0, 20, 50, 40, 0.25, decay))


def test_piecewise_constant() -> None:
    points = {100: 0.5, 20: 3.0, 50: 0.25}
    check(
        optim.piecewise_constant_schedule(1.5, points),
        lambda count: 1.5 * math.prod(scale for at, scale in points.items() if count >= at),
    )
    check(optim.piecewise_constant_schedule(1.5), lambda count: 1.5)


@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("points", [{10: 0.5}, {0: 2.0, 20: 3.0, 50: 0.25, 100: 1.0}, {1: 2.0, 2: 0.5}, {}])
def test_piecewise_interpolation(kind: Any, points: dict[int, float]) -> None:
    check(optim.piecewise_interpolate_schedule(kind, 1.5, points), piecewise_interpolation(kind, 1.5, points))


def test_linear_onecycle_goes_up_and_down_and_further_down() -> None:
    def formula(count: int) -> float:
        if count < 30:
            return 0.04 + 0.96 * count / 30
        if count < 85:
            return 1.0 - 0.96 * (count - 30) / 55
        return 0.04 + (0.04e-4 - 0.04) * min(count - 85, 15) / 15

    check(optim.linear_onecycle_schedule(100, 1.0), formula)


def test_cosine_onecycle_goes_up_and_down() -> None:
    def wave(low: float, high: float, done: float) -> float:
        return low + (high - low) * 0.5 * (1 - math.cos(math.pi * done))

    def formula(count: int) -> float:
        return wave(0.2, 2.0, count / 25) if count < 25 else wave(2.0, 0.002, min(count - 25, 75) / 75)

    check(optim.cosine_onecycle_schedule(100, 2.0, 0.25, 10.0, 100.0), formula)


def test_restarts_join_their_cycles() -> None:
    first = {"init_value": 0.0, "peak_value": 1.0, "warmup_steps": 5, "decay_steps": 30}
    second = {"init_value": 0.125, "peak_value": 0.5, "warmup_steps": 0, "decay_steps": 40, "end_value": 0.25}

    def formula(count: int) -> float:
        if count < 5:
            return count / 5
        if count < 30:
            return 0.5 * (1 + math.cos(math.pi * (count - 5) / 25))
        return 0.25 + 0.125 * (1 + math.cos(math.pi * min(count - 30, 40) / 40))

    check(optim.sgdr_schedule([first, second]), formula)


def test_warmups_join_their_decays() -> None:
    check(optim.warmup_constant_schedule(0.5, 1.0, 20), lambda count: min(0.5 + 0.5 * count / 20, 1.0))
    check(
        optim.warmup_exponential_decay_schedule(0.0, 1.0, 20, 10, 0.8, 5, True, 0.25),
        lambda count: count / 20 if count < 20 else max(0.8 ** (max(count - 25, 0) // 10), 0.25),
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: optim.polynomial_schedule(1.0, 0.0, 2, -1), "transition_steps is -1"),
        (lambda: optim.exponential_decay(1.0, 10, -0.5), "decay_rate is -0.5"),
        (lambda: optim.exponential_decay(1.0, 10, 0.5, -1), "transition_begin is -1"),
        (lambda: optim.inverse_sqrt_schedule(1.0, 0), "timescale is 0"),
        (lambda: optim.warmup_inverse_sqrt_schedule(0.0, 1.0, 0), "timescale is 0"),
        (lambda: optim.sqrt_decay_schedule(1.0, 0.0, 0), "decay_steps is 0"),
        (lambda: optim.piecewise_constant_schedule(1.0, {5: -1.0}), "the scale at step 5 is -1.0"),
        (lambda: optim.piecewise_constant_schedule(1.0, {-5: 1.0}), "a boundary is -5; give"),
        (lambda: optim.piecewise_interpolate_schedule("cubic", 1.0, {5: 1.0}), "interpolate_type is 'cubic'"),
        (lambda: optim.piecewise_interpolate_schedule("linear", 1.0, {5: -0.5}), "the scale at step 5 is -0.5"),
        (lambda: optim.warmup_constant_schedule(0.0, 1.0, -1), "warmup_steps is -1"),
        (lambda: optim.warmup_stable_decay_schedule(0.0, 1.0, 1, 1, 1, decay="exp"), "decay is 'exp'"),
        (lambda: optim.warmup_stable_decay_schedule(0.0, 1.0, 1, -1, 1), "stable_steps is -1"),
        (lambda: optim.warmup_stable_decay_schedule(0.0, 1.0, 1, 1, 0), "decay_steps is 0"),
        (lambda: optim.linear_onecycle_schedule(0, 1.0), "transition_steps is 0"),
        (lambda: optim.cosine_onecycle_schedule(10, 1.0, div_factor=0.0), "div_factor is 0.0"),
        (lambda: optim.sgdr_schedule([]), "has no cycle"),
    ],
)
def test_bad_points_are_named(make: Any, message: str) -> None:
    with pytest.raises(FzeroError, match=message):
        make()
