"""Randomness: what is drawn follows from the seed, the rank and the operation's number, and from nothing else."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import programs
import pytest
import torch
import torch.nn.functional as F
from processes import Outcome, run_cases, values
from programs import MESH, Case, apply, assert_same, calls, dense, layers, on_rows
from torch import Tensor

import fzero
from fzero import optim, tree
from fzero.base.errors import FzeroError
from fzero.base.randomness import draw, fold, step_seed
from fzero.passes import defaults
from fzero.program import ops
from fzero.program.records import is_random, name_of
from fzero.state.partition import partition as partition_on

_aten = torch.ops.aten


def on_layers(step: Callable[..., Any]) -> Case:
    """`step(params, x)` with parameters of three layers and this rank's rows."""
    return on_rows(step, layers())


# seeds


def test_fold_gives_the_same_number_in_every_process() -> None:
    assert fold(0, 1, 2) == 1772749440416956875


def test_fold_gives_different_numbers_of_63_bits() -> None:
    numbers = {fold(seed, rank, number) for seed in range(8) for rank in range(8) for number in range(8)}
    assert len(numbers) == 8**3 and all(0 <= number < 2**63 for number in numbers)
    assert len({number % 2**32 for number in numbers}) == 8**3  # torch's CPU generator takes 32 bits


def test_draw_calls_its_target_with_generators_seeded() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(6)
    assert torch.equal(draw(5, _aten.rand.default, [3]), expected)


def test_a_step_advances_the_generator_by_one_draw() -> None:
    torch.manual_seed(0)
    torch.empty((), dtype=torch.int64).random_()
    expected = torch.rand(3)
    torch.manual_seed(0)
    with step_seed() as seed:
        draw(seed, _aten.rand.default, [100])
    assert torch.equal(torch.rand(3), expected)


def test_a_step_that_fails_does_too() -> None:
    torch.manual_seed(0)
    with pytest.raises(KeyError), step_seed() as first:
        draw(first, _aten.rand.default, [100])
        raise KeyError
    with step_seed() as second:
        pass
    torch.manual_seed(0)
    for expected in (first, second):
        with step_seed() as seed:
            assert seed == expected


# programs


def overwriting(p: Any, x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    y[0].normal_()
    return y


def into_given(p: Any, x: Tensor) -> Tensor:
    """Some into memory that holds other values too."""
    y = torch.zeros(2, 3, dtype=torch.float64)
    torch.rand(3, out=y[0])
    torch.bernoulli(y[0], out=y[1])
    return y


DRAWS: dict[str, tuple[Callable[..., Any], list[str]]] = {
    "dropout": (lambda p, x: F.dropout(x), ["bernoulli_"]),
    "its derivative": (lambda p, x: torch.func.grad(lambda x: F.dropout(x).sum())(x), ["bernoulli"]),
    "rand": (lambda p, x: torch.rand(2) + torch.randn(2), ["rand", "randn"]),
    "like": (lambda p, x: torch.rand_like(x), ["rand_like"]),
    "in place": (lambda p, x: torch.empty_like(x).uniform_(), ["uniform_"]),
    "in place, in part": (overwriting, ["normal_"]),
    "vmap": (lambda p, x: torch.func.vmap(F.dropout, randomness="different")(x), ["bernoulli"]),
    "attention": (lambda p, x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5), ["bernoulli_"]),
    "attention without dropout": (lambda p, x: F.scaled_dot_product_attention(x[None], x[None], x[None]), []),
    "out": (into_given, ["rand", "bernoulli"]),
    "rrelu": (lambda p, x: F.rrelu(-x.abs(), training=True), ["rrelu_with_noise_functional"]),
    "rrelu in place": (
        lambda p, x: F.rrelu(-x.abs(), training=True, inplace=True),
        ["rrelu_with_noise_functional"],
    ),
    "rrelu outside of training": (lambda p, x: F.rrelu(x), []),
    "dropout of nothing": (lambda p, x: F.dropout(x, 0.0) + F.dropout(x, training=False), []),
}


@pytest.mark.parametrize("name", DRAWS)
def test_random_operations_are_numbered_draws(name: str) -> None:
    step, targets = DRAWS[name]
    before = torch.get_rng_state()
    program = on_layers(step).trace()
    assert torch.equal(torch.get_rng_state(), before)
    draws = calls(program, ops.draw)
    assert [name_of(node) for node in draws] == targets
    assert [node.args[0] for node in draws] == list(range(len(targets)))
    assert not [node for node in program.graph.nodes if is_random(node)]


