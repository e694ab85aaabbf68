"""Tables: a scheduler of torch as a table of rates, which a step looks up by the count of updates."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from fzero.base.errors import FzeroError

LENGTH = 100_000
"""Updates that a table has rates for."""


def check_scheduler(scheduler: Any, way_out: str) -> None:
    """Refuse what is no new scheduler of torch.

    Raises:
        FzeroError: with the type and `way_out`; for a scheduler that has made steps.
    """
    kind = type(scheduler)
    if not isinstance(scheduler, LRScheduler) or not kind.__module__.startswith("torch."):
        raise FzeroError("lr_scheduler", f"is a {kind.__module__}.{kind.__name__}, which is not converted", way_out)
    if scheduler.last_epoch > 0:
        raise FzeroError("lr_scheduler", f"has made {scheduler.last_epoch} steps", "give a new one")


def tabulate(scheduler: LRScheduler) -> list[dict[str, Any]]:
    """For each group the hyperparameters that a scheduler moves, and the rate, as tables. The scheduler stays as it
    is: a copy makes the steps."""
    return [
        {name: Table(values) for name, values in column.items() if name == "learning_rate" or _moves(values)}
        for column in _make_columns(scheduler)
    ]


def _make_columns(scheduler: LRScheduler) -> list[dict[str, list[float]]]:
    """For each group the values of its hyperparameters, update by update."""
    optimizer: Any = scheduler.optimizer
    small = {id(x): torch.zeros(1) for group in optimizer.param_groups for x in group["params"]}
    moved: Any = copy.deepcopy(scheduler, small)  # without the parameters, which may be large
    columns: list[dict[str, list[float]]] = [{} for _ in moved.optimizer.param_groups]
    with warnings.catch_warnings():  # torch warns of a scheduler that steps before its optimizer
        warnings.simplefilter("ignore")
        for _ in range(LENGTH):
            for column, group in zip(columns, moved.optimizer.param_groups):
                values = {"learning_rate": group["lr"], "momentum": group.get("momentum")}
                values |= dict(zip(("b1", "b2"), group.get("betas", ())))
                for name, value in values.items():
                    if value is not None:
                        column.setdefault(name, []).append(float(value))
            try:
                moved.step()
            except ValueError:  # OneCycleLR, behind its last step
                break
    return columns


def _moves(values: Sequence[float]) -> bool:
    return any(value != values[0] for value in values)


class Table:
    """The schedule of these values, one for each update. Behind the last one it stays."""

    def __init__(self, values: Sequence[float]) -> None:
        self.values = torch.tensor(values, dtype=torch.float32)

    def __call__(self, count: Any) -> Any:
        at = count.clamp(max=len(self.values) - 1).reshape(1)
        return self.values.to(count.device).index_select(0, at).reshape(())
