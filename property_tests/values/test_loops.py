"""A law of `fzero.scan`: whatever a body passes on, computes, captures or leaves as it is, a loop is its turns."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import fzero
from fzero import tree
from fzero.testing.steps import WIDE
from property_tests.laws import slow

WIDTH, TURNS, ROWS = 3, 3, 4
NAMES = ("state", "shared", "own", "row", "constant", "followed")


class Recipe(NamedTuple):
    """What a body returns: for each leaf of the carry, and for each y, an operation on two values by name, or one of
    these alone."""

    carry: dict[str, tuple[Any, str, str]]
    ys: tuple[tuple[Any, str, str], ...]
    is_nested: bool


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    def entry(names: tuple[str, ...]) -> tuple[Any, str, str]:
        how = draw(st.sampled_from([None, operator.add, operator.mul, torch.maximum]))
        return how, draw(st.sampled_from(names)), draw(st.sampled_from(names))

    uniform, plain = ("state", "shared", "constant"), NAMES[1:]
    chosen = draw(st.sets(st.sampled_from(["state", "shared", "own"]), min_size=1))
    kinds = {"state": uniform, "shared": ("shared", "constant"), "own": plain}
    ys = tuple(entry(plain) for _ in range(draw(st.integers(0, 2))))
    return Recipe({name: entry(kinds[name]) for name in sorted(chosen)}, ys, draw(st.booleans()))


def full(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, fzero.Sharded) else x


def compute(scan: Callable[..., Any], recipe: Recipe, state: Tensor, x: Tensor) -> Any:
    """Leaves of the carry, stacked ys, and the gradient by autograd of all that is followed."""
    constant = torch.linspace(0.5, 1.5, WIDTH, dtype=WIDE)
    followed = constant.clone().requires_grad_()
    start = {"state": state, "shared": constant * 2, "own": x[0, 0]}
    values = {**start, "constant": constant, "followed": followed}

    def find(entry: tuple[Any, str, str], known: dict[str, Any]) -> Any:
        how, first, second = entry
        return known[first] if how is None else how(known[first], known[second])

    def body(carry: Any, row: Tensor) -> Any:
        known = {**values, **carry, "row": row.mean(0)}
        if recipe.is_nested:
            carry, _ = scan(lambda c, _: ({k: find(recipe.carry[k], {**known, **c}) for k in c}, None), carry, length=2)
        else:
            carry = {name: find(entry, known) for name, entry in recipe.carry.items()}
        return carry, [full(find(entry, known)) for entry in recipe.ys]

    given = {name: start[name] for name in recipe.carry}
    carry, ys = scan(body, given, x.transpose(0, 1))
    found = [x for x in tree.leaves((carry, ys)) if x.requires_grad]
    gradient = torch.autograd.grad(sum(map(torch.sum, found)), followed)[0] if found else constant
    carry, ys, gradient = tree.map(lambda x: x if isinstance(x, fzero.Sharded) else x.detach(), (carry, ys, gradient))
    own = lambda x: x if isinstance(x, fzero.Sharded) else fzero.pmean(x + 0, "fsdp")  # noqa: E731
    return tree.map(own, (carry, ys, gradient))


def one_by_one(body: Callable[..., Any], carry: Any, xs: Any = None, length: int = 0) -> Any:
    ys = []
    for i in range(length if xs is None else len(xs)):
        carry, y = body(carry, None if xs is None else xs[i])
        ys.append(y)
    return carry, tree.map(lambda *each: torch.stack(each), *ys)


@given(recipes(), st.sampled_from([1, 2, 3]), st.booleans())
@slow
def test_a_loop_is_its_turns(recipe: Recipe, stage: int, donate: bool) -> None:
    mesh = fzero.VirtualMesh(fsdp=2)
    x = torch.randn(ROWS, TURNS, WIDTH, dtype=WIDE, generator=torch.Generator().manual_seed(0))

    def run(scan: Callable[..., Any]) -> Any:
        step = fzero.simulate(lambda state, x: compute(scan, recipe, state, x), mesh, stage=stage, donate=donate)
        return fzero.unpartition(step(fzero.partition(torch.full((WIDTH,), 1.1, dtype=WIDE), mesh), x))

    torch.testing.assert_close(run(fzero.scan), run(one_by_one), rtol=1e-12, atol=1e-12)
