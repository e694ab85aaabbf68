"""Watches: where a value that a step reads from its surroundings changes, the step is traced again."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

import fzero
from fzero import optim
from fzero.tracing.read_objects import describe_value
from fzero.tracing.watches import find_watches

rate = 2.0
settings = {"rate": 2.0, "unread": 0.0}
betas = [0.5, 0.9]
pair = (2.0, 3.0)
phase: Any = None  # set below
act: Any = torch.sin
tensors = [torch.ones(2)]
numbers = np.full(3, 2.0)
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

    def by_local(self, x: Tensor) -> Tensor:
        rate = self.rate
        return (lambda y: y * rate)(x)

    def by_object(self, x: Tensor) -> Tensor:
        options = self.options
        return (lambda y: y * options.rate)(x)

    @property
    def half(self) -> float:
        return self.rate / 2

    def by_property(self, x: Tensor) -> Tensor:
        return x * self.half


class Phase(Enum):
    WARM, COOL = range(2)


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


def by_two(x: Tensor) -> Tensor:
    a, b = pair
    return x * a * b


def by_default(x: Tensor, factor: float = 2.0) -> Tensor:
    return x * factor


def by_options(x: Tensor, options: Any = Trainer()) -> Tensor:  # noqa: B008
    return x * options.rate


def in_a_partial() -> Case:
    step = functools.partial(by_default, factor=2.0)
    return Case(step, lambda: step.keywords.update(factor=5.0), "factor")


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
    "a local variable": lambda: of_trainer(lambda t: t.by_local, lambda t: setattr(t, "rate", 5.0), "self.rate"),
    "a local object": lambda: of_trainer(lambda t: t.by_object, lambda t: setattr(t.options, "rate", 5), "rate"),
    "a property": lambda: of_trainer(lambda t: t.by_property, lambda t: setattr(t, "rate", 5.0), "self.rate"),
    "getattr": lambda: Case(lambda x: x * getattr(Trainer, "scale", 1), lambda: setattr(Trainer, "scale", 5), "scale"),
    "a tuple, unpacked": lambda: Case(by_two, set_global("pair", (2.0, 5.0)), "pair"),
    "a list, in a loop": lambda: Case(lambda x: sum(x * b for b in betas), lambda: betas.append(2.0), "betas"),
    "a length": lambda: Case(lambda x: x * len(betas), lambda: betas.append(2.0), "betas"),
    "a dict, by get": lambda: Case(lambda x: x * settings.get("rate"), lambda: settings.update(rate=5), "settings"),
    "a list of tensors": lambda: Case(lambda x: sum(x * y for y in tensors), lambda: tensors.append(number), "tensors"),
    "a number of numpy": lambda: Case(lambda x: x * numbers[0], lambda: numbers.fill(5.0), "numbers[0]"),
    "an enum": lambda: Case(lambda x: x * (2 if phase is Phase.WARM else 3), set_global("phase", Phase.COOL), "phase"),
    "a function of torch": lambda: Case(lambda x: act(x), set_global("act", torch.cos), "act"),
    "a default": lambda: Case(by_default, lambda: setattr(by_default, "__defaults__", (5.0,)), "factor"),
    "an object by default": lambda: Case(by_options, lambda: setattr(by_options.__defaults__[0], "rate", 5), "options"),
    "an object of a partial": lambda: of_trainer(
        lambda t: functools.partial(lambda t, x: x * t.rate, t), lambda t: setattr(t, "rate", 5.0), "t.rate"
    ),
    "a keyword of a partial": in_a_partial,
    "a tensor's number": lambda: Case(lambda x: x * float(number), lambda: number.fill_(5.0), "elements of number"),
    "a tensor's numbers": lambda: Case(lambda x: x * captured.tolist()[1], lambda: captured.fill_(5.0), "captured"),
    "a tensor in a tensor": lambda: Case(lambda x: x * torch.tensor([number, 1]), lambda: number.fill_(4.0), "number"),
    "another tensor": lambda: Case(lambda x: x * captured, set_global("captured", torch.ones(2)), "captured"),
}  # fmt: skip
number = torch.tensor(3.0)
phase = Phase.WARM


@pytest.fixture(autouse=True)
def as_they_were() -> Any:
    before = dict(globals()), dict(settings), list(betas), captured.clone(), number.clone(), list(tensors)
    yield
    globals().update(before[0])
    settings.update(before[1])
    betas[:] = before[2]
    captured.copy_(before[3])
    number.copy_(before[4])
    tensors[:] = before[5]
    numbers.fill(2.0)
    Trainer.scale, by_default.__defaults__ = 3.0, (2.0,)


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


def test_a_table_that_the_step_fills_does_not_have_it_traced_again(caplog: pytest.LogCaptureFixture) -> None:
    table = dict[int, float]()

    def step(x: Tensor) -> Tensor:
        if len(x) not in table:
            table[len(x)] = float(len(x))
        return x * table[len(x)]

    sharded = fzero.simulate(step, 2)
    for rows in (4, 8, 4, 8):
        assert torch.equal(sharded(torch.ones(rows)), torch.full((rows,), rows / 2))
    assert sum("traced again" in message for message in caplog.messages) == 1


def test_an_entry_of_a_tensor_that_a_step_writes_hides_no_list() -> None:
    factors = [2.0]

    def step(x: Tensor) -> Any:
        y = x.clone()
        y[:, 0] = 0.5
        return sum(y * factor for factor in factors)

    sharded, x = fzero.simulate(step, 2), torch.ones(2, 3)
    for _ in range(3):
        assert torch.equal(sharded(x), step(x))
        factors.append(3.0)


def test_a_table_that_a_step_fills_by_another_name_is_no_surrounding(caplog: pytest.LogCaptureFixture) -> None:
    class Owner:
        def __init__(self) -> None:
            self.table = dict[int, float]()

        def step(self, x: Tensor) -> Tensor:
            table = self.table
            table[x.shape[1]] = float(x.shape[1])
            return x * sum(table.values())

    sharded = fzero.simulate(Owner().step, 2)
    for rows in (2, 3, 2):
        sharded(torch.ones(2, rows))
    assert sum("it reads" in message for message in caplog.messages) == 0


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
