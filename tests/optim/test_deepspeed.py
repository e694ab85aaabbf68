"""DeepSpeed's schedules at every step, against what DeepSpeed's optimizer runs at: the constructor's value in its first
step, then the value of index 0, 1, 2 and so on. The formulas are written out in Python numbers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from programs import layers, rows, training

import fzero
from fzero import FzeroError, VirtualMesh, optim
from fzero.optim import deepspeed

STEPS = range(100)
ROUNDING = {"rel": 1.2e-7, "abs": 0}  # a schedule rounds once, to float32


def check(schedule: Any, constructed: float, at_index: Callable[[int], float]) -> None:
    got = [schedule(torch.tensor(count, dtype=torch.int32)).item() for count in STEPS]
    assert got == pytest.approx([constructed, *(at_index(i) for i in STEPS[:-1])], **ROUNDING)


def warm_up(i: int, steps: int, kind: str) -> float:
    return math.log(i + 1) / math.log(steps) if kind == "log" else i / steps


WARMUPS = [*itertools.product((1, 2, 3, 10, 50), ("log", "linear"))]


@pytest.mark.parametrize(("steps", "kind"), WARMUPS)
def test_warmup_lr(steps: int, kind: Any) -> None:
    n = max(2, steps)
    schedule = deepspeed.warmup_lr(0.01, 0.1, steps, kind)
    check(schedule, 0.01, lambda i: 0.01 + 0.09 * (warm_up(i, n, kind) if i < n else 1.0))


@pytest.mark.parametrize("total", [1, 5, 60])
@pytest.mark.parametrize(("steps", "kind"), WARMUPS)
def test_warmup_decay_lr(steps: int, kind: Any, total: int) -> None:
    n = max(2, steps)

    def gamma(i: int) -> float:
        return warm_up(i, n, kind) if i < n else max(0.0, (total - i) / max(1.0, total - n))

    check(deepspeed.warmup_decay_lr(total, 0.01, 0.1, steps, kind), 0.01, lambda i: 0.01 + (0.1 - 0.01) * gamma(i))


@pytest.mark.parametrize("total", [1, 5, 60])
@pytest.mark.parametrize(("steps", "kind"), WARMUPS)
def test_warmup_cosine_lr_begins_at_zero_and_ends_at_its_floor(steps: int, kind: Any, total: int) -> None:
    n = max(2, steps)

    def ratio(i: int) -> float:
        if i < n:
            return 0.2 + 0.8 * warm_up(i, n, kind)
        done = min(1.0, (i - n + 1) / max(1, total - n))
        return 1e-4 + (1 - 1e-4) * (1 + math.cos(math.pi * done)) / 2

    check(deepspeed.warmup_cosine_lr(0.1, total, 0.2, steps, warmup_type=kind), 0.0, lambda i: 0.1 * ratio(i))


@pytest.mark.parametrize(("staircase", "interval"), [(False, lambda x: x), (True, math.floor)])
@pytest.mark.parametrize("size", [1, 7, 2000])
def test_lr_range_test(size: int, staircase: bool, interval: Callable[[float], float]) -> None:
    schedule = deepspeed.lr_range_test(0.001, size, 0.5, staircase)
    check(schedule, 0.001, lambda i: 0.001 * (1 + 0.5 * interval((i + 1) / size)))


CYCLES = [*itertools.product((1, 10, 29), (None, 0, 31), (0, 3), (None, 2), (0, 7))]


@pytest.mark.parametrize(("first", "second", "stairs", "more_stairs", "decay"), CYCLES)
def test_one_cycle_moves_rate_and_betas(
    first: int, second: int | None, stairs: int, more_stairs: int | None, decay: int
) -> None:
    cycle = deepspeed.one_cycle(
        0.01, 0.1, 0.5, first, second, stairs, more_stairs, decay, cycle_min_mom=0.7, decay_mom_rate=0.1
    )
    behind = first if second is None else second
    total, counts = first + behind, (stairs, stairs if more_stairs is None else more_stairs)

    def climb(i: int) -> float:
        at = (i + 1) % total
        done, steps, count = (at, first, counts[0]) if at <= first else (total - at, behind, counts[1])
        return math.floor(done * count / steps) / count if count else done / steps

    def grow(i: int, rate: float) -> float:
        return 1 + rate * (i - total + 1) / decay if decay else 1.0

    check(cycle.learning_rate, 0.01, lambda i: 0.01 + 0.09 * climb(i) if i < total else 0.01 / grow(i, 0.5))
    check(cycle.b1, 0.7, lambda i: 0.9 - (0.9 - 0.7) * climb(i) if i < total else 0.9 * grow(i, 0.1))
    check(cycle.b2, 0.99, lambda i: 0.99)


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
