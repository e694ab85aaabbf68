"""Schedulers: a type and params of a configuration as schedules of the rate, for each group of parameters."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fzero.base.errors import FzeroError
from fzero.optim import deepspeed as schedules
from fzero.optim.base import Schedule
from fzero.optim.kinds import Group
from fzero.optim.schedules import constant_schedule

_log = logging.getLogger("fzero")
Scheduled = list[dict[str, Any]]
"""For each group the hyperparameters of a step: name -> schedule, or number. `learning_rate` is always there."""


def schedule_groups(groups: Sequence[Group], scheduler: tuple[str, Mapping[str, Any]] | None) -> Scheduled:
    """The hyperparameters of each group that a scheduler of a configuration moves; without one the rates stay.

    Raises:
        FzeroError: for a type that DeepSpeed does not have; for params that the type does not take, and for values
            that they do not take; for a `last_batch_iteration` other than -1.
    """
    if scheduler is None:
        return [{"learning_rate": group.rate} for group in groups]
    kind, params = scheduler
    if kind not in _MAKERS:
        raise FzeroError("scheduler.type", f"is {kind!r}", f"DeepSpeed has {', '.join(_MAKERS)}")
    begun = params.get("last_batch_iteration")
    if begun not in (None, -1):
        way_out = "leave it out: engine.load_checkpoint goes on where updates ended"
        raise FzeroError("scheduler.params.last_batch_iteration", f"is {begun!r}, which is not supported", way_out)
    params = {name: value for name, value in params.items() if name != "last_batch_iteration"}
    return [_MAKERS[kind](dict(params), group) for group in groups]


def rate_at(scheduled: Mapping[str, Any], count: int) -> float:
    """The rate of the update behind `count` updates."""
    return values_at(scheduled, count)["learning_rate"]


def values_at(scheduled: Mapping[str, Any], count: int) -> dict[str, float]:
    """The hyperparameters of the update behind `count` updates, by the names of `fzero.optim`."""
    return {name: float(x(torch.tensor(count)) if callable(x) else x) for name, x in scheduled.items()}


def _call(maker: Callable[..., Any], params: dict[str, Any], kind: str) -> Any:
    known = inspect.signature(maker).parameters
    for name, value in params.items():
        if name not in known:
            raise FzeroError(f"scheduler.params.{name}", f"is no param of {kind}", f"it has {', '.join(known)}")
        _check_param(name, value, known[name].default)
    missing = [name for name, each in known.items() if each.default is each.empty and name not in params]
    if missing:
        raise FzeroError(f"scheduler.params.{missing[0]}", "is missing", f"{kind} needs it")
    try:
        return maker(**params)
    except FzeroError as error:  # of a function of `fzero.optim`, which is no word of the configuration
        raise FzeroError("scheduler.params", error.problem, error.way_out) from error


def _check_param(name: str, value: Any, default: Any) -> None:
    """Refuse a value that a param with this default does not take."""
    path, kind = f"scheduler.params.{name}", type(value).__name__
    if isinstance(default, (bool, str)):
        if type(value) is not type(default):
            way_out = "give true or false" if isinstance(default, bool) else "give a text"
            raise FzeroError(path, f"is {value!r:.80}, a {kind}", way_out)
        return
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise FzeroError(path, f"is {value!r:.80}, a {kind}", "give a number")
    if not abs(value) < 2**53:  # nan too; float64 counts steps up to there
        raise FzeroError(path, f"is {value!r}", "give a finite number below 2**53")
    if value < 0 and name.endswith("_lr"):
        raise FzeroError(path, f"is {value!r}", "give a number from 0 on")


def _only_rate(maker: Callable[..., Schedule], kind: str) -> Callable[[dict[str, Any], Group], dict[str, Any]]:
    return lambda params, group: {"learning_rate": _call(maker, params, kind)}


def _warm_up(params: dict[str, Any], group: Group) -> dict[str, Any]:
    params.setdefault("warmup_max_lr", group.rate)  # DeepSpeed takes the optimizer's rate
    return {"learning_rate": _call(schedules.warmup_lr, params, "WarmupLR")}


def _cosine(params: dict[str, Any], group: Group) -> dict[str, Any]:
    return {"learning_rate": _call(schedules.warmup_cosine_lr, {**params, "lr": group.rate}, "WarmupCosineLR")}


def _one_cycle(params: dict[str, Any], group: Group) -> dict[str, Any]:
    cycle = _call(schedules.one_cycle, params, "OneCycle")
    moved = {"learning_rate": cycle.learning_rate}
    if cycle.b1 is None:
        return moved
    if "b1" not in group.options:
        _log.warning("fzero.deepspeed: OneCycle moves no momentum, because the optimizer has no betas")
        return moved
    return moved | {"b1": cycle.b1, "b2": cycle.b2 or constant_schedule(0.99)}


_MAKERS: dict[str, Callable[[dict[str, Any], Group], dict[str, Any]]] = {
    "LRRangeTest": _only_rate(schedules.lr_range_test, "LRRangeTest"),
    "OneCycle": _one_cycle,
    "WarmupLR": _warm_up,
    "WarmupDecayLR": _only_rate(schedules.warmup_decay_lr, "WarmupDecayLR"),
    "WarmupCosineLR": _cosine,
}
"""DeepSpeed's name of a scheduler -> the function that makes the hyperparameters of a group."""
