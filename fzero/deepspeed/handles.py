"""Handles: what stands in the places of DeepSpeed's optimizer and scheduler. The engine moves both."""

from __future__ import annotations

import weakref
from typing import Any, NoReturn

import torch

from fzero.base.errors import FzeroError


class _ReadOnly(dict[str, Any]):
    """A group of parameters: a value that is set here would not reach the step."""

    def __setitem__(self, name: str, value: Any) -> NoReturn:
        raise FzeroError(f"param_groups: {name}", f"is set to {value!r}", "give a scheduler to initialize instead")


class Handle:
    """The optimizer of an engine, to look at: `engine.step()` updates."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    @property
    def param_groups(self) -> tuple[dict[str, Any], ...]:
        """For each group a dict of the rate of the next update and, where the optimizer has them, of betas, eps,
        weight_decay and momentum."""
        return tuple(_ReadOnly(each) for each in self._engine.list_hyperparameters())

    @property
    def loss_scale(self) -> float:
        return float(self._engine.loss_scale)

    cur_scale = loss_scale

    def step(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise FzeroError("optimizer.step", "is not called beside an engine", "call engine.step()")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing: an update takes its gradients.

        Raises:
            FzeroError: where gradients wait for an update. DeepSpeed drops them at some stages and not at others.
        """
        if self._engine.gradients is not None:
            way_out = "call engine.zero_grad() to drop them; else leave it out: engine.step() takes them"
            raise FzeroError("optimizer.zero_grad", "is called while gradients wait for an update", way_out)

    def state_dict(self) -> NoReturn:
        raise FzeroError("optimizer.state_dict", "there is none", "engine.save_checkpoint saves optimizer state")


class GivenOptimizer:
    """The optimizer of torch that `initialize` was given. What is written into its groups later would reach no step."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._options = _list_options(optimizer)

    def check(self) -> None:
        """Raises:
        FzeroError: where an option has changed, as a scheduler changes rates.
        """
        optimizer = self._optimizer()
        for number, (now, was) in enumerate(zip([] if optimizer is None else _list_options(optimizer), self._options)):
            for name in was:
                if now.get(name) != was[name]:
                    problem = f"is {now.get(name)!r} now, and was {was[name]!r} in initialize"
                    way_out = "give initialize(lr_scheduler=) the scheduler, and let engine.step() move it"
                    raise FzeroError(f"optimizer: group {number}: {name}", problem, way_out)


def _list_options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The numbers in the groups of an optimizer."""
    kinds = (int, float, tuple)
    return [{name: x for name, x in group.items() if isinstance(x, kinds)} for group in optimizer.param_groups]


class SchedulerHandle:
    """The scheduler of an engine, to look at: `engine.step()` moves the rates."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def get_last_lr(self) -> list[float]:
        """The rate of the next update, one for each group."""
        return list(self._engine.get_lr())

    get_lr = get_last_lr

    def step(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise FzeroError("lr_scheduler.step", "is called, and engine.step() moves the rates already", "leave it out")

    def state_dict(self) -> dict[str, int]:
        """DeepSpeed's index of the last update. It follows from the engine's state, which a checkpoint saves."""
        return {"last_batch_iteration": self._engine.global_steps - self._engine.skipped_steps - 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing: the rates follow from the engine's state."""
