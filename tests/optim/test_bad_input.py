"""Bad input of the public factories of `fzero.optim`: an error that names the argument or the leaf, and the value.

Factories and the types of their arguments are read off the package, so a new one is tried by itself.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable
from contextlib import nullcontext
from types import UnionType
from typing import Any, get_args

import pytest
import torch
from test_stages import MAKERS

from fzero import optim
from fzero.base.errors import FzeroError
from fzero.optim import deepspeed, loss_scale
from fzero.optim.base import Schedule

Parameter = inspect.Parameter


def parameters_of(function: Callable[..., Any]) -> dict[str, Parameter]:
    return dict(inspect.signature(function, eval_str=True).parameters)


def types_of(parameter: Parameter) -> tuple[Any, ...]:
    kind = parameter.annotation
    return get_args(kind) if isinstance(kind, UnionType) else (kind,)


def has_number(parameter: Parameter) -> bool:
    return any(kind in types_of(parameter) for kind in (int, float))


def is_schedule(function: Callable[..., Any]) -> bool:
    return inspect.signature(function, eval_str=True).return_annotation in (Schedule, deepspeed.OneCycle)


PUBLIC = {
    f"{room.__name__.removeprefix('fzero.')}.{name}": value
    for room in (optim, deepspeed, loss_scale)
    for name, value in vars(room).items()
    if inspect.isfunction(value) and (room is optim or value.__module__ == room.__name__) and name[0] != "_"
}
FACTORIES = {
    name: function
    for name, function in PUBLIC.items()
    if any(map(has_number, parameters_of(function).values())) and "params" not in parameters_of(function)
}
NUMBERS = [
    (factory, name)
    for factory, function in FACTORIES.items()
    for name, parameter in parameters_of(function).items()
    if has_number(parameter)
]
OF_SCHEDULES = [(factory, name) for factory, name in NUMBERS if is_schedule(FACTORIES[factory])]
STEPS = [(factory, name) for factory, name in OF_SCHEDULES if int in types_of(parameters_of(FACTORIES[factory])[name])]
RATES = {"b1", "b2", "decay", "momentum", "cycle_min_mom", "cycle_max_mom"}
DECAYS = [(factory, name) for factory, name in NUMBERS if name in RATES]
GOOD: dict[str, Any] = {
    "warmup_steps": 2,
    "warmup_max_lr": 0.1,
    "interpolate_type": "linear",
    "base_optimizer": optim.sgd(0.1),
    "inner": optim.sgd(0.1),
    "new_tensors": torch.ones(2),
    "old_tensors": torch.ones(2),
}
"""Arguments whose good values do not follow from their types."""


def make(factory: str, **given: Any) -> Any:
    """What a factory makes of good values for the arguments that it needs, and of those given."""
    needed = {
        name: GOOD.get(name, 10 if int in types_of(parameter) else 0.5)
        for name, parameter in parameters_of(FACTORIES[factory]).items()
        if parameter.default is Parameter.empty or name in GOOD
    }
    return FACTORIES[factory](**(needed | given))


def check_refused(factory: str, name: str, value: Any) -> None:
    with pytest.raises(FzeroError) as caught:
        make(factory, **{name: value})
    found = re.search(r"(\w+) is (.+)", caught.value.problem)
    assert found is not None and found[1] in name and caught.value.way_out, caught.value  # a stage may say less
    assert ("tensor" if isinstance(value, torch.Tensor) else repr(value)) in found[2]


def test_the_factories_are_those_of_the_package() -> None:
    assert {"optim.adamw", "optim.deepspeed.one_cycle", "optim.loss_scale.dynamic", "optim.ema"} <= set(FACTORIES)
    assert len({factory for factory, _ in OF_SCHEDULES}) >= 21 and len(STEPS) >= 25 and len(DECAYS) >= 20
    for factory in FACTORIES:
        make(factory)


def test_a_factory_without_an_argument_that_it_needs_is_named() -> None:
    needy = [
        factory
        for factory, function in FACTORIES.items()
        if any(x.default is Parameter.empty for x in parameters_of(function).values())
    ]
    assert len(needy) >= 20
    for factory in needy:
        with pytest.raises(TypeError, match=rf"^{factory.rpartition('.')[2]}\(\) missing .* required positional"):
            FACTORIES[factory]()


def test_what_is_no_optimizer_is_named() -> None:
    sgd: Any = optim.sgd
    for misuse in (
        lambda: optim.chain(sgd),
        lambda: optim.masked(sgd, lambda path, leaf: True),
        lambda: optim.multi_transform({"a": sgd}, lambda path, leaf: "a"),
        lambda: optim.apply_if_finite(sgd, 3),
        lambda: optim.cast_state(sgd, torch.bfloat16),
        lambda: optim.schedule_free(sgd, 0.1),
    ):
        with pytest.raises(FzeroError, match=r"sgd is no optimizer and no stage; call it, as sgd\(0\.1\)"):
            misuse()
    with pytest.raises(FzeroError, match="select: condition is True; give a 0-d bool tensor"):
        optim.select(True, {}, {})  # type: ignore[arg-type]
    with pytest.raises(FzeroError, match="unscale: state is 3.0; give the state of a LossScale"):
        optim.loss_scale.unscale({"a": torch.ones(2)}, 3.0)
    with pytest.raises(FzeroError, match="masked: mask is True; give a function"):
        optim.masked(sgd(0.1), True)  # type: ignore[arg-type]
    with pytest.raises(FzeroError, match="inner_factory is GradientTransformation.*; give the function that makes"):
        optim.inject_hyperparams(sgd(0.1))


@pytest.mark.parametrize("value", ["0.1", None, math.nan, -math.inf, torch.tensor([0.1, 0.2]), [0.1], 1j], ids=repr)
def test_what_is_no_number_is_named(value: Any, subtests: pytest.Subtests) -> None:
    for factory, name in NUMBERS:
        with subtests.test(f"{factory}({name})"):
            if value is None and type(None) in types_of(parameters_of(FACTORIES[factory])[name]):
                with pytest.raises(FzeroError, match=f"has no {name}") if name == "warmup_max_lr" else nullcontext():
                    make(factory, **{name: None})
            else:
                check_refused(factory, name, value)


def test_an_infinite_number_of_a_schedule_is_named(subtests: pytest.Subtests) -> None:
    for factory, name in OF_SCHEDULES:
        with subtests.test(f"{factory}({name})"):
            check_refused(factory, name, math.inf)


@pytest.mark.parametrize("value", [-1, -0.5, torch.tensor(3)], ids=repr)
def test_a_number_of_steps_is_a_number_that_is_not_negative(value: Any, subtests: pytest.Subtests) -> None:
    for factory, name in STEPS:
        with subtests.test(f"{factory}({name})"):
            check_refused(factory, name, value)


@pytest.mark.parametrize("value", [1.0, 1.5, -0.1])
def test_a_decay_rate_outside_of_its_interval_is_named(value: float, subtests: pytest.Subtests) -> None:
    for factory, name in DECAYS:
        with subtests.test(f"{factory}({name})"):
            words = rf"\w+ is {value}; (a decay rate lies in \[0, 1\)|give one in \(0, 1\))"
            with pytest.raises(FzeroError, match=words):
                make(factory, **{name: value})


def test_a_tensor_without_dimensions_is_a_number() -> None:
    schedule = optim.linear_schedule(torch.tensor(0.5), torch.tensor(1.0), 4)  # type: ignore[arg-type]
    assert [schedule(count).item() for count in (0, 2, 9)] == [0.5, 0.75, 1.0]


LATER = optim.constant_schedule(0.1)
CYCLE = {"init_value": 0.0, "peak_value": 0.1, "warmup_steps": 2, "decay_steps": 9}
MEANINGLESS: dict[str, tuple[Callable[[], Any], str]] = {
    "no tail": (lambda: optim.warmup_stable_decay_schedule(0, 1, 2, 3, 0), "decay_steps is 0; give a positive"),
    "unknown tail": (lambda: optim.warmup_stable_decay_schedule(0, 1, 2, 3, 4, decay=["cosine"]), r"decay is \['cosi"),  # type: ignore[arg-type]
    "unknown curve": (lambda: optim.piecewise_interpolate_schedule("unknown", 0.1), r"'unknown'; give one of \['lin"),  # type: ignore[arg-type]
    "no curve": (lambda: optim.piecewise_interpolate_schedule([], 0.1), r"interpolate_type is \[\]; give one of"),  # type: ignore[call-overload]
    "points": (lambda: optim.piecewise_constant_schedule(0.1, [3]), r"boundaries_and_scales is \[3\]; give a dict"),  # type: ignore[arg-type]
    "a boundary": (lambda: optim.piecewise_constant_schedule(0.1, {"3": 0.1}), "a boundary is '3'; give a finite"),  # type: ignore[dict-item]
    "a negative boundary": (lambda: optim.piecewise_constant_schedule(0.1, {-3: 0.1}), "a boundary is -3; give one"),
    "a scale": (lambda: optim.piecewise_constant_schedule(0.1, {3: math.nan}), "the scale at step 3 is nan; give"),
    "no schedule": (lambda: optim.join_schedules([LATER, 0.1], [3]), r"schedules\[1\] is 0\.1; give a schedule, such"),  # type: ignore[list-item]
    "no schedules": (lambda: optim.join_schedules(LATER, [3]), "schedules is <function.*; give a list"),  # type: ignore[arg-type]
    "no boundaries": (lambda: optim.join_schedules([LATER], None), "boundaries is None; give a list"),  # type: ignore[arg-type]
    "a joint": (lambda: optim.join_schedules([LATER, LATER], [math.nan]), r"boundaries\[0\] is nan; give a finite"),
    "joints": (lambda: optim.join_schedules([LATER] * 3, [5, 2]), r"boundaries are \[5, 2\]; give them in ascending"),
    "shares": (lambda: optim.linear_onecycle_schedule(9, 0.1, 0.9, 0.5), "pct_start is 0.9, pct_final is 0.5; give"),
    "a share": (lambda: optim.cosine_onecycle_schedule(9, 0.1, 1.5), r"pct_start is 1\.5; give shares of the steps"),
    "a factor": (lambda: optim.cosine_onecycle_schedule(9, 0.1, div_factor=0), "div_factor is 0; give a positive"),
    "no cycles": (lambda: optim.sgdr_schedule(3), "sgdr_schedule: has no cycle; give a list"),  # type: ignore[arg-type]
    "no cycle": (lambda: optim.sgdr_schedule([CYCLE, 3]), r"cosine_kwargs\[1\]: .*mapping.*; give a dict of arguments"),  # type: ignore[list-item]
    "a cycle's steps": (lambda: optim.sgdr_schedule([{"init_value": 0.0}]), r"cosine_kwargs\[0\]: .*'peak_value'"),
    "a warmup": (lambda: deepspeed.warmup_lr(0.0, 0.1, warmup_type=[]), r"warmup_type is \[\]; give one of \['log"),  # type: ignore[arg-type]
    "a norm": (lambda: optim.clip_by_global_norm(1.0, kind={}), r"kind is \{\}; give one of"),  # type: ignore[arg-type]
    "one number": (lambda: optim.adafactor(eps=1e-8), "eps is 1e-08; give two"),  # type: ignore[arg-type]
    "coefficients": (lambda: optim.muon(0.1, ns_coeffs=(1.0, 2.0, None)), r"ns_coeffs\[2\] is None; give a finite"),  # type: ignore[arg-type]
    "Newton-Schulz steps": (lambda: optim.muon(0.1, ns_steps=1.5), r"ns_steps is 1\.5; give 0 to 99 steps"),  # type: ignore[arg-type]
    "two numbers": (lambda: optim.adafactor(eps=(None, "a")), "min_scale is 'a'; give one that is at least 0"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", MEANINGLESS)
def test_what_means_nothing_is_named(name: str) -> None:
    call, message = MEANINGLESS[name]
    with pytest.raises(FzeroError, match=message):
        call()


# leaves

INTEGERS = MAKERS | {
    "sgd without momentum": lambda: optim.sgd(0.1),
    "muon": lambda: optim.muon(0.1, where=lambda path, leaf: leaf.ndim == 2),
    "adamw8bit": lambda: optim.adamw8bit(0.1),
    "clipped": lambda: optim.chain(optim.clip_by_global_norm(1.0), optim.sgd(0.1)),
    "groups": lambda: optim.multi_transform({0: optim.adam()}, lambda path, leaf: 0),
    "finite": lambda: optim.apply_if_finite(optim.adam(), 3),
}


@pytest.mark.parametrize("leaf", ["w", "b"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_integer_gradients_are_named(dtype: torch.dtype, leaf: str, subtests: pytest.Subtests) -> None:
    for name, make_optimizer in INTEGERS.items():
        with subtests.test(name):
            optimizer, params = make_optimizer(), {"layer": {"w": torch.ones(2, 3), "b": torch.ones(2)}}
            state = optimizer.init(params)
            grads = {"layer": params["layer"] | {leaf: params["layer"][leaf].to(dtype)}}
            words = rf"^layer\.{leaf}: dtype is {dtype}, an optimizer needs a floating one; set"
            with pytest.raises(FzeroError, match=words):
                optimizer.update(grads, state, params)


def test_integer_parameters_are_named(subtests: pytest.Subtests) -> None:
    words = r"^layer\.b: dtype is torch\.int64, an optimizer needs a floating one; set"
    for name in sorted(set(INTEGERS) - {"sgd without momentum", "clipped"}):  # they hold no leaves
        with subtests.test(name), pytest.raises(FzeroError, match=words):
            INTEGERS[name]().init({"layer": {"w": torch.ones(2, 3), "b": torch.ones(2, dtype=torch.int64)}})


def test_a_group_may_hold_integers_that_stay() -> None:
    groups = {True: optim.sgd(0.1), False: optim.set_to_zero()}
    optimizer = optim.multi_transform(groups, lambda path, leaf: leaf.dtype.is_floating_point)
    params = {"count": torch.tensor([3]), "w": torch.ones(2)}
    updates, _ = optimizer.update(params, optimizer.init(params), params)
    assert optim.apply_updates(params, updates)["count"].tolist() == [3]