@pytest.mark.parametrize("name", [name for name, (_, targets) in DRAWS.items() if targets])
def test_ranks_draw_differently_and_again_the_same(name: str) -> None:
    step = fzero.simulate(DRAWS[name][0], MESH)
    results = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        results.append(step(None, torch.ones(4, 40)))
    first, again, other = results
    assert not torch.equal(*first.chunk(2))
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_draws_into_a_part_leave_the_rest() -> None:
    case = on_layers(overwriting)
    for (y,) in case.run(case.trace()):
        assert (y[0] != 0).all() and (y[1] == 0).all()


def test_draws_do_not_depend_on_what_else_is_drawn() -> None:
    alone = on_layers(lambda p, x: F.dropout(x, 0.3))
    beside = on_layers(lambda p, x: (F.dropout(x, 0.3), F.dropout(x, 0.3))[0])  # the second one is dead code
    assert_same(beside.run(beside.trace()), alone.run(alone.trace()))


def test_one_number_draws_the_same_and_another_differently() -> None:
    case = on_layers(lambda p, x: (torch.rand(40), torch.rand(40)))
    program = case.trace()
    first, second = case.run(program)[0]
    assert not torch.equal(first, second)
    _, draw = calls(program, ops.draw)
    draw.args = (0, *draw.args[1:])
    for a, b in case.run(program):
        assert torch.equal(a, b)


def training(p: Any, x: Tensor) -> Any:
    def loss(p: Any, x: Tensor) -> Tensor:
        for layer in p["layers"]:
            x = F.dropout(dense(layer, x), 0.3)
        return x.square().mean()

    value, grads = fzero.value_and_grad(loss)(p, x)
    return tree.map(lambda p, g: p - 0.1 * g, p, grads), value


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_passes_do_not_change_what_is_drawn(stage: int) -> None:
    case = on_layers(training)
    program = case.trace()
    assert_same(case.run(apply(program, *defaults(stage=stage, in_place=True))), case.run(program))


def test_a_listing_shows_what_is_drawn() -> None:
    assert "bernoulli_" in str(on_layers(lambda p, x: F.dropout(x)).trace())


def test_a_program_without_draws_leaves_the_generator_alone() -> None:
    case, before = on_layers(lambda p, x: dense(p["layers"][0], x)), torch.get_rng_state()
    case.run(case.trace())
    assert torch.equal(torch.get_rng_state(), before)


# draws into operands


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("in_place", [False, True])
def test_rrelu_multiplies_by_the_noise_that_its_derivative_reads(stage: int, in_place: bool) -> None:
    def loss(p: Any, x: Tensor) -> Any:
        y = F.rrelu(x @ p["w"], 0.25, 0.5, training=True, inplace=in_place)
        return y.sum(), y

    x, params = torch.randn(6, 5), {"w": torch.eye(5)}
    step = fzero.simulate(fzero.value_and_grad(loss, has_aux=True), MESH, stage=stage)
    (_, y), grads = step(fzero.partition(params, MESH), x)
    slopes = y / x
    assert torch.equal(slopes[x >= 0], torch.ones(int((x >= 0).sum())))
    assert 0.25 <= slopes[x < 0].min() < slopes[x < 0].max() <= 0.5
    torch.testing.assert_close(fzero.unpartition(grads)["w"], x.T @ slopes / MESH.size())


def test_a_draw_into_a_tensor_has_its_dtype_and_leaves_the_rest() -> None:
    drawn = fzero.simulate(lambda x: into_given(None, x) + 0 * x.sum(), MESH)(torch.zeros(2, 3))
    rows = drawn.view(MESH.size(), 2, 3)
    assert drawn.dtype == torch.float64 and set(rows[:, 1].unique().tolist()) <= {0.0, 1.0}
    assert (rows[:, 0] * 2**24 % 1).any()  # finer than float32


# refusals


