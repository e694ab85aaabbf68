"""A law of updates in place: nobody can tell, however often a step gives one value."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

import fzero
from fzero.base.mesh import VirtualMesh
from fzero.testing.steps import WIDE
from property_tests.laws import slow

COUNT, WIDTH = 3, 4
LISTS: list[Callable[..., Any]] = [
    lambda a, b: torch._foreach_add(a, b, alpha=-0.5),
    lambda a, b: torch._foreach_lerp(a, b, 0.3),
    lambda a, b: torch._foreach_addcmul(a, b, b, value=0.1),
    torch._foreach_mul,
    torch._foreach_maximum,
    lambda a, b: torch._foreach_addcmul(b, a, b, [0.1, -0.2, 0.3][: len(a)]),
    lambda a, b: torch._foreach_mul(a, [0.5, -0.25, 0.75][: len(a)]),
    lambda a, b: torch._foreach_sub(b, 0.1),
]
IN_PLACE: list[Callable[..., Any]] = [
    lambda a, b: torch._foreach_add_(a, b, alpha=-0.5),
    lambda a, b: torch._foreach_lerp_(a, b, 0.3),
    lambda a, b: torch._foreach_addcmul_(a, b, a, value=0.1),
    lambda a, b: torch._foreach_mul_(a, b),
    lambda a, b: torch._foreach_copy_(a, b),
]
PAIRS: list[Callable[..., Any]] = [torch.add, torch.mul, torch.maximum, lambda a, b: torch.lerp(a, b, 0.3)]
HELD: list[Callable[..., Any]] = [lambda x: x.detach(), lambda x: x.data, lambda x: x.to(WIDE), copy.deepcopy]


class Statement(NamedTuple):
    """Operations on values by number, counted modulo how many there are: on lists of them, into a list of copies of
    them, on pairs of them, on pairs of their halves, or on the leaves of a carry, whose next values are operations on
    pairs of the carry."""

    kind: str
    how: int
    first: tuple[int, ...]
    second: tuple[int, ...]


numbers = st.integers(0, 7)


@st.composite
def statements(draw: st.DrawFn) -> Statement:
    length = draw(st.integers(2, 3))
    pick = st.lists(numbers, min_size=length, max_size=length).map(tuple)
    kind = draw(st.sampled_from(["list", "in place", "pairs", "halves", "carry"]))
    return Statement(kind, draw(numbers), draw(pick), draw(pick))


def turns(body: Callable[..., Any], carry: Any, length: int) -> Any:
    for _ in range(length):
        carry, _ = body(carry, None)
    return carry, None


def join_halves(pair: Callable[..., Any], x: Tensor, y: Tensor) -> Tensor:
    """The first half of `x` beside the second half of `y`, and the halves that are left beside each other."""
    half = WIDTH // 2
    return torch.cat([pair(x[:half], y[half:]), pair(y[:half], x[half:])])


def run(scan: Callable[..., Any], plan: Sequence[Statement], returned: Sequence[int], state: Sequence[Tensor]) -> Any:
    """New state, and results: values that the statements make, of which one may be there twice."""
    made = [*state, *(x * 0.5 for x in state)]

    def take(at: Sequence[int], among: Sequence[Any]) -> list[Any]:
        return [among[number % len(among)] for number in at]

    for kind, how, first, second in plan:
        pair, given = PAIRS[how % len(PAIRS)], take(first, made)
        if kind == "list":
            made += LISTS[how % len(LISTS)](given, take(second, made))
        elif kind == "in place":
            copies = [x.clone() for x in given]
            IN_PLACE[how % len(IN_PLACE)](copies, take(second, [*made, *copies]))
            made += copies
        elif kind == "pairs":
            made += map(pair, given, take(second, made))
        elif kind == "halves":
            made += [x * 0.5 + join_halves(pair, x, y) for x, y in zip(given, take(second, made))]
        else:
            body = lambda carry, _, at=second, pair=pair: (list(map(pair, carry, take(at, carry))), None)  # noqa: E731
            made += scan(body, given, length=2)[0]
    return take(returned, made)


@example([Statement("list", 0, (0, 1, 2), (2, 0, 1))], [-3, -2, -1], None)  # lists in two orders
@example([Statement("list", 3, (3, 4, 5), (3, 3, 3))], [-3, -2, -1], None)  # one value for all items
@example([Statement("carry", 0, (3, 3, 1), (1, 1, 0))], [-3, -2, -1], None)  # two carries begin as one value
@example([Statement("list", 0, (0, 1), (1, 0))], [-2, -1, 0], "disk")  # what a user holds lies in a file
@given(
    st.lists(statements(), min_size=2, max_size=5),
    st.lists(numbers.map(lambda n: -1 - n), min_size=COUNT, max_size=COUNT),
    st.sampled_from([None, "host", "disk"]),
)
@slow
def test_steps_that_give_one_value_twice_are_equal(
    plan: list[Statement], returned: list[int], where: str | None
) -> None:
    """Values that a user made of the state before a call stay what they were, too."""
    mesh, draw = VirtualMesh(fsdp=2), torch.Generator().manual_seed(0)
    first = [torch.rand(WIDTH, generator=draw, dtype=WIDE) for _ in range(COUNT)]
    place = {None: None, "host": fzero.host(), "disk": fzero.disk(tempfile.gettempdir())}[where]
    expected, found = first, []
    for donate in (True, False):
        like = fzero.partition({"w": first[0]}, mesh)
        state = fzero.partition([{"w": x.clone()} for x in first], mesh, like=like, to=place)
        step = fzero.simulate(
            lambda s: ([{"w": x} for x in run(fzero.scan, plan, returned, [each["w"] for each in s])],),
            mesh,
            donate=donate,
        )
        for _ in range(2):
            held = [hold(each["w"]) for each in state for hold in HELD]
            before = [x.full_tensor().clone() for x in held]
            (state,) = step(state)
            assert all(torch.equal(x.full_tensor(), y) for x, y in zip(held, before, strict=True))
        found.append([each["w"] for each in fzero.unpartition(state)])
    for _ in range(2):
        expected = run(turns, plan, returned, expected)
    for a, b, c in zip(*found, expected):
        assert torch.equal(a, b)
        torch.testing.assert_close(a, c, rtol=1e-12, atol=1e-12)
