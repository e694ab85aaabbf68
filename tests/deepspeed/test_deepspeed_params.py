"""Params of optimizers and schedulers in a configuration: a wrong value is an error that names the param.

The params of each type are read off the code, so a new one is tried by itself.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from deepspeed_models import make_engine

from fzero import FzeroError, optim
from fzero.deepspeed.schedulers import _MAKERS, schedule_groups
from fzero.optim import deepspeed
from fzero.optim.kinds import KINDS, Group, Options, make_group

WRONG = ("text", "1e-4", [1], [0.9, "b"], [None, None], {"a": 1}, float("nan"), 1e400, [2.0, 0.9], torch.ones(2))
GROUP = Group(optim.adam, 1e-3, {"b1": 0.9, "b2": 0.999})
NEEDED = {"WarmupDecayLR": {"total_num_steps": 9}, "WarmupCosineLR": {"total_num_steps": 9}}
NEEDED["OneCycle"] = {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-2}  # type: ignore[dict-item]
MAKERS = dict(
    zip(_MAKERS, ("lr_range_test", "one_cycle", "warmup_lr", "warmup_decay_lr", "warmup_cosine_lr"), strict=True)
)
OF_TORCH = {"adjust_lr_fn", "ns_coefficients", "ns_steps"}
"""Params of torch.optim.Muon, whose constructor checks them: no configuration has them."""


def list_wrong(*, below_zero: bool) -> list[Any]:
    """Values that are wrong for each param, and for most a number below zero."""
    return [*WRONG, -2.5] if below_zero else list(WRONG)


def list_params(kind: str) -> list[str]:
    """The params that an optimizer of a configuration asks for."""
    options = Options({}, "optimizer.type")
    KINDS[kind](options, False)
    return [name for name in options._known if name not in OF_TORCH]


def list_scheduler_params(kind: str) -> list[str]:
    """The params that a scheduler of a configuration asks for: the rate of WarmupCosineLR is the optimizer's."""
    return [name for name in inspect.signature(getattr(deepspeed, MAKERS[kind])).parameters if name != "lr"]


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in KINDS for name in list_params(kind)])
def test_a_wrong_param_of_an_optimizer_is_named(kind: str, name: str) -> None:
    for value in list_wrong(below_zero=name != "beta2_decay"):
        with pytest.raises(FzeroError, match=rf"^optimizer\.params\.{name}: is "):
            make_group(kind, {name: value}, "optimizer.type")


def test_params_of_deepspeeds_muon_are_named_as_given() -> None:
    for name in ("muon_lr", "adam_lr"):
        config = {"train_batch_size": 8, "optimizer": {"type": "Muon", "params": {name: "fast"}}}
        with pytest.raises(FzeroError, match=rf"optimizer\.params\.{name}: is 'fast', a str; give a number"):
            make_engine(config)


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in MAKERS for name in list_scheduler_params(kind)])
def test_a_wrong_param_of_a_scheduler_is_named(kind: str, name: str) -> None:
    params: dict[str, Any] = NEEDED.get(kind, {})
    for value in [*list_wrong(below_zero=name.endswith("_lr")), 10**30]:
        with pytest.raises(FzeroError, match=rf"^scheduler\.params.*\b{name}\b.* is "):
            schedule_groups([GROUP], (kind, {**params, name: value}))


def test_a_scheduler_that_begins_later_is_refused() -> None:
    assert schedule_groups([GROUP], ("WarmupLR", {"last_batch_iteration": -1}))
    with pytest.raises(FzeroError, match=r"params\.last_batch_iteration: is 3, which is not supported; leave it out"):
        schedule_groups([GROUP], ("WarmupLR", {"last_batch_iteration": 3}))
