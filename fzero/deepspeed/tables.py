"""Tables: a scheduler of torch as a table of rates, which a step looks up by the count of updates."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from fzero.base.errors import FzeroError
from fzero.deepspeed.plateau import Plateau
from fzero.deepspeed.runtime.lr_schedules import NamedScheduler
from fzero.deepspeed.schedulers import Scheduled, schedule_groups
from fzero.training.kinds import Group

LENGTH = 100_000
"""Updates that a table has rates for."""


def convert_scheduler(
    scheduler: Any, optimizer: torch.optim.Optimizer | None, groups: Sequence[Group]
) -> Scheduled | Plateau:
    """The hyperparameters of each group that a scheduler of torch moves, for up to `LENGTH` updates. The scheduler is
    made for `optimizer`, or is a function of an optimizer that makes one. It stays as it is: a copy makes the steps. A
    scheduler of DeepSpeed becomes schedules, without a table. A scheduler that looks at a metric has no table: the
    user's calls move its rates.

    Raises:
        FzeroError: for a type that is not torch's, or that moves what is not a rate; for a scheduler that has made
            steps.
    """
    if callable(scheduler) and not isinstance(scheduler, LRScheduler):
        scheduler = scheduler(_stand_in(groups) if optimizer is None else optimizer)
    if isinstance(scheduler, NamedScheduler):
        return schedule_groups(groups, scheduler.pair)
    kind = type(scheduler)
    is_known = isinstance(scheduler, LRScheduler) and kind.__module__.startswith("torch.")
    if not is_known:
        way_out = 'give a scheduler of torch that counts steps, a function that makes one, or a config "scheduler"'
        raise FzeroError("lr_scheduler", f"is a {kind.__module__}.{kind.__name__}, which is not converted", way_out)
    if scheduler.last_epoch > 0:
        raise FzeroError("lr_scheduler", f"has made {scheduler.last_epoch} steps", "give a new one")
    given: Any = scheduler.optimizer
    if len(given.param_groups) != len(groups):
        problem = f"moves {len(given.param_groups)} groups of parameters, the optimizer has {len(groups)}"
        raise FzeroError("lr_scheduler", problem, "make it for the optimizer that initialize gets")
    if isinstance(scheduler, ReduceLROnPlateau):
        return Plateau(scheduler)
    columns = _make_columns(scheduler)
    return [
        {name: Table(values) for name, values in column.items() if name == "learning_rate" or _moves(values)}
        for column in columns
    ]


def _stand_in(groups: Sequence[Group]) -> torch.optim.Optimizer:
    """An optimizer with the rates of these groups, for a function that makes a scheduler."""
    members = [{"params": [torch.zeros(1, requires_grad=True)], "lr": group.rate} for group in groups]
    if all("b1" in group.options for group in groups):
        for member, group in zip(members, groups):
            member["betas"] = (group.options["b1"], group.options["b2"])
        return torch.optim.AdamW(members)
    return torch.optim.SGD(members)


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
    """The schedule of these values, one for each update. An engine stops behind the last."""

    def __init__(self, values: Sequence[float]) -> None:
        self.values = torch.tensor(values, dtype=torch.float32)

    def __call__(self, count: Any) -> Any:
        at = count.clamp(max=len(self.values) - 1).reshape(1)
        return self.values.to(count.device).index_select(0, at).reshape(())


def find_end(scheduled: Scheduled) -> int | None:
    """How many updates the tables of all groups have values for; None without tables."""
    tables = [each for group in scheduled for each in group.values() if isinstance(each, Table)]
    return min((len(each.values) for each in tables), default=None)
