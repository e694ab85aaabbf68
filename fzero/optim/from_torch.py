"""From torch: an optimizer of torch, with its groups and its schedule, as one of `fzero.optim`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from fzero.base.errors import FzeroError
from fzero.base.flags import Flag
from fzero.base.tree import Tree
from fzero.optim.base import GradientTransformation, chain, init_count, init_number, stage
from fzero.optim.groups import combine, convert_optimizer
from fzero.optim.tables import Table, check_scheduler, tabulate


class RatesEnd(Flag):
    """A step behind the last rate of a table."""

    where = "from_torch: scheduler"
    problem = "has rates for {value:.0f} updates, and more are made"
    way_out = "give a schedule of fzero.optim, which has no end"


class EndState(NamedTuple):
    """The state of the stage that watches the end of a table."""

    count: Tensor  # type: ignore[assignment]  # 0-d int32, steps so far (hides tuple.count, as in optax)
    failed: RatesEnd


def from_torch(
    optimizer: torch.optim.Optimizer, scheduler: LRScheduler | None = None, *, model: nn.Module
) -> GradientTransformation:
    """The optimizer of `fzero.optim` that updates as an optimizer of torch does, for the parameters of `model`.

        torch_optimizer = torch.optim.AdamW([{"params": matrices}, {"params": biases, "weight_decay": 0.0}], lr=1e-3)
        scheduler = torch.optim.lr_scheduler.LambdaLR(torch_optimizer, lambda step: min(1.0, step / 100))
        optimizer = fzero.optim.from_torch(torch_optimizer, scheduler, model=model)
        params, apply = fzero.lower(model)

    * Each group keeps its own rate and options. A parameter outside of all groups is not updated.
    * A scheduler becomes a table of 100,000 rates, and of the momenta that it moves, for each group. It is moved by one
      step an update. Behind the last rate the next call of a step raises an error.
    * Both are read once, and stay as they are. Give them before their first step.

    Raises:
        FzeroError: for a type of optimizer or scheduler that is not torch's, or that is not converted; for parameters
            that are not the model's; for an optimizer or scheduler that has made steps; for ReduceLROnPlateau.
    """
    groups = convert_optimizer(optimizer, model)
    trained = {path for path, x in model.named_parameters() if x.requires_grad}
    if len(groups) == 1 and groups[0].paths is not None and groups[0].paths >= trained:
        groups = [groups[0]._replace(paths=None)]
    if scheduler is None:
        return combine(groups, [{"learning_rate": group.rate} for group in groups])
    if isinstance(scheduler, ReduceLROnPlateau):
        way_out = "give a 0-d tensor for the rate to optim.inject_hyperparams, and change its state"
        raise FzeroError("lr_scheduler", "is a ReduceLROnPlateau, whose rates follow a metric", way_out)
    check_scheduler(scheduler, "give one of torch, or an optimizer of fzero.optim with a schedule")
    if scheduler.optimizer is not optimizer:
        raise FzeroError("lr_scheduler", "is of another optimizer", "make it for the optimizer that is given")
    tables = tabulate(scheduler)
    return chain(_watch_end(tables), combine(groups, tables))


def _watch_end(tables: Sequence[dict[str, Any]]) -> GradientTransformation:
    """A stage that changes nothing, and whose next step raises an error once tables have ended."""
    length = min(len(x.values) for table in tables for x in table.values() if isinstance(x, Table))

    def init(params: Tree) -> EndState:
        return EndState(init_count(params), RatesEnd(init_number(params, 0.0, torch.float32)))

    def update(updates: Tree, state: EndState, params: Tree | None = None) -> tuple[Tree, EndState]:
        return updates, EndState(state.count + 1, state.failed.note(state.count >= length, length))

    return stage(EndState, init, update)
