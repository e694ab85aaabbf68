"""DeepSpeed's five learning rate schedules, with its numbers at every step, its names of arguments and its defaults.

DeepSpeed moves the rate behind an optimizer step. So step 0 runs at the value that the constructor sets, and a schedule
says the value of step `k` by the index `k - 1`. A step that overflows does not count there, nor does it here behind
`apply_if_finite`. Source: `deepspeed/runtime/lr_schedules.py` of DeepSpeed 0.19.

DeepSpeed takes a rate that is not among the arguments from the optimizer. A schedule here knows no optimizer, and needs
the rate as an argument.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch

from fzero.base.errors import FzeroError
from fzero.optim.base import Schedule, check_choice, check_decay, check_positive
from fzero.optim.schedules import check_arguments, constant_schedule, to_float64, to_tensor

Warmup = Literal["log", "linear"]


@check_arguments
def warmup_lr(
    warmup_min_lr: float = 0.0,
    warmup_max_lr: float | None = None,
    warmup_num_steps: int = 1000,
    warmup_type: Warmup = "log",
) -> Schedule:
    """WarmupLR: from `warmup_min_lr` to `warmup_max_lr` in `warmup_num_steps`, then constant.

    The warmup is logarithmic, `log(i + 1) / log(warmup_num_steps)` at index `i`, or linear, `i / warmup_num_steps`. It
    has at least two steps.

    Raises:
        FzeroError: without `warmup_max_lr`, for a `warmup_type` or `warmup_num_steps` that DeepSpeed does not know.
    """
    if warmup_max_lr is None:
        way_out = "DeepSpeed takes the optimizer's rate: give that as warmup_max_lr"
        raise FzeroError("warmup_lr", "has no warmup_max_lr", way_out)
    return _warm_up("warmup_lr", warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, lambda i: warmup_max_lr)


@check_arguments
def warmup_decay_lr(
    total_num_steps: int,
    warmup_min_lr: float = 0.0,
    warmup_max_lr: float = 0.001,
    warmup_num_steps: int = 1000,
    warmup_type: Warmup = "log",
) -> Schedule:
    """WarmupDecayLR: as `warmup_lr`, and behind the warmup along a line towards `warmup_min_lr`.

    The line reaches `warmup_min_lr` at index `total_num_steps`.

    Raises:
        FzeroError: as `warmup_lr`.
    """
    steps = max(1.0, total_num_steps - max(2, warmup_num_steps))

    def decay(index: Any) -> Any:
        return warmup_min_lr + (warmup_max_lr - warmup_min_lr) * ((total_num_steps - index) / steps).clamp(min=0)

    return _warm_up("warmup_decay_lr", warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, decay)


@check_arguments
def warmup_cosine_lr(
    lr: float,
    total_num_steps: int,
    warmup_min_ratio: float = 0.0,
    warmup_num_steps: int = 1000,
    cos_min_ratio: float = 0.0001,
    warmup_type: Warmup = "log",
) -> Schedule:
    """WarmupCosineLR: from `warmup_min_ratio * lr` to `lr`, then half a cosine to `cos_min_ratio * lr`.

    `lr` is the optimizer's rate. The rate of step 0 is 0, whatever `warmup_min_ratio` is. The cosine ends at index
    `total_num_steps - 1`.

    Raises:
        FzeroError: for a `warmup_type` or `warmup_num_steps` that DeepSpeed does not know.
    """
    warmup_steps = max(2, warmup_num_steps)
    steps = max(1, total_num_steps - warmup_steps)

    def decay(index: Any) -> Any:
        done = ((index - warmup_steps + 1) / steps).clamp(max=1)
        ratio = cos_min_ratio + (1 - cos_min_ratio) * (1 + torch.cos(math.pi * done)) / 2
        return lr * ratio.clamp(min=0)

    later = _warm_up("warmup_cosine_lr", warmup_min_ratio * lr, lr, warmup_num_steps, warmup_type, decay)
    return lambda count: torch.where(to_tensor(count) == 0, 0.0, later(count))


@check_arguments
def lr_range_test(
    lr_range_test_min_lr: float = 1e-3,
    lr_range_test_step_size: int = 2000,
    lr_range_test_step_rate: float = 1.0,
    lr_range_test_staircase: bool = False,
) -> Schedule:
    """LRRangeTest: `lr_range_test_min_lr * (1 + lr_range_test_step_rate * k / lr_range_test_step_size)` at step `k`.

    With `lr_range_test_staircase` the quotient is rounded down. Smith, https://arxiv.org/abs/1803.09820.

    Raises:
        FzeroError: for an `lr_range_test_step_size` below 1.
    """
    check_positive("lr_range_test", "lr_range_test_step_size", lr_range_test_step_size)

    def schedule(count: Any) -> Any:
        done = to_float64(count) / lr_range_test_step_size
        increase = 1 + lr_range_test_step_rate * (done.floor() if lr_range_test_staircase else done)
        return (lr_range_test_min_lr * increase).to(torch.float32)

    return schedule


class OneCycle(NamedTuple):
    """The schedules of DeepSpeed's OneCycle, for `inject_hyperparams`: `inject_hyperparams(adamw)(*one_cycle(...))`.

    With `cycle_momentum=False` DeepSpeed leaves the betas alone, and `b1` and `b2` are None.
    """

    learning_rate: Schedule
    b1: Schedule | None
    b2: Schedule | None


@check_arguments
def one_cycle(
    cycle_min_lr: float,
    cycle_max_lr: float,
    decay_lr_rate: float = 0.0,
    cycle_first_step_size: int = 2000,
    cycle_second_step_size: int | None = None,
    cycle_first_stair_count: int = 0,
    cycle_second_stair_count: int | None = None,
    decay_step_size: int = 0,
    cycle_momentum: bool = True,
    cycle_min_mom: float = 0.8,
    cycle_max_mom: float = 0.9,
    decay_mom_rate: float = 0.0,
) -> OneCycle:
    """OneCycle: the rate up from `cycle_min_lr` to `cycle_max_lr` and down again, while `b1` moves the other way.

    `b2` is 0.99 throughout. With a stair count the values of that half move in as many steps. Behind the cycle the rate
    is `cycle_min_lr / (1 + decay_lr_rate * n / decay_step_size)` and `b1` is
    `cycle_max_mom * (1 + decay_mom_rate * n / decay_step_size)`, `n` steps behind it; without `decay_step_size` both
    stay. At step 0 `b1` is `cycle_min_mom`, which the constructor sets. Smith, https://arxiv.org/abs/1803.09820.

    Raises:
        FzeroError: for a `cycle_first_step_size` that is not positive, for a momentum outside [0, 1), and for negative
            steps or counts.
    """
    first = cycle_first_step_size
    second = first if cycle_second_step_size is None else cycle_second_step_size
    check_positive("one_cycle", "cycle_first_step_size", first)
    stairs = (
        cycle_first_stair_count,
        (cycle_first_stair_count if cycle_second_stair_count is None else cycle_second_stair_count),
    )

    def schedule(low: float, high: float, decay: Callable[[Any], Any]) -> Schedule:
        def value(count: Any) -> Any:
            step = to_float64(count)
            behind = step - (first + second)  # the index is `step - 1`, and counts from 1 behind the cycle
            moved = low + (high - low) * _climb(step, first, second, stairs)
            return torch.where(behind <= 0, moved, decay(behind)).to(torch.float32)

        return value

    def grow(rate: float, behind: Any) -> Any:
        return 1 + rate * behind / decay_step_size if decay_step_size else 1.0

    rate = schedule(cycle_min_lr, cycle_max_lr, lambda behind: cycle_min_lr / grow(decay_lr_rate, behind))
    if not cycle_momentum:
        return OneCycle(rate, None, None)
    check_decay("one_cycle", "cycle_min_mom", cycle_min_mom)
    check_decay("one_cycle", "cycle_max_mom", cycle_max_mom)
    momentum = schedule(cycle_max_mom, cycle_min_mom, lambda behind: cycle_max_mom * grow(decay_mom_rate, behind))

    def b1(count: Any) -> Any:
        return torch.where(to_tensor(count) == 0, cycle_min_mom, momentum(count))

    return OneCycle(rate, b1, constant_schedule(0.99))


def _climb(step: Any, first: int, second: int, stairs: tuple[int, int]) -> Any:
    """How far a cycle is up: 0 at both ends, 1 in between."""
    at = step.remainder(first + second)
    up = _share(at, first, stairs[0])
    return torch.where(at <= first, up, _share(first + second - at, second, stairs[1])) if second else up


def _share(done: Any, steps: float, stairs: int) -> Any:
    """`done / steps`, rounded down to a multiple of `1 / stairs` where there are stairs."""
    return (done * stairs / steps).floor() / stairs if stairs else done / steps


def _warm_up(where: str, low: float, high: float, steps: int, kind: str, later: Callable[[Any], Any]) -> Schedule:
    """From `low` to `high` in at least two `steps`, then `later(index)`.

    Raises:
        FzeroError: for an unknown `kind` of warmup, or fewer than one of its `steps`.
    """
    check_choice(where, "warmup_type", kind, ("log", "linear"))
    check_positive(where, "warmup_num_steps", steps)
    steps = max(2, steps)

    def schedule(count: Any) -> Any:
        index = (to_float64(count) - 1).clamp(min=0)  # step 0 runs at `low`, which is the value at index 0 too
        share = (index + 1).log() / math.log(steps) if kind == "log" else index / steps
        return torch.where(index < steps, low + (high - low) * share, later(index)).to(torch.float32)

    return schedule
