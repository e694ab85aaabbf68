"""Schedules: hyperparameters as functions of the step count, which starts at 0. Names and meanings are optax's.

A schedule takes a 0-d integer tensor (or an int) and returns a 0-d float32 tensor. A schedule does not branch on the
value of the count, so a step that is traced once serves every count. `cycles` has schedules that are made of these,
`deepspeed` those of DeepSpeed.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import UnionType
from typing import Any, Literal, ParamSpec, TypeVar, get_args

import torch

from fzero.base.errors import FzeroError
from fzero.optim.base import (
    Schedule,
    check_choice,
    check_finite,
    check_function,
    check_not_negative,
    check_number,
    check_positive,
)

Points = Mapping[int, float]
"""Step count -> the factor by which the value changes there."""
P = ParamSpec("P")
T = TypeVar("T")


def check_arguments(factory: Callable[P, T]) -> Callable[P, T]:
    """`factory`, which refuses arguments that are not the numbers its annotations say.

    A `float` is a finite number, or a tensor without dimensions. An `int` is a number of steps: see `check_steps`.
    """
    signature = inspect.signature(factory, eval_str=True)
    given = {name: parameter.annotation for name, parameter in signature.parameters.items()}
    kinds = {name: get_args(kind) if isinstance(kind, UnionType) else (kind,) for name, kind in given.items()}
    where = factory.__name__

    @functools.wraps(factory)
    def make(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError:
            return factory(*args, **kwargs)  # Python's error, which names the schedule
        for name, value in bound.arguments.items():
            if value is None and type(None) in kinds[name]:
                continue
            if int in kinds[name]:
                check_steps(where, name, value)
            elif float in kinds[name]:
                check_finite(where, name, value)
        return factory(*args, **kwargs)

    return make


def check_steps(where: str, name: str, value: Any) -> None:
    """Refuse a number of steps that is negative or not finite, a tensor, and what is no number."""
    check_number(where, **{name: value})
    check_finite(where, name, value)
    check_not_negative(where, name, value)


@check_arguments
def constant_schedule(value: float) -> Schedule:
    """`value` at every step."""
    return lambda count: torch.full_like(to_tensor(count), value, dtype=torch.float32)


@check_arguments
def polynomial_schedule(
    init_value: float, end_value: float, power: float, transition_steps: int, transition_begin: int = 0
) -> Schedule:
    """`end_value + (init_value - end_value) * (1 - done) ** power`, with `done` the share of the transition's steps.

    `done` is 0 up to step `transition_begin`, and 1 `transition_steps` steps later. With `transition_steps=0` the value
    stays `init_value`, as in optax.

    Raises:
        FzeroError: for a negative number of steps.
    """
    if transition_steps == 0:
        return constant_schedule(init_value)

    def schedule(count: Any) -> Any:
        done = (to_float64(count) - transition_begin).clamp(0, transition_steps) / transition_steps
        return ((init_value - end_value) * (1 - done) ** power + end_value).to(torch.float32)

    return schedule


@check_arguments
def linear_schedule(init_value: float, end_value: float, transition_steps: int, transition_begin: int = 0) -> Schedule:
    """`init_value` up to step `transition_begin`, then `transition_steps` equal steps to `end_value`, then `end_value`.

    Raises:
        FzeroError: as `polynomial_schedule`.
    """
    return polynomial_schedule(init_value, end_value, 1, transition_steps, transition_begin)


@check_arguments
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


@check_arguments
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
    check_not_negative("exponential_decay", "decay_rate", decay_rate)
    if transition_steps == 0 or decay_rate == 0:
        return constant_schedule(init_value)
    bounds = {} if end_value is None else {"min" if decay_rate < 1 else "max": end_value}

    def schedule(count: Any) -> Any:
        exponent = (to_float64(count) - transition_begin).clamp(min=0) / transition_steps
        value = init_value * decay_rate ** (exponent.floor() if staircase else exponent)
        return (value.clamp(**bounds) if bounds else value).to(torch.float32)

    return schedule


@check_arguments
def inverse_sqrt_schedule(init_value: float, timescale: int) -> Schedule:
    """`init_value * sqrt(timescale / (timescale + count))`.

    Behind a warmup of `timescale` steps, Vaswani et al., Attention Is All You Need, https://arxiv.org/abs/1706.03762:
    see `warmup_inverse_sqrt_schedule`.

    Raises:
        FzeroError: for a `timescale` below 1.
    """
    check_positive("inverse_sqrt_schedule", "timescale", timescale)
    return lambda count: (init_value * (timescale / (timescale + to_float64(count))).sqrt()).to(torch.float32)


@check_arguments
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


@check_arguments
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


@check_arguments
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
    check_choice(where, "interpolate_type", interpolate_type, _WEIGHTS)
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
        FzeroError: where `boundaries` is not one shorter than `schedules`, or is not ascending; for a schedule that is
            no function, or a boundary that is no number of steps.
    """
    schedules, boundaries = _to_list("schedules", schedules), _to_list("boundaries", boundaries)
    for i, part in enumerate(schedules):
        check_function("join_schedules", f"schedules[{i}]", part, "give a schedule, such as constant_schedule(0.1)")
    for i, boundary in enumerate(boundaries):
        check_steps("join_schedules", f"boundaries[{i}]", boundary)
    if len(boundaries) != len(schedules) - 1:
        raise FzeroError(
            "join_schedules",
            f"{len(schedules)} schedules with {len(boundaries)} boundaries",
            "give one boundary between each two schedules",
        )
    if boundaries != sorted(boundaries):
        raise FzeroError("join_schedules", f"boundaries are {boundaries}", "give them in ascending order")

    def schedule(count: Any) -> Any:
        step = to_tensor(count)
        value = schedules[0](step)
        for boundary, later in zip(boundaries, schedules[1:]):
            value = torch.where(step < boundary, value, later(step - boundary))
        return value

    return schedule


def _to_list(name: str, values: Iterable[T]) -> list[T]:
    try:
        return list(values)
    except TypeError:
        raise FzeroError("join_schedules", f"{name} is {values!r}", "give a list") from None


def to_tensor(count: Any) -> Any:
    """A step count as a tensor."""
    return torch.tensor(count) if isinstance(count, int) else count


def to_float64(count: Any) -> Any:
    """A step count as a tensor to compute with. The result of a schedule is rounded once, to float32."""
    return to_tensor(count).to(torch.float64)


def _sort_points(where: str, points: Points | None) -> list[tuple[int, float]]:
    """The boundaries and scales in ascending order.

    Raises:
        FzeroError: for what is no mapping; for a negative boundary or scale.
    """
    if points is None:
        return []
    if not isinstance(points, Mapping):
        raise FzeroError(where, f"boundaries_and_scales is {points!r}", "give a dict of steps and scales")
    for boundary, scale in points.items():
        check_steps(where, "a boundary", boundary)
        check_finite(where, f"the scale at step {boundary}", scale)
        check_not_negative(where, f"the scale at step {boundary}", scale)
    return sorted(points.items())
