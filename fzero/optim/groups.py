"""Optimizers: a type and params of a configuration, or an optimizer of torch, as optimizers of `fzero.optim`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fzero.base.errors import FzeroError
from fzero.optim.base import GradientTransformation
from fzero.optim.inject import inject_hyperparams
from fzero.optim.kinds import (
    KINDS,
    OF_OBJECTS,
    OF_SPEED,
    Group,
    Options,
    make_adam_beside_muon,
    make_group,
    make_muon,
)
from fzero.optim.wrappers import multi_transform, set_to_zero


def convert_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[Group]:
    """The groups of an optimizer of torch, by its exact type.

    Raises:
        FzeroError: for a type that is not converted, a parameter that is not the model's, and an optimizer that has
            made steps already.
    """
    kind = type(optimizer)
    name = _NAMES.get(f"{kind.__module__}.{kind.__name__}", kind.__name__.lower())
    if isinstance(optimizer, GroupHolder):
        name = optimizer.kind
    elif kind.__module__.partition(".")[0] not in ("torch", "transformers") or name not in {**KINDS, **OF_OBJECTS}:
        problem = f"is a {kind.__module__}.{kind.__name__}, which is not converted"
        raise FzeroError("optimizer", problem, "give an optimizer of torch.optim or of fzero.optim, or a configuration")
    if any(float(state.get("step", 1)) for state in optimizer.state.values()):  # a new Adagrad has states at step 0
        raise FzeroError("optimizer", "has made steps already", "give a new one, and load its state from a checkpoint")
    return list_groups(name, {}, optimizer.param_groups, model, "optimizer", torch_defaults=True)


_NAMES = {"transformers.optimization.Adafactor": "adafactor of transformers"}
"""The kinds of optimizers whose class has the name of one of torch."""


class GroupHolder(torch.optim.Optimizer):
    """An optimizer without a step of its own: it has groups of parameters and their rates, and `kind` says which
    optimizer of `fzero.optim` updates them."""

    def __init__(self, params: Any, *, kind: str, lr: float, **options: Any) -> None:
        self.kind = kind
        super().__init__(params, {"lr": lr, **options})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do nothing: hooks of the step update."""


