"""Scaling: the part of the Trainer that scales a loss, and skips updates whose gradients are not finite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from fzero import optim
from fzero.optim.wrappers import all_finite


def make_unscale(scaler: optim.loss_scale.LossScale) -> Callable[[Any, Any], tuple[Any, Any, Any]]:
    """A function `(sums, scale) -> (gradients, next scale, whether they are finite)` of a loss scale."""

    def unscale(sums: Any, scale: Any) -> tuple[Any, Any, Any]:
        grads = optim.loss_scale.unscale(sums, scale)
        finite = all_finite(grads)
        return grads, scaler.update(scale, finite), finite

    return unscale


class Scaler:
    """What accelerate takes for torch's GradScaler. It makes a step, or skips it: then the schedule does not move.

    The scale itself is state of the Trainer, which programs update. `find` returns its value, and `drop` forgets
    the gradients of an update.
    """

    def __init__(self, find: Callable[[], Tensor], drop: Callable[[], None]) -> None:
        self.is_finite, self._find, self._drop = True, find, drop

    def scale(self, loss: Tensor) -> Tensor:
        """The loss times the scale, for an `accelerator.backward` outside of programs."""
        return loss * self._find().to(loss.device)

    def step(self, optimizer: Any, closure: Any = None) -> None:
        """Call `optimizer.step`, or drop gradients that are not finite.

        torch's scaler calls a fused optimizer in any case, which skips the update itself. So the schedule moves then.
        """
        if not self.is_finite:
            self._drop()
        if self.is_finite or any(group.get("fused") for group in optimizer.param_groups):
            optimizer.step(closure)

    def update(self) -> None:
        """Do nothing: the scale is updated with the gradients."""

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the scale is in the folder of optimizer state."""
        return {}

    def load_state_dict(self, state: Any) -> None:
        """Do nothing."""
