"""Tables: a scheduler that `initialize` is given, as what changes from update to update."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from fzero.base.errors import FzeroError
from fzero.deepspeed.plateau import Plateau
from fzero.deepspeed.runtime.lr_schedules import NamedScheduler
from fzero.deepspeed.schedulers import Scheduled, schedule_groups
from fzero.optim.kinds import Group
from fzero.optim.tables import Table, check_scheduler, tabulate


def convert_scheduler(
    scheduler: Any, optimizer: torch.optim.Optimizer | None, groups: Sequence[Group]
) -> Scheduled | Plateau:
    """The hyperparameters of each group that a scheduler of torch moves, as tables. The scheduler is made for
    `optimizer`, or is a function of an optimizer that makes one. It stays as it is: a copy makes the steps. A scheduler
    of DeepSpeed becomes schedules, without a table. A scheduler that looks at a metric has no table: the user's calls
    move its rates.

    Raises:
        FzeroError: for a type that is not torch's, or that moves what is not a rate; for a scheduler that has made
            steps.
    """
    if callable(scheduler) and not isinstance(scheduler, LRScheduler):
        scheduler = scheduler(_stand_in(groups) if optimizer is None else optimizer)
    if isinstance(scheduler, NamedScheduler):
        return schedule_groups(groups, scheduler.pair)
    check_scheduler(
        scheduler, 'give a scheduler of torch that counts steps, a function that makes one, or a config "scheduler"'
    )
    given: Any = scheduler.optimizer
    if len(given.param_groups) != len(groups):
        problem = f"moves {len(given.param_groups)} groups of parameters, the optimizer has {len(groups)}"
        raise FzeroError("lr_scheduler", problem, "make it for the optimizer that initialize gets")
    if isinstance(scheduler, ReduceLROnPlateau):
        return Plateau(scheduler)
    return tabulate(scheduler)


def _stand_in(groups: Sequence[Group]) -> torch.optim.Optimizer:
    """An optimizer with the rates of these groups, for a function that makes a scheduler."""
    members = [{"params": [torch.zeros(1, requires_grad=True)], "lr": group.rate} for group in groups]
    if all("b1" in group.options for group in groups):
        for member, group in zip(members, groups):
            member["betas"] = (group.options["b1"], group.options["b2"])
        return torch.optim.AdamW(members)
    return torch.optim.SGD(members)


def find_end(scheduled: Scheduled) -> int | None:
    """How many updates the tables of all groups have values for; None without tables."""
    tables = [each for group in scheduled for each in group.values() if isinstance(each, Table)]
    return min((len(each.values) for each in tables), default=None)
