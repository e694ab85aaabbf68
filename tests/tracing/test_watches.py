"""Watches: where a value that a step reads from its surroundings changes, the step is traced again."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import fzero
from fzero import optim
from fzero.tracing.watches import describe_value, find_watches

rate = 2.0
settings = {"rate": 2.0, "unread": 0.0}
betas = [0.5, 0.9]
captured = torch.tensor([1.0, 2.0])


def scaled(x: Tensor) -> Tensor:
    return x * rate


class Slots:
    __slots__ = ("rate",)


class Trainer:
    scale = 3.0

    def __init__(self) -> None:
        self.rate, self.calls, self.options = 2.0, 0, Slots()
        self.options.rate = 2.0

    def step(self, x: Tensor) -> Tensor:
        return self.by_rate(x) * self.scale

    def by_rate(self, x: Tensor) -> Tensor:
        return x * self.rate * self.options.rate

    def __call__(self, x: Tensor) -> Tensor:
        return self.step(x)


class Case(NamedTuple):
    step: Callable[[Tensor], Any]
    change: Callable[[], None]
    name: str


def in_closure() -> Case:
    factor = 2.0

    def change() -> None:
        nonlocal factor
        factor = 5.0

    return Case(lambda x: (lambda y: y * factor)(x), change, "factor")


def of_trainer(pick: Callable[[Trainer], Any], change: Callable[[Trainer], None], name: str) -> Case:
    trainer = Trainer()
    return Case(pick(trainer), lambda: change(trainer), name)


def by_schedule(optimizer: optim.GradientTransformation) -> Callable[[Tensor], Any]:
    return lambda x: optimizer.update([x], optimizer.init([x]), [x])[0][0]


def set_global(name: str, value: Any) -> Callable[[], None]:
    return lambda: globals().update({name: value})


CASES: dict[str, Callable[[], Case]] = {
    "a closure": in_closure,
    "a global": lambda: Case(scaled, set_global("rate", 5.0), "rate"),
    "a global of a function that is called": lambda: Case(lambda x: scaled(x) + 1, set_global("rate", 5.0), "rate"),
    "a function": lambda: Case(lambda x: scaled(x), set_global("scaled", torch.sin), "scaled"),
    "a partial": lambda: Case(functools.partial(lambda y, x: scaled(x) + y, 1), set_global("rate", 5.0), "rate"),
    "a transform": lambda: Case(fzero.grad(lambda x: scaled(x).sum()), set_global("rate", 5.0), "rate"),
    "a dict": lambda: Case(lambda x: x * settings["rate"], lambda: settings.update(rate=5.0), "settings['rate']"),
    "a list": lambda: Case(lambda x: x * betas[1], lambda: betas.__setitem__(1, 0.1), "betas[1]"),
    "a schedule": lambda: Case(by_schedule(optim.sgd(lambda count: -rate)), set_global("rate", 5.0), "rate"),
    "an attribute": lambda: of_trainer(lambda t: t.step, lambda t: setattr(t, "rate", 5.0), "self.rate"),
    "an attribute, called": lambda: of_trainer(lambda t: t, lambda t: setattr(t, "rate", 5.0), "self.rate"),
    "a slot": lambda: of_trainer(lambda t: t.step, lambda t: setattr(t.options, "rate", 5.0), "self.options.rate"),
    "an attribute of the class": lambda: of_trainer(lambda t: t.step, lambda t: setattr(t, "scale", 5.0), "self.scale"),
    "a tensor's number": lambda: Case(lambda x: x * float(number), lambda: number.fill_(5.0), "elements of number"),
    "a tensor's numbers": lambda: Case(lambda x: x * captured.tolist()[1], lambda: captured.fill_(5.0), "captured"),
    "a tensor in a tensor": lambda: Case(lambda x: x * torch.tensor([number, 1]), lambda: number.fill_(4.0), "number"),
    "another tensor": lambda: Case(lambda x: x * captured, set_global("captured", torch.ones(2)), "captured"),
}  # fmt: skip
number = torch.tensor(3.0)


@pytest.fixture(autouse=True)
def as_they_were() -> Any:
    before = dict(globals()), dict(settings), list(betas), captured.clone(), number.clone()
    yield
    globals().update(before[0])
    settings.update(before[1])
    betas[:] = before[2]
    captured.copy_(before[3])
    number.copy_(before[4])


@pytest.mark.parametrize("name", CASES)
def test_a_value_that_changes_is_read_again(name: str, caplog: pytest.LogCaptureFixture) -> None:
    step, change, said = CASES[name]()
    x, sharded = torch.ones(1, 2), fzero.simulate(step, 1)
    first = sharded(x)
    assert torch.equal(first, step(x)) and torch.equal(sharded(x), first) and not caplog.messages
    change()
    assert torch.equal(sharded(x), step(x)) and not torch.equal(first, step(x))
    assert len(caplog.messages) == 1 and said in caplog.messages[0] and "traced again" in caplog.messages[0]


def test_what_a_step_does_not_read_may_change(caplog: pytest.LogCaptureFixture) -> None:
    trainer = Trainer()
    steps = [trainer.step, lambda x: x * settings["rate"], lambda x: x.mean() * captured]
    sharded = [fzero.simulate(step, 2) for step in steps]
    for turn in range(3):
        trainer.calls, settings["unread"] = turn, float(turn)
        globals().update(mean=turn)  # the name of an attribute is no name of a global
        captured.fill_(turn)  # a constant is held by reference
        results = [each(torch.ones(2, 2)) for each in sharded]
    assert torch.equal(results[2], torch.full((4,), 2.0)) and not caplog.messages


def test_a_plain_object_among_the_arguments_is_known_by_its_attributes() -> None:
    options = Trainer()
    step = fzero.simulate(lambda x, options: x * options.rate, 2)
    assert step(torch.ones(2), options).tolist() == [2, 2]
    options.rate = 7.0
    assert step(torch.ones(2), options).tolist() == [7, 7]


def test_equal_numbers_may_differ() -> None:
    nan = float("nan")
    assert describe_value(nan) == describe_value(-nan + 0) and describe_value(0.0) != describe_value(-0.0)
    assert len({str(describe_value(x)) for x in (1, 1.0, True)}) == 3


def test_watches_keep_no_object_alive() -> None:
    class Holder:
        value = 1.0

    holder = Holder()
    found = find_watches(lambda x: x * holder.value)  # noqa: F821  it is deleted below
    assert [watch.name for watch in found] == ["holder.value"] and found[0].is_unchanged
    there = weakref.ref(holder)
    del holder
    gc.collect()
    assert there() is None and not found[0].is_unchanged


def test_an_empty_tuple_in_the_code_is_no_pair_of_variables() -> None:
    assert not find_watches(lambda: torch.zeros(()))


def test_a_count_of_its_own_calls_does_not_have_a_step_traced_again() -> None:
    class Counter:
        steps = 0

        def step(self, x: Tensor) -> Tensor:
            self.steps += 1
            return x * 2

    counter = Counter()
    step = fzero.simulate(counter.step, 2)
    for _ in range(3):
        step(torch.ones(2))
    assert counter.steps == 1
