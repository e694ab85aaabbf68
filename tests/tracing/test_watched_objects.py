"""Objects that a step hands on: what code may read of them is watched, what no code reads may change."""

from __future__ import annotations

import argparse
import collections
import functools
import os
import sys
import weakref
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fzero


@dataclass
class Config:
    scale: float = 2.0
    epoch: int = 0
    inner: Any = None
    items: list[Any] = field(default_factory=list)


class Case(NamedTuple):
    step: Callable[..., Any]
    change: Callable[[], Any]
    args: tuple[Any, ...] = ()


def put(owner: Any, name: str = "scale", value: Any = 5.0) -> Callable[[], None]:
    return lambda: setattr(owner, name, value)


def by_scale(config: Any, x: Tensor) -> Tensor:
    return x * config.scale


class Loss:
    def __init__(self, config: Config) -> None:
        self.config = config

    def __call__(self, x: Tensor) -> Tensor:
        return by_scale(self.config, x)


class Doubled:
    """A descriptor that computes."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = f"_{name}"

    def __get__(self, owner: Any, cls: type) -> Any:
        return self if owner is None else 2 * vars(owner)[self.name]


class Described:
    scale = Doubled()

    def __init__(self) -> None:
        self._scale = 2.0


class Single:
    made: Config | None = None

    @classmethod
    def get(cls) -> Config:
        if cls.made is None:
            cls.made = Config()
        return cls.made


class Event:
    def __init__(self) -> None:
        self.state, self.call = Config(), by_state

    def fire(self, x: Tensor) -> Tensor:
        return self.call(self, x)


def by_state(event: Event, x: Tensor) -> Tensor:
    return x * event.state.scale


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.act = nn.LeakyReLU(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(-x) * factor


factor = 2.0


def change_factor() -> None:
    global factor
    factor = 5.0


def in_a_list() -> Case:
    configs = [Config(), Config()]
    return Case(lambda x: sum(by_scale(c, x) for c in configs), put(configs[1]))


def in_a_table() -> Case:
    losses = {"a": Loss(Config()), "b": Loss(Config())}
    return Case(lambda x: sum(loss(x) for loss in losses.values()), put(losses["b"].config))


def of_one(make: Callable[[Config], Callable[[Tensor], Any]]) -> Case:
    config = Config()
    return Case(make(config), put(config))


def by_weakref(config: Config) -> Callable[[Tensor], Any]:
    ref = weakref.ref(config)
    return lambda x: by_scale(ref(), x)


def by_cached(config: Config) -> Callable[[Tensor], Any]:
    get = functools.lru_cache(lambda: config)
    return lambda x: x * get().scale


def by_decorated(config: Config) -> Callable[[Tensor], Any]:
    def decorate(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        @functools.wraps(fn)
        def called(*args: Any) -> Tensor:
            return fn(*args)

        return called

    return decorate(lambda x: x * config.scale)


def imported() -> Case:
    module = sys.modules["settings_of_a_test"] = ModuleType("settings_of_a_test")
    module.scale = 2.0  # type: ignore[attr-defined]

    def step(x: Tensor) -> Tensor:
        from settings_of_a_test import scale  # type: ignore[import-not-found]

        return x * scale

    return Case(step, put(module))


def in_environment(read: Callable[[], Any]) -> Case:
    os.environ["FZERO_TEST_SCALE"] = "2"
    return Case(lambda x: x * float(read()), lambda: os.environ.update(FZERO_TEST_SCALE="5"))


def of_a_module(make: Callable[[], nn.Module], change: Callable[[Any], None]) -> Case:
    module = make()
    return Case(lambda x: module(x), lambda: change(module))


def of_another_class() -> Case:
    described = Described()
    return Case(lambda x: by_scale(described, x), put(described, "_scale"))


def of_a_callback() -> Case:
    event = Event()
    return Case(lambda x: event.fire(x), put(event.state))


def of_one_that_is_made_once() -> Case:
    Single.made = None
    return Case(lambda x: x * Single.get().scale, lambda: setattr(Single.get(), "scale", 5.0))


def of_a_lowered_module() -> Case:
    params, apply = fzero.lower(nn.Sequential(Net()))
    return Case(lambda x: apply(params, x), change_factor)


def as_argument(value: Any, step: Callable[[Tensor, Any], Any], change: Callable[[Any], Any]) -> Case:
    return Case(step, lambda: change(value), (value,))


CASES: dict[str, Callable[[], Case]] = {
    "a helper": lambda: of_one(lambda config: lambda x: by_scale(config, x)),
    "a helper of an object": lambda: of_one(Loss),
    "a keyword": lambda: of_one(lambda config: lambda x: by_scale(x=x, config=config)),
    "an object inside": lambda: of_one(lambda config: functools.partial(by_inner, Config(inner=config))),
    "a list": in_a_list,
    "a table of losses": in_a_table,
    "a weak reference": lambda: of_one(by_weakref),
    "a cached function": lambda: of_one(by_cached),
    "a decorated function": lambda: of_one(by_decorated),
    "a namespace": lambda: (lambda c: Case(lambda x: by_scale(c, x), put(c)))(SimpleNamespace(scale=2.0)),
    "arguments": lambda: (lambda c: Case(lambda x: by_scale(c, x), put(c)))(argparse.Namespace(scale=2.0)),
    "an import": imported,
    "os.environ": lambda: in_environment(lambda: os.environ["FZERO_TEST_SCALE"]),
    "os.getenv": lambda: in_environment(lambda: os.getenv("FZERO_TEST_SCALE")),
    "a module of torch": lambda: of_a_module(nn.Softplus, lambda m: setattr(m, "beta", 2.0)),
    "a module in a module": lambda: of_a_module(Net, lambda m: setattr(m.act, "negative_slope", 2.0)),
    "a global of a module": lambda: of_a_module(Net, lambda m: change_factor()),
    "a global of a lowered module": of_a_lowered_module,
    "a descriptor": of_another_class,
    "a callback": of_a_callback,
    "an object that is made once": of_one_that_is_made_once,
    "a deque": lambda: (lambda q: Case(lambda x: x * q[0], lambda: q.appendleft(5.0)))(collections.deque([2.0])),
    "an array of numpy": lambda: (lambda a: Case(lambda x: first(a, x), lambda: a.fill(5.0)))(np.full(3, 2.0)),
    "an array": lambda: (lambda a: Case(lambda x: first(a, x), lambda: a.insert(0, 5.0)))(array("d", [2.0])),
    "a dict that makes what it lacks": lambda: (
        lambda d: Case(lambda x: x * d["scale"], lambda: d.update(scale=5.0))
    )(collections.defaultdict(lambda: 2.0)),
    "an argument's object": lambda: as_argument(
        Config(inner=Config()), lambda x, c: x * c.inner.scale, lambda c: setattr(c.inner, "scale", 5.0)
    ),
    "an argument's list": lambda: as_argument(
        Config(items=[2.0]), lambda x, c: x * c.items[0], lambda c: c.items.insert(0, 5.0)
    ),
    "an argument's method": lambda: as_argument(Net(), lambda x, net: net(x), lambda net: change_factor()),
    "a function as argument": lambda: (lambda c: as_argument(
        lambda x: by_scale(c, x), lambda x, fn: fn(x), lambda fn: setattr(c, "scale", 5.0)
    ))(Config()),
    "a partial as argument": lambda: as_argument(
        functools.partial(by_scale, Config()), lambda x, fn: fn(x), lambda fn: setattr(fn.args[0], "scale", 5.0)
    ),
}  # fmt: skip


def first(values: Any, x: Tensor) -> Tensor:
    return x * float(values[0])


def by_inner(config: Config, x: Tensor) -> Tensor:
    return by_scale(config.inner, x)


@pytest.fixture(autouse=True)
def as_they_were() -> Any:
    yield
    globals().update(factor=2.0)
    os.environ.pop("FZERO_TEST_SCALE", None)
    sys.modules.pop("settings_of_a_test", None)


@pytest.mark.parametrize("name", CASES)
def test_what_a_step_hands_on_is_watched(name: str, caplog: pytest.LogCaptureFixture) -> None:
    step, change, args = CASES[name]()
    x, sharded = torch.ones(2, 2), fzero.simulate(step, 2)
    first = sharded(x, *args)
    assert torch.equal(first, step(x, *args)) and torch.equal(sharded(x, *args), first) and not caplog.messages
    change()
    assert torch.equal(sharded(x, *args), step(x, *args)) and not torch.equal(first, sharded(x, *args))
    assert sum("traced again" in message for message in caplog.messages) == 1


def test_what_no_code_reads_may_change(caplog: pytest.LogCaptureFixture) -> None:
    class Trainer:
        def __init__(self) -> None:
            self.config, self.epoch, self.log, self.seen = Config(), 0, list[float](), dict[int, int]()

        def step(self, x: Tensor) -> Tensor:
            self.seen[len(x)] = 1
            return by_config(self, x)

        def fit(self, step: Any) -> None:
            for self.epoch in range(3):
                self.log.append(step(torch.ones(2)).sum().item())
                self.config.epoch += 1

    def by_config(trainer: Trainer, x: Tensor) -> Tensor:
        return by_scale(trainer.config, x)

    trainer = Trainer()
    trainer.fit(fzero.simulate(trainer.step, 2))
    assert trainer.log == [4.0] * 3 and not caplog.messages


def test_a_message_names_the_attribute(caplog: pytest.LogCaptureFixture) -> None:
    config = Config(inner=Config())
    step = fzero.simulate(lambda x: by_inner(config, x), 2)
    step(torch.ones(2))
    config.inner.scale = 5.0
    step(torch.ones(2))
    assert "it reads config.inner.scale, which changed" in caplog.text


def test_a_slot_without_a_value_is_no_obstacle() -> None:
    class Slots:
        __slots__ = ("scale",)

    slots = Slots()

    def step(x: Tensor) -> Tensor:
        return x * getattr(slots, "scale", 2.0) * (slots.scale if hasattr(slots, "scale") else 3.0)

    sharded = fzero.simulate(step, 2)
    assert torch.equal(sharded(torch.ones(2)), torch.full((2,), 6.0))
    slots.scale = 5.0
    assert torch.equal(sharded(torch.ones(2)), torch.full((2,), 25.0))


def test_an_object_that_raises_for_any_name_is_no_obstacle() -> None:
    class Strict:
        def __getattr__(self, name: str) -> float:
            return {"scale": 2.0}[name]

    strict = Strict()
    assert torch.equal(fzero.simulate(lambda x: by_scale(strict, x), 2)(torch.ones(2)), torch.full((2,), 2.0))
