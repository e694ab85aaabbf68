"""The laws of what leaves a trace: it has data, and it is what the plain step leaves."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import fzero
from fzero import tree
from fzero.base.reachable import walk
from fzero.base.torch_private import FakeTensor, unwrap
from property_tests.laws import slow


@dataclasses.dataclass
class Output:
    """Registered with torch's pytree."""

    first: Any
    second: Any


class Opaque:
    """Registered with nothing."""

    def __init__(self, *values: Any) -> None:
        self.values = values


class Slotted:
    """Registered with nothing, and without a dict of attributes."""

    __slots__ = ("inner",)

    def __init__(self, *values: Any) -> None:
        self.inner = values


torch.export.register_dataclass(Output)

TREES: list[Callable[..., Any]] = [
    lambda *xs: list(xs),
    lambda *xs: dict(zip("abc", xs)),
    lambda *xs: collections.OrderedDict(zip("cba", xs)),
    lambda *xs: collections.deque(xs),
    lambda *xs: Output(xs, None),
    lambda *xs: tuple(xs),
]
OBJECTS: list[Callable[..., Any]] = [Opaque, Slotted, lambda *xs: collections.UserDict(enumerate(xs))]
LEAVES: list[Callable[[Tensor], Any]] = [
    lambda x: x * 2, lambda x: x.sum(), lambda x: 3, lambda x: "text", lambda x: None, lambda x: x.max(0)
]  # fmt: skip
Make = Callable[[Tensor], Any]


def values(*, containers: list[Callable[..., Any]]) -> st.SearchStrategy[Make]:
    """Functions of a tensor that return a nest of containers with what is computed from the tensor."""

    def nest(inner: st.SearchStrategy[Make]) -> st.SearchStrategy[Make]:
        return st.builds(
            lambda build, makes: lambda x: build(*(make(x) for make in makes)),
            st.sampled_from(containers),
            st.lists(inner, min_size=1, max_size=3),
        )

    return st.recursive(st.sampled_from(LEAVES), nest, max_leaves=6)


class Places(NamedTuple):
    """Where a step may store a value: in a variable of its closure, in an object, in a transform's function."""

    closure: list[Any]
    held: Opaque


def store(place: str, value: Make, places: Places, x: Tensor) -> None:
    if place == "closure":
        places.closure.append(value(x))
    elif place == "object":
        places.held.values = (value(x),)
    elif place == "gradient":
        fzero.grad(lambda x: (places.closure.append(value(x)), x.sum())[1])(x)


def has_fake(value: Any) -> bool:
    return any(isinstance(x, Tensor) and isinstance(unwrap(x), FakeTensor) for _, x in walk("", value))


@given(
    values(containers=TREES + OBJECTS),
    values(containers=TREES),
    st.sampled_from(["none", "closure", "object", "gradient"]),
)
@slow
def test_a_step_is_refused_or_all_that_it_leaves_has_data(result: Make, stored: Make, place: str) -> None:
    places = Places([], Opaque())

    def step(x: Tensor) -> Any:
        store(place, stored, places, x)
        return result(x)

    try:
        got = fzero.simulate(step, 2)(torch.ones(4, 3))
    except fzero.FzeroError:
        return
    assert not has_fake(got) and not has_fake(step)


@given(values(containers=TREES))
@slow
def test_trees_come_back_as_the_plain_step_returns_them(result: Make) -> None:
    x = torch.arange(12.0).view(4, 3)
    got, expected = fzero.simulate(result, 1)(x), result(x)
    mine, treedef = tree.flatten(got)
    theirs, expected_def = tree.flatten(expected)
    assert treedef == expected_def and type(got) is type(expected)
    assert all(torch.equal(a, b) if isinstance(b, Tensor) else a == b for a, b in zip(mine, theirs, strict=True))
