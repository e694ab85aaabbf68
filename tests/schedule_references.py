"""References of schedules: torch.optim.lr_scheduler where torch has the schedule, else optax's, DeepSpeed's or the
paper's formula in Python numbers.

`tests/optim/` holds `fzero.optim` to them. `benchmarks/parity.py` prints how far values are apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch.optim import lr_scheduler

from fzero import optim
from fzero.optim import deepspeed

Formula = Callable[[int], float]
"""The number of steps so far -> the value."""


class Case(NamedTuple):
    """A schedule, the reference of it for so many steps, and the reference in words."""

    schedule: optim.base.Schedule
    values: Callable[[int], list[float]]
    source: str


# formulas of optax and of papers


def share(count: int, begin: int, steps: int) -> float:
    return min(max(count - begin, 0), steps) / steps


def inverse_sqrt(value: float, timescale: int) -> Formula:
    return lambda count: value * (timescale / (timescale + count)) ** 0.5


def warmup_inverse_sqrt(peak: float, steps: int) -> Formula:
    """Of Vaswani et al."""
    return lambda count: peak * min(count / steps, (steps / count) ** 0.5 if count else math.inf)


TAILS: dict[str, Callable[[float], float]] = {
    "linear": lambda done: 1 - done,
    "sqrt": lambda done: 1 - math.sqrt(done),
    "cosine": lambda done: 0.5 * (1 + math.cos(math.pi * done)),
}


def warmup_stable_decay(
    init: float, peak: float, warmup: int, stable: int, decay: int, end: float, tail: str
) -> Formula:
    def value(count: int) -> float:
        if count < warmup:
            return init + (peak - init) * count / warmup
        return end + (peak - end) * TAILS[tail](share(count, warmup + stable, decay))

    return value


WEIGHTS: dict[str, Callable[[float], float]] = {
    "linear": lambda done: done,
    "cosine": lambda done: 0.5 - 0.5 * math.cos(math.pi * done),
}


def piecewise_interpolation(kind: str, init: float, points: Mapping[int, float]) -> Formula:
    def value_at(boundary: int) -> float:
        return init * math.prod(scale for at, scale in points.items() if at <= boundary)

    def value(count: int) -> float:
        later = [at for at in points if at > count]
        if not later:
            return value_at(count)
        begin, end = max([0, *(at for at in points if at <= count)]), min(later)
        return value_at(begin) + (value_at(end) - value_at(begin)) * WEIGHTS[kind]((count - begin) / (end - begin))

    return value


# DeepSpeed's: the constructor's value in the first step, then the value of index 0, 1, 2 and so on


def from_index(constructed: float, at_index: Callable[[int], float]) -> Formula:
    return lambda count: at_index(count - 1) if count else constructed


def warm_up(i: int, steps: int, kind: str) -> float:
    return math.log(i + 1) / math.log(steps) if kind == "log" else i / steps


def deepspeed_warmup_lr(low: float, high: float, steps: int, kind: str) -> Formula:
    n = max(2, steps)
    return from_index(low, lambda i: low + (high - low) * (warm_up(i, n, kind) if i < n else 1.0))


def deepspeed_warmup_decay_lr(total: int, low: float, high: float, steps: int, kind: str) -> Formula:
    n = max(2, steps)

    def gamma(i: int) -> float:
        return warm_up(i, n, kind) if i < n else max(0.0, (total - i) / max(1.0, total - n))

    return from_index(low, lambda i: low + (high - low) * gamma(i))


def deepspeed_warmup_cosine_lr(rate: float, total: int, least: float, steps: int, kind: str) -> Formula:
    n = max(2, steps)

    def ratio(i: int) -> float:
        if i < n:
            return least + (1 - least) * warm_up(i, n, kind)
        done = min(1.0, (i - n + 1) / max(1, total - n))
        return 1e-4 + (1 - 1e-4) * (1 + math.cos(math.pi * done)) / 2

    return from_index(0.0, lambda i: rate * ratio(i))


def deepspeed_lr_range_test(low: float, size: int, rate: float, staircase: bool) -> Formula:
    interval: Callable[[float], float] = math.floor if staircase else float
    return from_index(low, lambda i: low * (1 + rate * interval((i + 1) / size)))


class OneCycle(NamedTuple):
    learning_rate: Formula
    b1: Formula


def deepspeed_one_cycle(
    low: float, high: float, rates: tuple[float, float], momenta: tuple[float, float], sizes: tuple[int, int],
    stairs: tuple[int, int], decay: int,
) -> OneCycle:  # fmt: skip
    """`rates` are those by which rate and momentum decay, `sizes` the steps up and down."""
    (first, behind), total = sizes, sum(sizes)

    def climb(i: int) -> float:
        at = (i + 1) % total
        done, steps, count = (at, first, stairs[0]) if at <= first else (total - at, behind, stairs[1])
        return math.floor(done * count / steps) / count if count else done / steps

    def grow(i: int, rate: float) -> float:
        return 1 + rate * (i - total + 1) / decay if decay else 1.0

    (fall, rise), (least, most) = rates, momenta
    return OneCycle(
        from_index(low, lambda i: low + (high - low) * climb(i) if i < total else low / grow(i, fall)),
        from_index(least, lambda i: most - (most - least) * climb(i) if i < total else most * grow(i, rise)),
    )


# the table


def of_torch(schedule: optim.base.Schedule, rate: float, make: Callable[[Any], Any], source: str) -> Case:
    """The case whose reference is a scheduler of torch, made for an optimizer of this rate."""

    def values(steps: int) -> list[float]:
        optimizer = torch.optim.SGD([torch.zeros(1)], lr=rate)
        scheduler, found = make(optimizer), []
        for step in range(steps):
            found.append(float(optimizer.param_groups[0]["lr"]))
            if step < steps - 1:
                optimizer.step()
                scheduler.step()
        return found

    return Case(schedule, values, source)


def by_hand(schedule: optim.base.Schedule, formula: Formula, source: str) -> Case:
    return Case(schedule, lambda steps: [formula(count) for count in range(steps)], f"{source}, by hand")


STEPS = 101
"""Of each schedule; OneCycleLR of torch ends there."""
CYCLE = deepspeed.one_cycle(0.01, 0.1, 0.5, 20, 30, decay_step_size=7, cycle_min_mom=0.7, decay_mom_rate=0.1)
CYCLE_REFERENCE = deepspeed_one_cycle(0.01, 0.1, (0.5, 0.1), (0.7, 0.9), (20, 30), (0, 0), 7)
POINTS = {20: 3.0, 50: 0.25, 90: 1.5}
RESTART = {"init_value": 0.5, "peak_value": 0.5, "warmup_steps": 0, "end_value": 0.05}


def warm(optimizer: Any) -> Any:
    """From a fifth of the rate, in 20 steps."""
    return lr_scheduler.LinearLR(optimizer, 0.2, 1.0, 20)


def constant(optimizer: Any) -> Any:
    return lr_scheduler.ConstantLR(optimizer, 1.0)


def sequence(optimizer: Any, *parts: Any, at: list[int]) -> Any:
    return lr_scheduler.SequentialLR(optimizer, list(parts), at)


CASES = {
    "constant_schedule": of_torch(optim.constant_schedule(0.5), 0.5, constant, "ConstantLR"),
    "linear_schedule": of_torch(optim.linear_schedule(0.1, 0.5, 20), 0.5, warm, "LinearLR"),
    "polynomial_schedule": of_torch(
        optim.polynomial_schedule(0.5, 0.0, 2.0, 150), 0.5,
        lambda optimizer: lr_scheduler.PolynomialLR(optimizer, 150, 2.0), "PolynomialLR",
    ),
    "cosine_decay_schedule": of_torch(
        optim.cosine_decay_schedule(0.5, 100, 0.1), 0.5,
        lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 100, 0.05), "CosineAnnealingLR",
    ),
    "exponential_decay": of_torch(
        optim.exponential_decay(0.5, 1, 0.95), 0.5,
        lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.95), "ExponentialLR",
    ),
    "exponential_decay, staircase": of_torch(
        optim.exponential_decay(0.5, 30, 0.1, staircase=True), 0.5,
        lambda optimizer: lr_scheduler.StepLR(optimizer, 30, 0.1), "StepLR",
    ),
    "piecewise_constant_schedule": of_torch(
        optim.piecewise_constant_schedule(0.5, {30: 0.1, 80: 0.1}), 0.5,
        lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [30, 80], 0.1), "MultiStepLR",
    ),
    "linear_onecycle_schedule": of_torch(
        optim.linear_onecycle_schedule(100, 0.5, 0.3, 0.6), 0.5,
        lambda optimizer: lr_scheduler.OneCycleLR(
            optimizer, 0.5, 101, pct_start=31 / 101, anneal_strategy="linear", three_phase=True, cycle_momentum=False
        ),
        "OneCycleLR, linear, three phases",
    ),
    "cosine_onecycle_schedule": of_torch(
        optim.cosine_onecycle_schedule(100, 0.5, 0.25, 10.0, 100.0), 0.5,
        lambda optimizer: lr_scheduler.OneCycleLR(
            optimizer, 0.5, 101, pct_start=26 / 101, div_factor=10.0, final_div_factor=100.0, cycle_momentum=False
        ),
        "OneCycleLR",
    ),
    "sgdr_schedule": of_torch(
        optim.sgdr_schedule([RESTART | {"decay_steps": steps} for steps in (20, 40, 80)]), 0.5,
        lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 20, 2, 0.05),
        "CosineAnnealingWarmRestarts",
    ),
    "join_schedules": of_torch(
        optim.join_schedules([optim.constant_schedule(0.5), optim.cosine_decay_schedule(0.5, 60, 0.2)], [40]), 0.5,
        lambda optimizer: sequence(
            optimizer, constant(optimizer), lr_scheduler.CosineAnnealingLR(optimizer, 60, 0.1), at=[40]
        ),
        "SequentialLR of ConstantLR and CosineAnnealingLR",
    ),
    "warmup_constant_schedule": of_torch(optim.warmup_constant_schedule(0.1, 0.5, 20), 0.5, warm, "LinearLR"),
    "warmup_cosine_decay_schedule": of_torch(
        optim.warmup_cosine_decay_schedule(0.1, 0.5, 20, 100, 0.05), 0.5,
        lambda optimizer: sequence(
            optimizer, warm(optimizer), lr_scheduler.CosineAnnealingLR(optimizer, 80, 0.05), at=[20]
        ),
        "SequentialLR of LinearLR and CosineAnnealingLR",
    ),
    "warmup_exponential_decay_schedule": of_torch(
        optim.warmup_exponential_decay_schedule(0.1, 0.5, 20, 1, 0.98), 0.5,
        lambda optimizer: sequence(optimizer, warm(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.98), at=[20]),
        "SequentialLR of LinearLR and ExponentialLR",
    ),
    "warmup_stable_decay_schedule": of_torch(
        optim.warmup_stable_decay_schedule(0.1, 0.5, 20, 40, 40, 0.05), 0.5,
        lambda optimizer: sequence(
            optimizer, warm(optimizer), constant(optimizer), lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 40), at=[20, 60]
        ),
        "SequentialLR of LinearLR, ConstantLR and LinearLR",
    ),
    "warmup_stable_decay_schedule, sqrt": by_hand(
        optim.warmup_stable_decay_schedule(0.1, 0.5, 20, 40, 40, 0.05, "sqrt"),
        warmup_stable_decay(0.1, 0.5, 20, 40, 40, 0.05, "sqrt"), "torchtitan",
    ),
    "sqrt_decay_schedule": by_hand(
        optim.sqrt_decay_schedule(0.5, 0.05, 100), warmup_stable_decay(0.0, 0.5, 0, 0, 100, 0.05, "sqrt"), "torchtitan"
    ),
    "inverse_sqrt_schedule": by_hand(optim.inverse_sqrt_schedule(0.5, 7), inverse_sqrt(0.5, 7), "Vaswani et al."),
    "warmup_inverse_sqrt_schedule": by_hand(
        optim.warmup_inverse_sqrt_schedule(0.0, 0.5, 30), warmup_inverse_sqrt(0.5, 30), "Vaswani et al."
    ),
    "piecewise_interpolate_schedule": by_hand(
        optim.piecewise_interpolate_schedule("cosine", 0.5, POINTS),
        piecewise_interpolation("cosine", 0.5, POINTS), "optax",
    ),
    "deepspeed.warmup_lr": by_hand(
        deepspeed.warmup_lr(0.01, 0.1, 40), deepspeed_warmup_lr(0.01, 0.1, 40, "log"), "DeepSpeed"
    ),
    "deepspeed.warmup_decay_lr": by_hand(
        deepspeed.warmup_decay_lr(150, 0.01, 0.1, 40), deepspeed_warmup_decay_lr(150, 0.01, 0.1, 40, "log"), "DeepSpeed"
    ),
    "deepspeed.warmup_cosine_lr": by_hand(
        deepspeed.warmup_cosine_lr(0.1, 90, 0.2, 40), deepspeed_warmup_cosine_lr(0.1, 90, 0.2, 40, "log"), "DeepSpeed"
    ),
    "deepspeed.lr_range_test": by_hand(
        deepspeed.lr_range_test(0.001, 7, 0.5), deepspeed_lr_range_test(0.001, 7, 0.5, False), "DeepSpeed"
    ),
    "deepspeed.one_cycle": by_hand(CYCLE.learning_rate, CYCLE_REFERENCE.learning_rate, "DeepSpeed"),
    "deepspeed.one_cycle, b1": by_hand(CYCLE.b1, CYCLE_REFERENCE.b1, "DeepSpeed"),
}  # fmt: skip
"""Name -> case. A name begins with that of a function of `fzero.optim`."""
