"""Schedules: hyperparameters as functions of the step count, which starts at 0. Names and meanings are optax's.

A schedule takes a 0-d integer tensor (or an int) and returns a 0-d float32 tensor. A schedule does not branch on the
value of the count, so a step that is traced once serves every count. `cycles` has schedules that are made of these,
`deepspeed` those of DeepSpeed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch

from fzero.base.errors import FzeroError
from fzero.optim.base import Schedule

Points = Mapping[int, float]
"""Step count -> the factor by which the value changes there."""


def constant_schedule(value: float) -> Schedule:
    """`value` at every step."""
    return lambda count: torch.full_like(to_tensor(count), value, dtype=torch.float32)


def polynomial_schedule(
    init_value: float, end_value: float, power: float, transition_steps: int, transition_begin: int = 0
) -> Schedule:
    """`end_value + (init_value - end_value) * (1 - done) ** power`, with `done` the share of the transition's steps.

    `done` is 0 up to step `transition_begin`, and 1 `transition_steps` steps later. With `transition_steps=0` the value
    stays `init_value`, as in optax.

    Raises:
        FzeroError: for a negative number of steps.
    """
    _check_steps("polynomial_schedule", transition_steps, transition_begin)
    if transition_steps == 0:
        return constant_schedule(init_value)

    def schedule(count: Any) -> Any:
        done = (to_float64(count) - transition_begin).clamp(0, transition_steps) / transition_steps
        return ((init_value - end_value) * (1 - done) ** power + end_value).to(torch.float32)

    return schedule


def linear_schedule(init_value: float, end_value: float, transition_steps: int, transition_begin: int = 0) -> Schedule:
    """`init_value` up to step `transition_begin`, then `transition_steps` equal steps to `end_value`, then `end_value`.

    Raises:
        FzeroError: as `polynomial_schedule`.
    """
    return polynomial_schedule(init_value, end_value, 1, transition_steps, transition_begin)


def cosine_decay_schedule(init_value: float, decay_steps: int, alpha: float = 0.0, exponent: float = 1.0) -> Schedule:
    """Half a cosine from `init_value` at step 0 to `alpha * init_value` at step `decay_steps`, then constant.

    `exponent` is a power of the cosine, `(0.5 * (1 + cos)) ** exponent`. Loshchilov and Hutter, SGDR,
    https://arxiv.org/abs/1608.03983, without restarts.

    Raises:
        FzeroError: for `decay_steps` below 1.
    """
    check_positive("cosine_decay_schedule", "decay_steps", decay_steps)

    def schedule(count: Any) -> Any:
        done = to_float64(count).clamp(max=decay_steps) / decay_steps
        cosine = 0.5 * (1 + torch.cos(math.pi * done))
        return (init_value * ((1 - alpha) * cosine**exponent + alpha)).to(torch.float32)

    return schedule


def exponential_decay(
    init_value: float,
    transition_steps: int,
    decay_rate: float,
    transition_begin: int = 0,
    staircase: bool = False,
    end_value: float | None = None,
) -> Schedule:
    """`init_value * decay_rate ** (steps / transition_steps)`, where steps count from `transition_begin`.

    With `staircase` the exponent is rounded down. `end_value` bounds the value: from below where `decay_rate` is below
    1, else from above. With `transition_steps=0` or `decay_rate=0` the value stays `init_value`, as in optax.

    Raises:
        FzeroError: for a negative number of steps or a negative `decay_rate`.
    """
    _check_steps("exponential_decay", transition_steps, transition_begin)
    if decay_rate < 0:
        raise FzeroError("exponential_decay", f"decay_rate is {decay_rate}", "give one that is at least 0")
    if transition_steps == 0 or decay_rate == 0:
        return constant_schedule(init_value)
    bounds = {} if end_value is None else {"min" if decay_rate < 1 else "max": end_value}

    def schedule(count: Any) -> Any:
        exponent = (to_float64(count) - transition_begin).clamp(min=0) / transition_steps
        value = init_value * decay_rate ** (exponent.floor() if staircase else exponent)
        return (value.clamp(**bounds) if bounds else value).to(torch.float32)

    return schedule


def inverse_sqrt_schedule(init_value: float, timescale: int) -> Schedule:
    """`init_value * sqrt(timescale / (timescale + count))`.

    Behind a warmup of `timescale` steps, Vaswani et al., Attention Is All You Need, https://arxiv.org/abs/1706.03762:
    see `warmup_inverse_sqrt_schedule`.

    Raises:
        FzeroError: for a `timescale` below 1.
    """
    check_positive("inverse_sqrt_schedule", "timescale", timescale)
    return lambda count: (init_value * (timescale / (timescale + to_float64(count))).sqrt()).to(torch.float32)


def sqrt_decay_schedule(init_value: float, end_value: float, decay_steps: int) -> Schedule:
    """`end_value + (init_value - end_value) * (1 - sqrt(done))`, with `done` the share of `decay_steps`.

    The "1 - sqrt" tail of Haegele et al., https://arxiv.org/abs/2405.18392.

    Raises:
        FzeroError: for `decay_steps` below 1.
    """
    check_positive("sqrt_decay_schedule", "decay_steps", decay_steps)

    def schedule(count: Any) -> Any:
        done = to_float64(count).clamp(max=decay_steps) / decay_steps
        return ((init_value - end_value) * (1 - done.sqrt()) + end_value).to(torch.float32)

    return schedule


def piecewise_constant_schedule(init_value: float, boundaries_and_scales: Points | None = None) -> Schedule:
    """`init_value`, times the scale of each boundary that the step count has reached.

    Raises:
        FzeroError: for a negative boundary or scale.
    """
    points = _sort_points("piecewise_constant_schedule", boundaries_and_scales)

    def schedule(count: Any) -> Any:
        step = to_float64(count)
        value = torch.full_like(step, init_value)
        for boundary, scale in points:
            value = torch.where(step < boundary, value, value * scale)
        return value.to(torch.float32)

    return schedule


def piecewise_interpolate_schedule(
    interpolate_type: Literal["linear", "cosine"], init_value: float, boundaries_and_scales: Points | None = None
) -> Schedule:
    """From `init_value` at step 0 to the value at each boundary, and constant behind the last boundary.

    The value at a boundary is `init_value` times the scales of all boundaries up to there. Between two boundaries the
    value moves along a line, or along half a cosine.

    Raises:
        FzeroError: for another `interpolate_type`, for a negative boundary or scale.
    """
    where = "piecewise_interpolate_schedule"
    if interpolate_type not in _WEIGHTS:
        raise FzeroError(where, f"interpolate_type is {interpolate_type!r}", f"give one of {sorted(_WEIGHTS)}")
    weigh = _WEIGHTS[interpolate_type]
    points = [(0, 1.0), *_sort_points(where, boundaries_and_scales)]
    values = [init_value * scale for scale in itertools.accumulate((scale for _, scale in points), lambda a, b: a * b)]
    knots = [(boundary, value) for (boundary, _), value in zip(points, values)]

    def schedule(count: Any) -> Any:
        step = to_float64(count)
        result = torch.full_like(step, knots[-1][1])
        for (begin, start), (end, stop) in reversed(list(itertools.pairwise(knots))):
            done = (step - begin) / max(end - begin, 1)
            result = torch.where(step < end, start + (stop - start) * weigh(done), result)
        return result.to(torch.float32)

    return schedule


_WEIGHTS: dict[str, Callable[[Any], Any]] = {
    "linear": lambda done: done,
    "cosine": lambda done: 0.5 * (1 - torch.cos(math.pi * done)),
}
"""The ways to move between two values: the share of the steps that are done -> the weight of the second value."""


def join_schedules(schedules: Sequence[Schedule], boundaries: Sequence[int]) -> Schedule:
    """`schedules[0]`, then `schedules[i]` from step `boundaries[i - 1]` on. Each counts from 0 where it begins.

    Raises:
        FzeroError: where `boundaries` is not one shorter than `schedules`, or is not ascending.
    """
    if len(boundaries) != len(schedules) - 1:
        raise FzeroError(
            "join_schedules",
            f"{len(schedules)} schedules with {len(boundaries)} boundaries",
            "give one boundary between each two schedules",
        )
    if list(boundaries) != sorted(boundaries):
        raise FzeroError("join_schedules", f"boundaries are {list(boundaries)}", "give them in ascending order")

    def schedule(count: Any) -> Any:
        step = to_tensor(count)
        value = schedules[0](step)
        for boundary, later in zip(boundaries, schedules[1:]):
            value = torch.where(step < boundary, value, later(step - boundary))
        return value

    return schedule


def to_tensor(count: Any) -> Any:
    """A step count as a tensor."""
    return torch.tensor(count) if isinstance(count, int) else count


def to_float64(count: Any) -> Any:
    """A step count as a tensor to compute with. The result of a schedule is rounded once, to float32."""
    return to_tensor(count).to(torch.float64)


def check_positive(where: str, name: str, steps: float) -> None:
    """Refuse a number of steps that is not positive."""
    if not steps > 0:
        raise FzeroError(where, f"{name} is {steps}", "give a positive number")


def _check_steps(where: str, transition_steps: int, transition_begin: int) -> None:
    for name, steps in (("transition_steps", transition_steps), ("transition_begin", transition_begin)):
        if steps < 0:
            raise FzeroError(where, f"{name} is {steps}", "give one that is at least 0")


def _sort_points(where: str, points: Points | None) -> list[tuple[int, float]]:
    """The boundaries and scales in ascending order.

    Raises:
        FzeroError: for a negative boundary or scale.
    """
    for boundary, scale in (points or {}).items():
        if boundary < 0 or not scale >= 0:
            problem = f"the scale at step {boundary} is {scale}"
            raise FzeroError(where, problem, "give steps and scales that are at least 0")
    return sorted((points or {}).items())
