"""Reachable objects: the names of the places where a function, or an object, holds things."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import fzero
from fzero.base.reachable import find_tensor, walk

GLOBAL: dict[str, Any] = {}


class Thing:
    __slots__ = ("slot",)

    def __init__(self, slot: Any) -> None:
        self.slot = slot


class Keeper:
    kept: ClassVar[list[Any]] = []

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def method(self) -> None:
        pass

    @staticmethod
    def static() -> Any:
        return GLOBAL


@functools.lru_cache
def table(key: int) -> Any:
    return PRIZE


def holds_by_default(x: Any, *, cache: Any = None) -> None:
    pass


def uses_global() -> Any:
    return [GLOBAL for _ in range(2)]


def calls_another() -> Any:
    return uses_global()


def in_a_closure(prize: Any) -> tuple[str, Any]:
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].cache = {"k": [prize]}
    return "model.0.cache['k'][0]", lambda: model


def in_a_gradient(prize: Any) -> tuple[str, Any]:
    model = nn.Linear(2, 2)
    model.weight.grad = prize
    return "model.weight.grad", lambda: model(torch.ones(2))


def in_a_global(prize: Any) -> tuple[str, Any]:
    GLOBAL["k"] = prize
    return "GLOBAL['k']", uses_global


def in_a_global_of_a_called_function(prize: Any) -> tuple[str, Any]:
    GLOBAL["k"] = prize
    return "GLOBAL['k']", calls_another


def in_a_global_of_a_static_method(prize: Any) -> tuple[str, Any]:
    GLOBAL["k"] = prize
    return "GLOBAL['k']", lambda: Keeper.static()


def in_a_default(prize: Any) -> tuple[str, Any]:
    return "cache", functools.partial(lambda x, *, cache=prize: x)


def in_a_partial(prize: Any) -> tuple[str, Any]:
    return "root.keywords['x']", functools.partial(holds_by_default, x=prize)


def in_self(prize: Any) -> tuple[str, Any]:
    keeper = Keeper()
    keeper.seen.append(prize)
    return "self.seen[0]", keeper.method


def in_a_class(prize: Any) -> tuple[str, Any]:
    Keeper.kept = [prize]
    return "Keeper.kept[0]", lambda: Keeper()


def in_a_slot(prize: Any) -> tuple[str, Any]:
    thing = Thing(SimpleNamespace(deep=prize))
    return "thing.slot.deep", lambda: thing


def in_a_lru_cache(prize: Any) -> tuple[str, Any]:
    table(1)
    return "table", lambda: table(1)


PRIZE = torch.ones(3)
PLACES: list[Callable[[Any], tuple[str, Any]]] = [
    in_a_closure, in_a_gradient, in_a_global, in_a_global_of_a_called_function, in_a_global_of_a_static_method,
    in_a_default, in_a_partial, in_self, in_a_class, in_a_slot, in_a_lru_cache,
]  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
def test_a_walk_finds_each_place_and_names_it(place: Callable[[Any], tuple[str, Any]]) -> None:
    prize = PRIZE if place is in_a_lru_cache else torch.ones(2, 2)
    try:
        expected, root = place(prize)
        assert [name for name, value in walk("root", root) if value is prize] == [expected]
    finally:
        GLOBAL.clear()
        Keeper.kept = []


def test_cycles_end() -> None:
    loop: list[Any] = []
    loop.append(loop)
    assert len(list(walk("loop", loop))) == 1


def test_a_walk_visits_no_more_than_its_limit() -> None:
    chain: Any = None
    for _ in range(100):
        chain = [chain]
    assert len(list(walk("chain", chain, limit=10))) == 10


def test_libraries_are_not_looked_into() -> None:
    def step(x: Any) -> Any:
        return torch.nn.functional.gelu(x)

    assert [name for name, _ in walk("step", step)] == ["step"]


def test_a_step_holds_its_function_and_nothing_of_its_programs() -> None:
    held = [torch.ones(2, 2)]

    def fn(params: Any) -> Any:
        return params["w"].sum() * held[0].sum()

    mesh = fzero.VirtualMesh(fsdp=2)
    step = fzero.simulate(fn, mesh)
    step.own = [prize := torch.ones(3)]
    before = [name for name, _ in walk("held", {"step": step})]
    step(fzero.partition({"w": torch.ones(4)}, mesh))
    assert [name for name, _ in walk("held", {"step": step})] == before
    assert "held[0]" in before
    assert any(value is prize for _, value in walk("held", {"step": step}))


def test_a_function_with_an_assert_does_not_reach_the_run_of_the_tests() -> None:
    def step(x: Any) -> Any:
        assert x is not None, "which pytest writes anew, with names of its own modules"
        return x

    assert [name for name, _ in walk("step", step)] == ["step"]


class ClassOfClasses(type):
    """As Cython's: its module is an attribute of its classes."""

    __module__ = property(lambda cls: "compiled")  # type: ignore[assignment]


class Compiled(metaclass=ClassOfClasses):
    pass


def test_a_step_may_reach_a_class_whose_class_has_no_module() -> None:
    step = fzero.simulate(lambda x: x * 2 if Compiled else x, 2)
    assert step(torch.ones(2)).tolist() == [2, 2]


def test_find_tensor_says_where_an_object_holds_one() -> None:
    assert find_tensor(Thing({"k": (1, torch.ones(1))})) == ".slot['k'][1]"
    assert find_tensor(Thing({"k": (1, "x")})) is None
