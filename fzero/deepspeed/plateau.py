"""Plateau: torch's ReduceLROnPlateau beside an engine. The user's calls move the rates, not the count of updates."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

from fzero.base.errors import FzeroError
from fzero.deepspeed.schedulers import Scheduled


class Plateau:
    """The scheduler that `initialize` returns for a ReduceLROnPlateau: `step(metric)` may lower the rates of the next
    updates. All ranks call it with the same number. An update finds another rate on another rank, and names it.

    The scheduler that was given stays as it is. A checkpoint of the engine has the state of this one.
    """

    def __init__(self, scheduler: ReduceLROnPlateau) -> None:
        small = {id(x): torch.zeros(1) for group in scheduler.optimizer.param_groups for x in group["params"]}
        self._scheduler: Any = copy.deepcopy(scheduler, small)  # without the parameters, which may be large
        self._rates = [torch.tensor(rate, dtype=torch.float32) for rate in self.get_last_lr()]  # programs read these

    @property
    def scheduled(self) -> Scheduled:
        """The rates as schedules, which read the present values in each update."""
        return [{"learning_rate": partial(_read, rate)} for rate in self._rates]

    def step(self, metrics: Any, epoch: Any = None) -> None:
        """Take the metric of an epoch, as torch's scheduler does."""
        self._scheduler.step(metrics)
        self._write()

    def get_last_lr(self) -> list[float]:
        """The rate of the next update, one for each group."""
        return [float(group["lr"]) for group in self._scheduler.optimizer.param_groups]

    get_lr = get_last_lr

    def state_dict(self) -> dict[str, Any]:
        """The state of torch's scheduler, and the rates."""
        return {**self._scheduler.state_dict(), "rates": self.get_last_lr()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a state was taken.

        Raises:
            FzeroError: for the state of another scheduler.
        """
        groups, rates = self._scheduler.optimizer.param_groups, state.get("rates", [])
        if len(groups) != len(rates):
            problem = f"the state has {len(rates)} rates of a ReduceLROnPlateau, the optimizer {len(groups)} groups"
            way_out = "give load_checkpoint(load_lr_scheduler_states=False) to begin anew"
            raise FzeroError("lr_scheduler", problem, way_out)
        self._scheduler.load_state_dict({name: value for name, value in state.items() if name != "rates"})
        for group, rate in zip(groups, rates):
            group["lr"] = rate
        self._write()

    def _write(self) -> None:
        for tensor, rate in zip(self._rates, self.get_last_lr()):
            tensor.fill_(rate)


def _read(rate: Tensor, count: Any) -> Any:
    """The schedule of a rate that changes between updates."""
    return rate.to(count.device)
