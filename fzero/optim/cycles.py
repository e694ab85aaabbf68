"""Schedules for a whole run: warmups, one cycle, restarts. Names and meanings are optax's where it has the schedule."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from fzero.base.errors import FzeroError
from fzero.optim.base import Schedule, check_choice, check_positive
from fzero.optim.schedules import (
    check_arguments,
    constant_schedule,
    cosine_decay_schedule,
    exponential_decay,
    inverse_sqrt_schedule,
    join_schedules,
    linear_schedule,
    piecewise_interpolate_schedule,
    sqrt_decay_schedule,
)

Decay = Literal["linear", "sqrt", "cosine"]


@check_arguments
def warmup_constant_schedule(init_value: float, peak_value: float, warmup_steps: int) -> Schedule:
    """Linear from `init_value` to `peak_value` in `warmup_steps`, then constant.

    Raises:
        FzeroError: for negative `warmup_steps`.
    """
    return _warm_up(init_value, peak_value, warmup_steps, constant_schedule(peak_value))


@check_arguments
def warmup_cosine_decay_schedule(
    init_value: float,
    peak_value: float,
    warmup_steps: int,
    decay_steps: int,
    end_value: float = 0.0,
    exponent: float = 1.0,
) -> Schedule:
    """Linear from `init_value` to `peak_value` in `warmup_steps`, then a cosine to `end_value` at step `decay_steps`.

    `decay_steps` is the length of the whole schedule, the warmup included. `exponent` is as in `cosine_decay_schedule`.

    Raises:
        FzeroError: unless `0 <= warmup_steps < decay_steps`.
    """
    if not warmup_steps < decay_steps:
        raise FzeroError(
            "warmup_cosine_decay_schedule",
            f"warmup_steps is {warmup_steps}, decay_steps {decay_steps}",
            "decay_steps counts the warmup: give 0 <= warmup_steps < decay_steps",
        )
    decay = cosine_decay_schedule(peak_value, decay_steps - warmup_steps, _divide(end_value, peak_value), exponent)
    return _warm_up(init_value, peak_value, warmup_steps, decay)


@check_arguments
def warmup_exponential_decay_schedule(
    init_value: float,
    peak_value: float,
    warmup_steps: int,
    transition_steps: int,
    decay_rate: float,
    transition_begin: int = 0,
    staircase: bool = False,
    end_value: float | None = None,
) -> Schedule:
    """Linear from `init_value` to `peak_value` in `warmup_steps`, then `exponential_decay` of the other arguments.

    Raises:
        FzeroError: for negative `warmup_steps`, and as `exponential_decay`.
    """
    decay = exponential_decay(peak_value, transition_steps, decay_rate, transition_begin, staircase, end_value)
    return _warm_up(init_value, peak_value, warmup_steps, decay)


@check_arguments
def warmup_inverse_sqrt_schedule(
    init_value: float, peak_value: float, warmup_steps: int, timescale: int | None = None
) -> Schedule:
    """Linear from `init_value` to `peak_value` in `warmup_steps`, then `inverse_sqrt_schedule` with `timescale`.

    With `timescale=None`, which stands for `warmup_steps`, the value behind the warmup is
    `peak_value * sqrt(warmup_steps / count)`: Vaswani et al., https://arxiv.org/abs/1706.03762, section 5.3.

    Raises:
        FzeroError: for negative `warmup_steps`, and as `inverse_sqrt_schedule`.
    """
    decay = inverse_sqrt_schedule(peak_value, warmup_steps if timescale is None else timescale)
    return _warm_up(init_value, peak_value, warmup_steps, decay)


@check_arguments
def warmup_stable_decay_schedule(
    init_value: float,
    peak_value: float,
    warmup_steps: int,
    stable_steps: int,
    decay_steps: int,
    end_value: float = 0.0,
    decay: Decay = "linear",
) -> Schedule:
    """Linear from `init_value` to `peak_value`, `peak_value` for `stable_steps`, then a tail to `end_value`.

    With `done` as the share of `decay_steps`, the tail falls with `1 - done` ("linear"), `1 - sqrt(done)` ("sqrt") or
    `0.5 * (1 + cos(pi * done))` ("cosine"). optax has no such schedule. Hu et al., MiniCPM,
    https://arxiv.org/abs/2404.06395; the shapes of the tail are torchtitan's.

    Raises:
        FzeroError: for an unknown `decay`, for negative steps, for `decay_steps` below 1.
    """
    where = "warmup_stable_decay_schedule"
    check_positive(where, "decay_steps", decay_steps)
    tails = {
        "linear": linear_schedule(peak_value, end_value, decay_steps),
        "sqrt": sqrt_decay_schedule(peak_value, end_value, decay_steps),
        "cosine": cosine_decay_schedule(peak_value, decay_steps, _divide(end_value, peak_value)),
    }
    check_choice(where, "decay", decay, tails)
    later = join_schedules([constant_schedule(peak_value), tails[decay]], [stable_steps])
    return _warm_up(init_value, peak_value, warmup_steps, later)


@check_arguments
def linear_onecycle_schedule(
    transition_steps: int,
    peak_value: float,
    pct_start: float = 0.3,
    pct_final: float = 0.85,
    div_factor: float = 25.0,
    final_div_factor: float = 1e4,
) -> Schedule:
    """Up a line to `peak_value`, down a line to where it began, and down to `1 / final_div_factor` of that.

    The value begins at `peak_value / div_factor`, is `peak_value` at `pct_start` of `transition_steps`, and the second
    line ends at `pct_final` of them. Smith and Topin, https://arxiv.org/abs/1708.07120.

    Raises:
        FzeroError: for `transition_steps` or a factor that is not positive, for shares that are not in order.
    """
    positive = {"transition_steps": transition_steps, "div_factor": div_factor, "final_div_factor": final_div_factor}
    _check_cycle("linear_onecycle_schedule", positive, {"pct_start": pct_start, "pct_final": pct_final})
    points = {
        int(pct_start * transition_steps): div_factor,
        int(pct_final * transition_steps): 1 / div_factor,
        transition_steps: 1 / final_div_factor,
    }
    return piecewise_interpolate_schedule("linear", peak_value / div_factor, points)


@check_arguments
def cosine_onecycle_schedule(
    transition_steps: int,
    peak_value: float,
    pct_start: float = 0.3,
    div_factor: float = 25.0,
    final_div_factor: float = 1e4,
) -> Schedule:
    """Up half a cosine to `peak_value` at `pct_start` of `transition_steps`, and down another one.

    The value begins at `peak_value / div_factor`, and ends at `1 / final_div_factor` of that. Smith and Topin,
    https://arxiv.org/abs/1708.07120.

    Raises:
        FzeroError: for `transition_steps` or a factor that is not positive, for shares that are not in order.
    """
    positive = {"transition_steps": transition_steps, "div_factor": div_factor, "final_div_factor": final_div_factor}
    _check_cycle("cosine_onecycle_schedule", positive, {"pct_start": pct_start})
    points = {int(pct_start * transition_steps): div_factor, transition_steps: 1 / (div_factor * final_div_factor)}
    return piecewise_interpolate_schedule("cosine", peak_value / div_factor, points)


def sgdr_schedule(cosine_kwargs: Iterable[Mapping[str, Any]]) -> Schedule:
    """One `warmup_cosine_decay_schedule` for each dict of its arguments. Each lasts for its `decay_steps`.

    Loshchilov and Hutter, SGDR, https://arxiv.org/abs/1608.03983.

    Raises:
        FzeroError: without a cycle, for one without its arguments, and as `warmup_cosine_decay_schedule`.
    """
    cycles = list(cosine_kwargs) if isinstance(cosine_kwargs, Iterable) else []
    if not cycles:
        raise FzeroError("sgdr_schedule", "has no cycle", "give a list of the arguments of at least one cycle")
    for i, cycle in enumerate(cycles):
        try:
            inspect.signature(warmup_cosine_decay_schedule).bind(**cycle)
        except TypeError as error:
            way_out = "give a dict of arguments of warmup_cosine_decay_schedule"
            raise FzeroError("sgdr_schedule", f"cosine_kwargs[{i}]: {error}", way_out) from None
    schedules = [warmup_cosine_decay_schedule(**cycle) for cycle in cycles]
    ends = [sum(cycle["decay_steps"] for cycle in cycles[:i]) for i in range(1, len(cycles))]
    return join_schedules(schedules, ends)


def _warm_up(init_value: float, peak_value: float, warmup_steps: int, later: Schedule) -> Schedule:
    """Linear from `init_value` to `peak_value` in `warmup_steps`, then `later`."""
    return join_schedules([linear_schedule(init_value, peak_value, warmup_steps), later], [warmup_steps])


def _check_cycle(where: str, positive: Mapping[str, float], shares: Mapping[str, float]) -> None:
    """Refuse numbers that are not positive, and shares of the steps that do not ascend within [0, 1]."""
    for name, value in positive.items():
        check_positive(where, name, value)
    ascending = [0.0, *shares.values(), 1.0]
    if ascending != sorted(ascending):
        problem = ", ".join(f"{name} is {value}" for name, value in shares.items())
        raise FzeroError(where, problem, "give shares of the steps in [0, 1], in ascending order")


def _divide(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
