"""Schedules: DeepSpeed's constructors of schedulers, for `initialize(lr_scheduler=)`.

Each takes an optimizer and the params of its type in a configuration. `initialize` makes schedules of these params.
"""

from __future__ import annotations

from typing import Any, NoReturn

from fzero.base.errors import FzeroError
from fzero.deepspeed.absent import make_getattr

__all__ = ["LRRangeTest", "OneCycle", "WarmupCosineLR", "WarmupDecayLR", "WarmupLR"]

__getattr__ = make_getattr(__name__, __all__)


class NamedScheduler:
    """A scheduler by its type and params, as a configuration has it. `initialize` checks the params."""

    order: tuple[str, ...] = ()  # of the params behind the optimizer

    def __init__(self, optimizer: Any, *args: Any, **params: Any) -> None:
        if len(args) > len(self.order):
            problem = f"got {len(args)} params by position, the first {len(self.order)} have one"
            raise FzeroError(type(self).__name__, problem, "give the others by name")
        self.optimizer = optimizer
        self.params: dict[str, Any] = {**dict(zip(self.order, args)), **params}

    @property
    def pair(self) -> tuple[str, dict[str, Any]]:
        """`(type, params)`."""
        return type(self).__name__, self.params

    def step(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise FzeroError("lr_scheduler.step", "engine.step() moves the rates", "give initialize(lr_scheduler=)")


class LRRangeTest(NamedScheduler):
    """Rates that grow, to find the largest that trains."""

    order = ("lr_range_test_min_lr", "lr_range_test_step_size", "lr_range_test_step_rate", "lr_range_test_staircase")


class OneCycle(NamedScheduler):
    """Rates that rise, fall and decay, and momenta against them."""

    order = ("cycle_min_lr", "cycle_max_lr", "decay_lr_rate", "cycle_first_step_size", "cycle_second_step_size")


class WarmupLR(NamedScheduler):
    """Rates that rise, and stay."""

    order = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type")


class WarmupDecayLR(NamedScheduler):
    """Rates that rise, and fall to 0."""

    order = ("total_num_steps", *WarmupLR.order)


class WarmupCosineLR(NamedScheduler):
    """Rates that rise, and fall by a cosine."""

    order = ("total_num_steps", "warmup_min_ratio", "warmup_num_steps", "cos_min_ratio")