def list_groups(
    kind: str,
    params: Mapping[str, Any],
    groups: Iterable[Any],
    model: nn.Module,
    where: str,
    *,
    torch_defaults: bool = False,
) -> list[Group]:
    """One group for each dict of parameters, with the params of all groups and its own; parameters outside of dicts
    are one more group.

    Raises:
        FzeroError: for a parameter that is not the model's, or that is in two groups.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found: list[Group] = []
    if not isinstance(groups, Iterable) or isinstance(groups, (str, bytes)):
        raise FzeroError(where, f"is {groups!r:.80}", "give parameters, or a list of dicts of parameters")
    members = list(groups)
    if not members:
        way_out = "give model.parameters() itself; an iterator that was read before is empty"
        raise FzeroError("model_parameters", "has no parameter", way_out)
    loose = [member for member in members if not isinstance(member, Mapping)]
    dicts = [member for member in members if isinstance(member, Mapping)] + [{"params": loose}] * bool(loose)
    seen: set[str] = set()
    for number, member in enumerate(dicts):
        if "params" not in member:
            way_out = "give each group as {'params': [...], ...}"
            raise FzeroError(where, f"group {number} has {list(member)}, and no 'params'", way_out)
        given = member["params"]
        paths = {_find_name(x, names, number) for x in ([given] if isinstance(given, torch.Tensor) else given)}
        if paths & seen:
            raise FzeroError(min(paths & seen), "is in two groups of parameters", "put it into one")
        seen |= paths
        own = {name: value for name, value in member.items() if name not in _OF_SCHEDULERS}
        if kind.lower() == "muon" and not torch_defaults:
            found += _split_for_muon(params, own, paths, model, where)
        else:
            group = make_group(kind, {**params, **own}, where, torch_defaults=torch_defaults)
            found.append(group._replace(paths=frozenset(paths)))
    return found


def _split_for_muon(
    params: Mapping[str, Any], own: Mapping[str, Any], paths: Iterable[str], model: nn.Module, where: str
) -> Iterator[Group]:
    """The groups of DeepSpeed's Muon: its matrices, and Adam for all others. DeepSpeed takes each trained parameter of
    2 or more dimensions for a matrix, unless its name says that it is an embedding or a head. A rate of a group's own
    goes before `muon_lr` and `adam_lr`, which go before `lr`."""
    trained = {path: x for path, x in model.named_parameters() if x.requires_grad}
    words = ("embed", "lm_head")
    is_matrix = {
        path: trained[path].ndim >= 2 and not any(word in path.lower() for word in words)
        for path in paths
        if path in trained
    }
    of_halves = {"muon_lr", "adam_lr"}
    for make, rate, chosen in ((make_muon, "muon_lr", True), (make_adam_beside_muon, "adam_lr", False)):
        members = frozenset(path for path, value in is_matrix.items() if value is chosen)
        if not members:
            continue
        given = {name: value for name, value in params.items() if name not in of_halves}
        given |= {"lr": Options(dict(params), where).number(rate, 0.0)} if rate in params else {}
        options = Options({**given, **own}, where)
        group = make(options)
        options.check_empty()
        yield group._replace(paths=members)


_OF_SCHEDULERS = (
    *("params", "param_names", "initial_lr", "max_lr", "min_lr", "initial_momentum", "max_momentum", "base_momentum"),
)
"""What is in a group of torch and is no param of its optimizer: schedulers write most of these."""


def list_options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """What each group of an optimizer has beside parameters and its rate: what programs take once."""
    left_out = {*_OF_SCHEDULERS, *OF_SPEED, "lr"}
    return [{name: x for name, x in group.items() if name not in left_out} for group in optimizer.param_groups]


def check_options(optimizer: torch.optim.Optimizer, before: Sequence[Mapping[str, Any]]) -> None:
    """Refuse groups whose options are no longer those of `list_options` `before`.

    Raises:
        FzeroError: naming the group, the option and both values.
    """
    way_out = "give the value at first; a rate, lr, may change at each update"
    now = list_options(optimizer)
    if len(now) != len(before):
        raise FzeroError("optimizer", f"had {len(before)} groups of parameters and has {len(now)}", way_out)
    for number, (old, new) in enumerate(zip(before, now)):
        for name in old.keys() & new.keys():
            if old[name] != new[name]:
                problem = f"was {old[name]!r} when the state was made, and is {new[name]!r}"
                raise FzeroError(f"optimizer: group {number}: {name}", problem, way_out)


def _find_name(parameter: Any, names: Mapping[int, str], number: int) -> str:
    parameter = parameter[1] if isinstance(parameter, tuple) else parameter  # of named_parameters()
    if id(parameter) not in names:
        shape = tuple(getattr(parameter, "shape", ()))
        problem = f"group {number} has a {type(parameter).__name__} of shape {shape} that is no parameter of the model"
        raise FzeroError("model_parameters", problem, "give parameters of the model that is trained")
    return names[id(parameter)]


def combine(groups: Sequence[Group], schedules: Sequence[Mapping[str, Any]]) -> GradientTransformation:
    """One optimizer of all groups. `schedules` has for each group the hyperparameters that change, such as
    `learning_rate`. A parameter outside of all groups is not updated."""
    made = [
        inject_hyperparams(group.make)(**{**group.options, **changing}) for group, changing in zip(groups, schedules)
    ]
    return join(groups, made)


def join(groups: Sequence[Group], made: Sequence[GradientTransformation]) -> GradientTransformation:
    """One optimizer of these optimizers, one for each group. A parameter outside of all groups is not updated."""
    if len(made) == 1 and groups[0].paths is None:
        return made[0]
    label = {path: str(number) for number, group in enumerate(groups) for path in group.paths or ()}
    transforms = {str(number): each for number, each in enumerate(made)} | {"none": set_to_zero()}
    return multi_transform(transforms, lambda path, leaf: label.get(path, "none"))
