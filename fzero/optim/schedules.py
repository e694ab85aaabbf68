"""Schedules: hyperparameters as functions of the step count, which starts at 0. Names and meanings are optax's.

A schedule takes a 0-d integer tensor (or an int) and returns a 0-d float32 tensor. A schedule does not branch on the
value of the count, so a step that is traced once serves every count.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from fzero.base.errors import FzeroError
from fzero.optim.base import Schedule


def constant_schedule(value: float) -> Schedule:
    """`value` at every step."""
    return lambda count: torch.full_like(_to_tensor(count), value, dtype=torch.float32)


def linear_schedule(init_value: float, end_value: float, transition_steps: int, transition_begin: int = 0) -> Schedule:
    """`init_value` up to step `transition_begin`, then `transition_steps` equal steps to `end_value`, then `end_value`.

    With `transition_steps=0` the value stays `init_value`, as in optax.

    Raises:
        FzeroError: for a negative number of steps.
    """
    for name, steps in (("transition_steps", transition_steps), ("transition_begin", transition_begin)):
        if steps < 0:
            raise FzeroError("linear_schedule", f"{name} is {steps}", "give one that is at least 0")
    if transition_steps == 0:
        return constant_schedule(init_value)

    def schedule(count: Any) -> Any:
        done = (_to_tensor(count) - transition_begin).clamp(0, transition_steps)
        return (init_value - end_value) * (1 - done.to(torch.float32) / transition_steps) + end_value

    return schedule


def cosine_decay_schedule(init_value: float, decay_steps: int, alpha: float = 0.0) -> Schedule:
    """Half a cosine from `init_value` at step 0 to `alpha * init_value` at step `decay_steps`, then constant.

    Loshchilov and Hutter, SGDR, https://arxiv.org/abs/1608.03983, without restarts.

    Raises:
        FzeroError: for `decay_steps` below 1.
    """
    if decay_steps <= 0:
        raise FzeroError("cosine_decay_schedule", f"decay_steps is {decay_steps}", "give a positive number")

    def schedule(count: Any) -> Any:
        done = _to_tensor(count).clamp(max=decay_steps).to(torch.float32)
        return init_value * ((1 - alpha) * 0.5 * (1 + torch.cos(math.pi * done / decay_steps)) + alpha)

    return schedule


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
        step = _to_tensor(count)
        value = schedules[0](step)
        for boundary, later in zip(boundaries, schedules[1:]):
            value = torch.where(step < boundary, value, later(step - boundary))
        return value

    return schedule


def warmup_cosine_decay_schedule(
    init_value: float, peak_value: float, warmup_steps: int, decay_steps: int, end_value: float = 0.0
) -> Schedule:
    """Linear from `init_value` to `peak_value` in `warmup_steps`, then a cosine to `end_value` at step `decay_steps`.

    `decay_steps` is the length of the whole schedule, the warmup included.

    Raises:
        FzeroError: unless `0 <= warmup_steps < decay_steps`.
    """
    if not 0 <= warmup_steps < decay_steps:
        raise FzeroError(
            "warmup_cosine_decay_schedule",
            f"warmup_steps is {warmup_steps}, decay_steps {decay_steps}",
            "decay_steps counts the warmup: give 0 <= warmup_steps < decay_steps",
        )
    warmup = linear_schedule(init_value, peak_value, warmup_steps)
    alpha = end_value / peak_value if peak_value else 0.0
    decay = cosine_decay_schedule(peak_value, decay_steps - warmup_steps, alpha)
    return join_schedules([warmup, decay], [warmup_steps])


def _to_tensor(count: Any) -> Any:
    return torch.tensor(count) if isinstance(count, int) else count
