"""Plan: what `initialize` works out on each rank alone, before ranks make anything together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from fzero.base.errors import FzeroError
from fzero.deepspeed.keys import KEYS
from fzero.deepspeed.plateau import Plateau
from fzero.deepspeed.reading import Values, look_up, read_config
from fzero.deepspeed.schedulers import Scheduled, schedule_groups
from fzero.deepspeed.settings import MONITORS, SIZES, Settings, resolve_auto, settle
from fzero.deepspeed.tables import convert_scheduler
from fzero.optim.base import GradientTransformation
from fzero.optim.groups import convert_optimizer, list_groups
from fzero.optim.kinds import Group
from fzero.ranks.agreement import agree, digest
from fzero.ranks.ranks import Ranks

OF_A_RANK = ("steps_per_print", "wall_clock_breakdown", "flops_profiler.", *(f"{x}." for x in MONITORS))
"""Parts of keys that each rank may have for itself: what it prints."""


class EnginePlan(NamedTuple):
    """What the arguments of `initialize` add up to."""

    model: nn.Module
    settings: Settings
    groups: list[Group] | GradientTransformation | None  # of parameters and their optimizers
    scheduled: Scheduled | Plateau
    given: Any  # the optimizer that `initialize` was given, or that its function made
    lines: list[str]  # what all ranks must have alike


def make_plan(
    args: Any,
    configs: Mapping[str, Any],
    model: Any,
    optimizer: Any,
    model_parameters: Any,
    lr_scheduler: Any,
    *,
    on: Ranks,
    version: str,
) -> EnginePlan:
    """The plan of this rank. `configs` are the arguments that may hold the configuration. `on` has all ranks.

    Raises:
        FzeroError: as `initialize`.
    """
    _check_model(model)
    given = resolve_auto(read_config(_choose_config(args, configs)), args)
    rank = on.number
    settings = settle(given, on.mesh.size(), version=version, args=args, rank=rank)
    if _is_function(optimizer):
        optimizer = optimizer(model.parameters() if model_parameters is None else model_parameters)
    groups = _find_groups(optimizer, model_parameters, settings, model)
    scheduled = _schedule(groups, settings, lr_scheduler, optimizer)
    numbers = {**dict(zip(SIZES, settings[:3])), "gradient_clipping": settings.clipping}
    lines = [*_list_keys(given | numbers), f"configuration of ranks: {settings.spread}", *_list_groups(groups)]
    return EnginePlan(model, settings, groups, scheduled, optimizer, lines)


def agree_on_plan(on: Ranks, make: Callable[[], EnginePlan]) -> EnginePlan:
    """The plan of this rank, `make()`, once all ranks of `on` have the same. Collective.

    Raises:
        FzeroError: on all ranks, with the key and both values, where plans differ; on all ranks, where one could not
            make its plan, with that rank and its error.
    """
    plan, error = None, None
    try:
        plan = make()
    except Exception as caught:  # the other ranks would wait for this one
        error = caught
    lines = plan.lines if plan is not None else []
    agree(on.members, digest(lines), lambda: lines, error, what="agreement on the configuration")
    assert plan is not None  # or that raised the error
    return plan


def _list_keys(given: Values) -> Iterator[str]:
    """A line for each key that changes what ranks compute, with its value or default."""
    for path, key in KEYS.items():
        if key.meaning not in ("honoured", "mapped") or key.alias_of or any(part in path for part in OF_A_RANK):
            continue
        name = path.removesuffix(".*")
        value = look_up(given, path) if name == path else given.get(name)
        items = sorted(value.items()) if isinstance(value, Mapping) else None
        yield f"configuration {name}: {value if items is None else items!r}"


def _list_groups(groups: list[Group] | GradientTransformation | None) -> Iterator[str]:
    """A line for each group of parameters."""
    for number, group in enumerate(groups if isinstance(groups, list) else []):
        name = getattr(getattr(group.make, "func", group.make), "__name__", "optimizer")
        paths = "all parameters" if group.paths is None else ", ".join(sorted(group.paths))
        options = ", ".join(f"{name} {value}" for name, value in sorted(group.options.items()))
        yield f"configuration of group {number}: {name} at rate {group.rate}, {options}, of {paths}"


def _find_groups(
    optimizer: Any, model_parameters: Any, settings: Settings, model: nn.Module
) -> list[Group] | GradientTransformation | None:
    """The groups of parameters and their optimizers, by the arguments of `initialize` or by the configuration."""
    if isinstance(optimizer, GradientTransformation):
        return optimizer
    if isinstance(optimizer, torch.optim.Optimizer):
        return convert_optimizer(optimizer, model)
    if optimizer is not None:
        problem = f"is a {type(optimizer).__name__}"
        raise FzeroError("optimizer", problem, "give an optimizer of torch.optim or fzero.optim, or a function")
    if settings.optimizer is None:
        return None
    kind, params = settings.optimizer
    if model_parameters is None or isinstance(model_parameters, nn.Module):
        model_parameters = (model if model_parameters is None else model_parameters).parameters()
    groups = list_groups(kind, params, model_parameters, model, "optimizer.type")
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    if len(groups) == 1 and groups[0].paths is not None and groups[0].paths >= trained:
        return [groups[0]._replace(paths=None)]
    return groups


def _is_function(optimizer: Any) -> bool:
    """Whether an argument is a function that makes an optimizer."""
    return callable(optimizer) and not isinstance(optimizer, (torch.optim.Optimizer, GradientTransformation))


def _schedule(
    groups: list[Group] | GradientTransformation | None, settings: Settings, lr_scheduler: Any, optimizer: Any
) -> Scheduled | Plateau:
    """What changes from update to update. `lr_scheduler` goes before that of the configuration, as in DeepSpeed."""
    if isinstance(groups, list):
        if lr_scheduler is not None:
            return convert_scheduler(lr_scheduler, optimizer, groups)
        return schedule_groups(groups, settings.scheduler)
    given = settings.scheduler[0] if lr_scheduler is None and settings.scheduler is not None else lr_scheduler
    if given is not None:
        what = "there is no optimizer" if groups is None else "the optimizer is one of fzero.optim"
        way_out = "give the config an optimizer, or the optimizer of fzero.optim a schedule (fzero.optim.deepspeed)"
        raise FzeroError("scheduler", f"is {given!r:.80}, and {what}", way_out)
    return []


def _check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise FzeroError("model", f"is {type(model).__name__}", "give a torch.nn.Module")
    if any(each.__name__ == "PipelineModule" for each in type(model).__mro__):
        raise FzeroError(
            "model",
            "is a PipelineModule, and initialize takes a plain module",
            "give that; fzero.parallel.pipeline cuts layers into stages (docs/parallel.md)",
        )


def _choose_config(args: Any, configs: Mapping[str, Any]) -> Any:
    """The one configuration that is given."""
    named = {**configs, "args.deepspeed_config": getattr(args, "deepspeed_config", None)}
    found = {name: value for name, value in named.items() if value is not None}
    if len(found) != 1:
        problem = f"is given {len(found)} times: {', '.join(found)}" if found else "is missing"
        raise FzeroError("config", problem, 'give one, a dict or a path: initialize(config="ds_config.json")')
    return next(iter(found.values()))