@pytest.mark.parametrize(
    ("step", "problem"),
    [
        (lambda p, x: torch.rand(2, generator=torch.Generator()), "a generator is given"),
        (lambda p, x: torch.empty_like(x).uniform_(generator=torch.Generator()), "a generator is given"),
        (lambda p, x: x.clone().random_(0, 5), r"torch cannot trace aten.random_.from"),
        (lambda p, x: x.uniform_(), "writes into it, but a step is a pure function"),
    ],
)
def test_what_cannot_be_a_draw_is_refused_by_its_line(step: Callable[..., Any], problem: str) -> None:
    with pytest.raises(FzeroError, match=problem) as error:
        on_layers(step).trace()
    assert __file__ in str(error.value)


# on ranks


def batch(rank: int) -> Tensor:
    return torch.randn(2, 5, generator=torch.Generator().manual_seed(rank))


def masks(mesh: Any) -> dict[str, Tensor]:
    """Dropout masks of two steps from one seed, of a run again, and what the generator gives next."""
    step = fzero.shard(lambda x: F.dropout(x), mesh)
    x = torch.ones(50)
    torch.manual_seed(7)
    first, second, after = step(x), step(x), torch.rand(1)
    torch.manual_seed(7)
    again = step(x)
    return {"first": first, "second": second, "again": again, "after": after}


def restarted(mesh: Any) -> list[Tensor]:
    """What two steps return, and what the same two do from saved state and random state: one list behind the other."""
    optimizer = optim.adamw(0.1)

    def loss(p: Any, y: Tensor) -> Tensor:
        for layer in p["layers"]:
            y = F.dropout(dense(layer, y), 0.3)
        return y.square().mean()

    train = programs.training(optimizer, loss)
    torch.manual_seed(3)
    params = partition_on(layers(), mesh)
    state, x = optimizer.init(params), batch(mesh.get_rank())
    step = fzero.shard(train, mesh, donate=False)
    for _ in range(2):
        params, state, _ = step(params, state, x)
    saved = params, state, torch.get_rng_state()
    uninterrupted = two_more(step, params, state, x)
    torch.manual_seed(1234)
    params, state, rng = saved
    torch.set_rng_state(rng)
    return [*uninterrupted, *two_more(fzero.shard(train, mesh, donate=False), params, state, x)]


def two_more(step: Any, params: Any, state: Any, x: Tensor) -> list[Tensor]:
    values = []
    for _ in range(2):
        params, state, value = step(params, state, x)
        values.append(value)
    return [*values, *(leaf.local if hasattr(leaf, "local") else leaf for leaf in tree.leaves((params, state)))]


def trained(mesh: Any) -> tuple[Tensor, Tensor]:
    """The loss and the last bias after a step from seed 0."""
    torch.manual_seed(0)
    params, value = fzero.shard(training, mesh, donate=False)(partition_on(layers(), mesh), batch(mesh.get_rank()))
    return value, fzero.unpartition(params)["layers"][2]["b"]


@pytest.fixture(scope="module")
def outcomes() -> Mapping[str, list[Outcome]]:
    return run_cases(2, {"masks": masks, "restarted": restarted, "trained": trained})


def test_ranks_with_one_seed_draw_differently_step_by_step(outcomes: Mapping[str, list[Outcome]]) -> None:
    one, other = values(outcomes["masks"])
    drawn = [one["first"], one["second"], other["first"], other["second"]]
    assert all(not torch.equal(a, b) for i, a in enumerate(drawn) for b in drawn[:i])
    assert torch.equal(one["after"], other["after"])


def test_two_runs_with_one_seed_are_equal(outcomes: Mapping[str, list[Outcome]]) -> None:
    for rank in values(outcomes["masks"]):
        assert torch.equal(rank["first"], rank["again"])


def test_a_restart_from_saved_state_continues_bit_for_bit(outcomes: Mapping[str, list[Outcome]]) -> None:
    for results in values(outcomes["restarted"]):
        half = len(results) // 2
        assert half > 2 * 6  # two losses, parameters and their moments
        assert all(torch.equal(a, b) for a, b in zip(results[:half], results[half:], strict=True))


def test_virtual_ranks_draw_as_ranks_do(outcomes: Mapping[str, list[Outcome]]) -> None:
    x = torch.cat([batch(rank) for rank in range(2)])
    torch.manual_seed(0)
    params, value = fzero.simulate(training, MESH, donate=False)(partition_on(layers(), MESH), x)
    for theirs, bias in values(outcomes["trained"]):
        assert torch.equal(theirs, value)
        assert torch.equal(bias, fzero.unpartition(params)["layers"][2]["b"])
