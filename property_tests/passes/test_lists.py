"""Laws of lists: a step that updates lists of leaves, in place or not, is the plain step wherever state lies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from hypothesis import example, given
from hypothesis import strategies as st
from programs import layers, loss
from torch import Tensor

import fzero
from fzero import VirtualMesh, tree
from property_tests.laws import slow

Lists = list[Tensor]
STEPS = 2
PLACES = (None, fzero.host())


class Line(NamedTuple):
    """A line of an update: an operation on two of the earlier lists, each modulo their number."""

    name: str
    x: int
    y: int


VALUES: dict[str, Callable[[Lists, Lists], Any]] = {
    "scale": lambda x, y: torch._foreach_mul(x, 0.9),
    "add": lambda x, y: torch._foreach_add(x, y, alpha=-0.1),
    "lerp": lambda x, y: torch._foreach_lerp(x, y, 0.25),
    "clone": lambda x, y: [each.clone() for each in x],
    "each": lambda x, y: [0.5 * a + b for a, b in zip(x, y)],
}
"""What makes another list."""

WRITES: dict[str, Callable[[Lists, Lists], Any]] = {
    "scale_": lambda x, y: torch._foreach_mul_(x, 0.75),
    "sub_": lambda x, y: torch._foreach_sub_(x, [0.1 * each for each in y]),
    "each_": lambda x, y: [a.add_(b, alpha=0.5) for a, b in zip(x, [each.clone() for each in y])],
}
"""What writes into a list that the update made."""


def lines() -> st.SearchStrategy[list[Line]]:
    index = st.integers(0, 7)
    return st.lists(st.builds(Line, st.sampled_from([*VALUES, *WRITES]), index, index), min_size=2, max_size=8)


def step_of(update: list[Line]) -> Callable[..., Any]:
    """`step(params, means, x)` -> new parameters and means: the last two lists that the lines make."""

    def step(params: tree.Tree, means: tree.Tree, x: Tensor) -> Any:
        treedef = tree.flatten(params)[1]
        given = [tree.leaves(params), tree.leaves(means), tree.leaves(fzero.grad(loss)(params, x))]
        made: list[Lists] = [list(torch._foreach_mul(given[0], 1.0)), list(torch._foreach_add(given[1], given[2]))]
        for line in update:
            read, own = [*given, *made], made
            y = read[line.y % len(read)]
            if line.name in VALUES:
                made.append(list(VALUES[line.name](read[line.x % len(read)], y)))
            else:
                WRITES[line.name](own[line.x % len(own)], y)
        return tuple(tree.unflatten(treedef, leaves) for leaves in made[-2:])

    return step


def train(step: Any, params: tree.Tree, means: tree.Tree) -> list[Tensor]:
    for _ in range(STEPS):
        params, means = step(params, means, torch.ones(4, 5, dtype=torch.float64))
    return [x.full_tensor() if isinstance(x, fzero.Sharded) else x for x in tree.leaves((params, means))]


@example([Line("scale", 4, 0), Line("scale_", 2, 0)], 1, 1, (None, fzero.host()))
@given(lines(), st.sampled_from([1, 2]), st.sampled_from([1, 2, 3]), st.tuples(*[st.sampled_from(PLACES)] * 2))
@slow
def test_an_update_of_lists_is_the_plain_one_wherever_state_lies(
    update: list[Line], world: int, stage: int, places: Any
) -> None:
    mesh = VirtualMesh(fsdp=world)
    whole = tree.map(torch.Tensor.double, layers(2))
    means = tree.map(torch.ones_like, whole)
    step = step_of(update)
    params, state = (fzero.partition(x, mesh, to=place) for x, place in zip((whole, means), places))
    got = train(fzero.simulate(step, mesh, stage=stage), params, state)
    for mine, theirs in zip(got, train(step, whole, means), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)
