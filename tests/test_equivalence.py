"""Equivalence: one call says that a step is the same sharded, or which leaf, step, rank and element is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from programs import layers, loss, training
from torch import Tensor

import fzero
from fzero import optim, tree
from fzero.base.errors import FzeroError
from fzero.equivalence import _compare
from fzero.execution.lockstep import seats
from fzero.passes import defaults, insert
from fzero.variants.int8_scatter import int8_scatter

ADAM = optim.chain(optim.clip_by_global_norm(0.5), optim.adamw(1e-2))


def examples(count: int = 24) -> Tensor:
    """[count, 5]"""
    return torch.randn(count, 5, generator=torch.Generator().manual_seed(3))


def state() -> tuple[Any, Any]:
    return layers(), ADAM.init(layers())


@pytest.mark.parametrize("ranks", [1, 2, 8, fzero.VirtualMesh(replica=2, fsdp=3), fzero.VirtualMesh(data=2)], ids=str)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_right_step_gives_the_largest_differences(ranks: Any, stage: int) -> None:
    found = fzero.check_equivalence(training(ADAM), state(), (examples(),), ranks=ranks, stage=stage, steps=3)
    assert set(found) == set(tree.paths((*state(), torch.tensor(0))))
    assert 0 < max(difference.absolute for difference in found.values()) < 1e-5


def test_data_axes_are_named_as_in_shard() -> None:
    mesh, data = fzero.VirtualMesh(dp=2, fsdp=3), ("dp", "fsdp")
    fzero.check_equivalence(training(ADAM), state(), (examples(),), ranks=mesh, data=data)
    with pytest.raises(FzeroError, match="mesh axis 'dp': has no meaning"):
        fzero.check_equivalence(training(ADAM), state(), (examples(),), ranks=mesh)


def test_nothing_that_is_given_is_changed() -> None:
    params, opt_state = state()
    x = examples()
    fzero.check_equivalence(training(ADAM), (params, opt_state), (x,), ranks=2)
    assert torch.equal(x, examples())
    tree.map(torch.testing.assert_close, (params, opt_state), state())


def test_optimizer_state_lies_as_its_parameters_do() -> None:
    mesh = fzero.VirtualMesh(fsdp=2)
    params = fzero.partition(layers(), mesh)
    placed, made = fzero.partition(ADAM.init(layers()), mesh, like=params), ADAM.init(params)
    for ours, theirs in zip(tree.leaves(placed), tree.leaves(made), strict=True):
        assert (ours.form.layout, ours.index) == (theirs.form.layout, theirs.index)
        assert torch.equal(ours.local, theirs.local)


def test_state_of_two_models_and_an_average() -> None:
    """A tree of the same paths lies as the first does anyway; one of other shapes has buckets of its own."""

    def step(first: Any, second: Any, average: Any, x: Tensor) -> Any:
        value, (a, b) = fzero.value_and_grad(lambda pair: loss(pair[0], x) + loss(pair[1], x[:, :3]))((first, second))
        first = tree.map(lambda p, g: p - 0.1 * g, first, a)
        second = tree.map(lambda p, g: p - 0.1 * g, second, b)
        return first, second, tree.map(lambda p, q: 0.9 * p + 0.1 * q, average, first), value

    models = (layers(), layers(2, width=3, seed=1), layers())
    found = fzero.check_equivalence(step, models, (examples(),), ranks=4)
    assert max(difference.absolute for difference in found.values()) < 1e-5


# steps that are not the same sharded


def summed() -> Any:
    """Training whose loss is a sum over examples."""
    return training(ADAM, lambda params, x: loss(params, x) * x.shape[0])


def test_a_wrong_loss_names_leaf_step_rank_element_and_both_values() -> None:
    with pytest.raises(FzeroError, match=r"^2, step 1, every rank: element 0 is [\d.]+ sharded and [\d.]+ unsharded, "):
        fzero.check_equivalence(summed(), state(), (examples(),), ranks=2)


def test_the_rank_is_the_one_that_holds_the_first_element_that_differs() -> None:
    """Of 72 elements rank 0 holds 32, 12 of the first leaf and 20 of the second, rank 1 the next 32."""

    def step(params: Any, x: Tensor) -> Any:
        def wrong_from_30(params: Any) -> Tensor:
            return (params["w"].reshape(60) * torch.where(torch.arange(60) >= 30, x.sum(), x.mean())).sum()

        layer, gradient = params["layer"], fzero.grad(wrong_from_30)(params["layer"])
        return ({"layer": tree.map(lambda p, g: p - g, layer, gradient)},)

    given = {"layer": {"b": torch.zeros(12), "w": torch.zeros(60)}}
    with pytest.raises(FzeroError, match=r"^0\.layer\.w, step 1, rank 1: element 30 is "):
        fzero.check_equivalence(step, (given,), (examples(),), ranks=3)


def test_a_difference_that_comes_later_names_its_step() -> None:
    def step(params: Any, count: Any, x: Tensor) -> Any:
        value = loss(params, x)
        gradient = fzero.grad(lambda p: loss(p, x) * (1 + (count["n"] >= 2) * (x.shape[0] - 1)))(params)
        return tree.map(lambda p, g: p - 0.01 * g, params, gradient), {"n": count["n"] + 1}, value

    with pytest.raises(FzeroError, match=r"step 3, "):
        fzero.check_equivalence(step, (layers(), {"n": torch.tensor(0)}), (examples(),), ranks=2, steps=4)


def test_a_result_of_each_rank_is_not_the_whole_one() -> None:
    def step(params: Any, x: Tensor) -> Any:
        return params, (x > 0).sum()

    with pytest.raises(FzeroError, match=r"^1, step 1: is int64\[2\] sharded and int64\[\] unsharded; .*psum"):
        fzero.check_equivalence(step, (layers(),), (examples(),), ranks=2)


def test_a_step_that_returns_too_little_is_refused() -> None:
    with pytest.raises(FzeroError, match="returned 1 values for 2 trees of state"):
        fzero.check_equivalence(lambda params, opt_state, x: params, state(), (examples(),), ranks=2)


def test_passes_are_taken() -> None:
    seen: list[str] = []

    def note(program: fzero.Program) -> fzero.Program:
        seen.append(program.name)
        return program

    passes = [*defaults(stage=3, in_place=False), note]
    fzero.check_equivalence(training(ADAM), state(), (examples(),), ranks=2, passes=passes)
    assert seen == ["step"]


def test_state_of_passes_begins_as_it_is_given() -> None:
    """What a scatter left before goes into the first gradient, so that a large one makes another step."""
    mesh, chosen = fzero.VirtualMesh(fsdp=2), insert(defaults(stage=3), int8_scatter, before="prefetch")
    sgd, batch = optim.sgd(0.1), (examples(),)
    given = (layers(), sgd.init(layers()))
    simulated = fzero.simulate(training(sgd), mesh, passes=chosen)
    zero = simulated.init_pass_state(*(fzero.partition(each, mesh) for each in given), *batch)
    left = tree.map(lambda leaf: leaf + 1, zero)
    how: dict[str, Any] = {"ranks": mesh, "passes": chosen, "rtol": 0, "atol": 0.03}
    assert zero and fzero.check_equivalence(training(sgd), given, batch, pass_state=zero, **how)
    with pytest.raises(FzeroError, match="further apart"):
        fzero.check_equivalence(training(sgd), given, batch, pass_state=left, **how)
    with pytest.raises(FzeroError, match="pass_state"):
        fzero.check_equivalence(training(sgd), given, batch, pass_state={"none": 1}, **how)


def test_ranks_are_numbered_row_by_row() -> None:
    """Batches are cut in this order, whatever the mesh."""
    positions = [(seat.along("replica"), seat.rank) for seat in seats(fzero.VirtualMesh(replica=2, fsdp=2))]
    assert positions == [(0, 0), (0, 1), (1, 0), (1, 1)]


# values that are no numbers


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_equal_values_that_are_no_numbers_are_equal(value: float) -> None:
    def step(params: Any, x: Tensor) -> Any:
        return params, params["w"] * value, (x * value).mean()

    found = fzero.check_equivalence(step, ({"w": torch.ones(5)},), (torch.ones(4),), ranks=2)
    assert found["1"] == (0, 0) and found["2"] == (0, 0)


@pytest.mark.parametrize("ours", [0.0, float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("theirs", [0.0, float("nan"), float("inf"), float("-inf")])
def test_different_values_that_are_no_numbers_differ(ours: float, theirs: float) -> None:
    def compare() -> Any:
        return _compare("x", torch.tensor([ours]), torch.tensor([theirs]), (1e-4, 1e-5))

    if str(ours) == str(theirs):
        assert compare() == (0, 0)
    else:
        with pytest.raises(FzeroError, match="element 0 is"):
            compare()


def test_integers_that_float64_has_not_are_compared() -> None:
    with pytest.raises(FzeroError, match="element 0 is"):
        _compare("x", torch.tensor([2**53 + 1]), torch.tensor([2**53]), (1e-4, 1e-5))


def test_a_budget_is_compared_too() -> None:
    fzero.check_equivalence(training(ADAM), state(), (examples(),), ranks=2, memory="1GiB", steps=2)
    with pytest.raises(fzero.FzeroError, match="memory: is 1 B"):
        fzero.check_equivalence(training(ADAM), state(), (examples(),), ranks=2, memory=1)
