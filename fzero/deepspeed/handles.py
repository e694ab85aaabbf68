"""Handles: what stands in the places of DeepSpeed's optimizer and scheduler. The engine moves both."""

from __future__ import annotations

from typing import Any, NoReturn

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
        """One dict with the rate for each group."""
        return tuple(_ReadOnly(lr=rate) for rate in self._engine.get_lr())

    @property
    def loss_scale(self) -> float:
        return float(self._engine.loss_scale)

    cur_scale = loss_scale

    def step(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise FzeroError("optimizer.step", "is not called beside an engine", "call engine.step()")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing: an update takes its gradients."""

    def state_dict(self) -> NoReturn:
        raise FzeroError("optimizer.state_dict", "there is none", "engine.save_checkpoint saves optimizer state")


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
