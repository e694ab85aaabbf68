"""DeepSpeed's schedules at every step, against what DeepSpeed's optimizer runs at: the constructor's value in its first
step, then the value of index 0, 1, 2 and so on. The formulas are those of `schedule_references`."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from programs import layers, rows, training
from schedule_references import (
    Formula,
    deepspeed_lr_range_test,
    deepspeed_one_cycle,
    deepspeed_warmup_cosine_lr,
    deepspeed_warmup_decay_lr,
    deepspeed_warmup_lr,
)

import fzero
from fzero import FzeroError, VirtualMesh, optim
from fzero.optim import deepspeed

STEPS = range(100)
ROUNDING = {"rel": 1.2e-7, "abs": 0}  # a schedule rounds once, to float32


def check(schedule: Any, formula: Formula) -> None:
    got = [schedule(torch.tensor(count, dtype=torch.int32)).item() for count in STEPS]
    assert got == pytest.approx([formula(count) for count in STEPS], **ROUNDING)


WARMUPS = [*itertools.product((1, 2, 3, 10, 50), ("log", "linear"))]


@pytest.mark.parametrize(("steps", "kind"), WARMUPS)
def test_warmup_lr(steps: int, kind: Any) -> None:
    check(deepspeed.warmup_lr(0.01, 0.1, steps, kind), deepspeed_warmup_lr(0.01, 0.1, steps, kind))


@pytest.mark.parametrize("total", [1, 5, 60])
@pytest.mark.parametrize(("steps", "kind"), WARMUPS)
def test_warmup_decay_lr(steps: int, kind: Any, total: int) -> None:
    schedule = deepspeed.warmup_decay_lr(total, 0.01, 0.1, steps, kind)
    check(schedule, deepspeed_warmup_decay_lr(total, 0.01, 0.1, steps, kind))


@pytest.mark.parametrize("total", [1, 5, 60])
@pytest.mark.parametrize(("steps", "kind"), WARMUPS)
def test_warmup_cosine_lr_begins_at_zero_and_ends_at_its_floor(steps: int, kind: Any, total: int) -> None:
    schedule = deepspeed.warmup_cosine_lr(0.1, total, 0.2, steps, warmup_type=kind)
    check(schedule, deepspeed_warmup_cosine_lr(0.1, total, 0.2, steps, kind))


@pytest.mark.parametrize("staircase", [False, True])
@pytest.mark.parametrize("size", [1, 7, 2000])
def test_lr_range_test(size: int, staircase: bool) -> None:
    schedule = deepspeed.lr_range_test(0.001, size, 0.5, staircase)
    check(schedule, deepspeed_lr_range_test(0.001, size, 0.5, staircase))


CYCLES = [*itertools.product((1, 10, 29), (None, 0, 31), (0, 3), (None, 2), (0, 7))]


@pytest.mark.parametrize(("first", "second", "stairs", "more_stairs", "decay"), CYCLES)
def test_one_cycle_moves_rate_and_betas(
    first: int, second: int | None, stairs: int, more_stairs: int | None, decay: int
) -> None:
    cycle = deepspeed.one_cycle(
        0.01, 0.1, 0.5, first, second, stairs, more_stairs, decay, cycle_min_mom=0.7, decay_mom_rate=0.1
    )
    sizes, counts = (
        (first, first if second is None else second),
        (stairs, stairs if more_stairs is None else more_stairs),
    )
    expected = deepspeed_one_cycle(0.01, 0.1, (0.5, 0.1), (0.7, 0.9), sizes, counts, decay)
    check(cycle.learning_rate, expected.learning_rate)
    check(cycle.b1, expected.b1)
    check(cycle.b2, lambda count: 0.99)


def test_one_cycle_may_leave_betas_alone() -> None:
    cycle = deepspeed.one_cycle(0.01, 0.1, cycle_first_step_size=5, cycle_momentum=False)
    assert cycle.b1 is None and cycle.b2 is None


def test_deepspeeds_defaults() -> None:
    at = torch.tensor(501)
    log = math.log(501) / math.log(1000)
    assert deepspeed.warmup_lr(warmup_max_lr=1e-3)(at).item() == pytest.approx(1e-3 * log)
    assert deepspeed.warmup_decay_lr(10_000)(at).item() == pytest.approx(1e-3 * log)
    assert deepspeed.lr_range_test()(at).item() == pytest.approx(1e-3 * (1 + 501 / 2000))
    cycle = deepspeed.one_cycle(0.0, 1.0)
    assert cycle.learning_rate(at).item() == pytest.approx(501 / 2000)
    assert cycle.b1(at).item() == pytest.approx(0.9 - 0.1 * 501 / 2000)


def test_an_overflow_does_not_advance_a_schedule() -> None:
    mesh = VirtualMesh(fsdp=2)
    optimizer = optim.apply_if_finite(optim.adamw(deepspeed.warmup_lr(0.0, 0.1, 10)), 5)
    params = fzero.partition(layers(1), mesh)
    step = fzero.simulate(training(optimizer), mesh)
    params, state, _ = step(params, optimizer.init(params), rows(mesh))
    for overflow in (float("inf"), 0.0):
        params, state, _ = step(params, state, rows(mesh) + overflow)
    assert state.inner_state[2].count.full_tensor() == 2


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: deepspeed.warmup_lr(), "warmup_lr: has no warmup_max_lr"),
        (lambda: deepspeed.warmup_lr(0.0, 0.1, 10, "cosine"), "warmup_type is 'cosine'"),
        (lambda: deepspeed.warmup_decay_lr(10, warmup_num_steps=0), "warmup_num_steps is 0"),
        (lambda: deepspeed.warmup_cosine_lr(0.1, 10, warmup_type=""), "warmup_type is ''"),
        (lambda: deepspeed.lr_range_test(lr_range_test_step_size=0), "lr_range_test_step_size is 0"),
        (lambda: deepspeed.one_cycle(0.0, 0.1, cycle_first_step_size=0), "cycle_first_step_size is 0"),
        (lambda: deepspeed.one_cycle(0.0, 0.1, cycle_second_step_size=-1), "cycle_second_step_size is -1"),
    ],
)
def test_bad_arguments_are_named(make: Any, message: str) -> None:
    with pytest.raises(FzeroError, match=message):
        make()
