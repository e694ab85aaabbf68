"""A plain tensor that a step returns in the place of state becomes that state, or is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import fzero
from fzero import tree
from fzero.base.errors import FzeroError

MESH = fzero.VirtualMesh(fsdp=3)
Params = dict[str, Tensor]


class State(NamedTuple):
    """Parameters and a count."""

    params: Params
    count: Tensor


def params() -> Params:
    return {"w": torch.arange(12.0).view(4, 3) / 7, "b": torch.ones(3), "s": torch.tensor(2.0)}


def batch() -> Tensor:
    return torch.linspace(0, 1, 24).view(6, 4)


def whole(p: Params) -> Params:
    return {"w": p["w"].softmax(0), "b": p["b"].cumsum(0), "s": p["b"].norm()}


STEPS: dict[str, Callable[[Any, Tensor], Any]] = {
    "a tree": lambda p, x: whole(p),
    "a tree behind a number": lambda p, x: (3, whole(p)),
    "a tree in a tree": lambda p, x: {"new": whole(p), "loss": x.mean()},
    "two trees of one structure": lambda p, x: (p, whole(p)),
    "some leaves": lambda p, x: {**p, "w": whole(p)["w"]},
    "another dtype": lambda p, x: {**p, "w": whole(p)["w"].double()},
    "a broadcast with its own mean": lambda p, x: {**p, "w": p["w"] + p["w"].mean(0)},
}


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("name", STEPS)
def test_a_uniform_result_is_state_of_the_same_layout(name: str, stage: int) -> None:
    given = fzero.partition(params(), MESH)
    found = fzero.simulate(STEPS[name], MESH, stage=stage, donate=False)(given, batch())
    expected = STEPS[name](params(), batch())
    for leaf, want in zip(tree.leaves(found), tree.leaves(expected)):
        if isinstance(leaf, fzero.Sharded):
            torch.testing.assert_close(fzero.unpartition(leaf), want)
    state = [leaf for leaf in tree.leaves(found) if isinstance(leaf, fzero.Sharded)]
    assert len(state) % 3 == 0 and [x.form[:3] for x in state[-3:]] == [x.form[:3] for x in tree.leaves(given)]


def test_a_second_step_goes_on_with_it() -> None:
    step = fzero.simulate(lambda p, x: whole(p), MESH)
    found = step(step(fzero.partition(params(), MESH), batch()), batch())
    torch.testing.assert_close(fzero.unpartition(found), whole(whole(params())))


def test_state_of_a_leaf_alone_and_of_a_part_of_an_argument() -> None:
    held = fzero.partition(params(), MESH)
    alone = fzero.simulate(lambda w, x: (w.cumsum(0), w.norm()), MESH)(held["w"], batch())
    assert isinstance(alone[0], fzero.Sharded) and not isinstance(alone[1], fzero.Sharded)
    state = State(fzero.partition(params(), MESH), held["b"].new_zeros(()))
    part = fzero.simulate(lambda state, x: (whole(state.params), x.mean()), MESH)(state, batch())
    assert all(isinstance(leaf, fzero.Sharded) for leaf in tree.leaves(part[0]))


def test_a_number_alone_is_no_state() -> None:
    count = fzero.partition(params(), MESH)["s"]
    loss = fzero.simulate(lambda s, x: (s * x).mean(), MESH)(count, batch())
    assert not isinstance(loss, fzero.Sharded)


def test_a_result_that_differs_between_ranks_is_refused_at_the_line_where_it_begins_to() -> None:
    def step(p: Params, x: Tensor) -> Params:
        rate = x.mean()
        w = p["w"] - rate * p["w"]  # here
        return {**p, "w": w.tanh()}

    with pytest.raises(
        FzeroError, match=re.escape("w: result 'w' is state but depends on this rank's batch in sub")
    ) as e:
        fzero.simulate(step, MESH)(fzero.partition(params(), MESH), batch())
    assert 'in step: w = p["w"] - rate * p["w"]  # here' in str(e.value)


def test_a_result_of_another_shape_is_no_state() -> None:
    found = fzero.simulate(lambda p, x: {**p, "w": p["w"].sum(0)}, MESH)(fzero.partition(params(), MESH), batch())
    assert not isinstance(found["w"], fzero.Sharded)


@pytest.mark.parametrize("donate", [False, True])
def test_a_transposed_leaf_is_no_alias_of_the_leaf(donate: bool) -> None:
    leaf = torch.arange(16.0).view(4, 4)  # of which rank 0 holds all elements
    step = fzero.simulate(lambda p: {"w": p["w"].T}, fzero.VirtualMesh(fsdp=2), donate=donate)
    found = step(fzero.partition({"w": leaf}, fzero.VirtualMesh(fsdp=2)))
    assert torch.equal(found["w"].full_tensor(), leaf.T)


def test_numbers_beside_the_new_values_of_numbers_are_metrics() -> None:
    def step(p: Any, x: Tensor) -> Any:
        return p, [x.mean(), fzero.pmean(x.mean(), "fsdp")]

    scales = {"scales": [torch.tensor(1.0), torch.tensor(2.0)]}
    _, metrics = fzero.simulate(step, MESH)(fzero.partition(scales, MESH), batch())
    assert not any(isinstance(x, fzero.Sharded) for x in metrics)
