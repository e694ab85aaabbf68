"""Freezing, unfreezing and averages in the middle of a run, at every stage."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from programs import layers, mlp
from torch import Tensor

import fzero
from fzero import optim, tree
from fzero.base.errors import FzeroError
from fzero.base.mesh import VirtualMesh

BATCH = torch.randn(24, 5, generator=torch.Generator().manual_seed(5))
PHASES = [("2",), ("2", "1"), ("0", "1"), ("0", "1", "2")]
"""The layers that train: one begins, then one begins and one stops, then one comes back."""


def in_layers(numbers: tuple[str, ...]) -> Any:
    return lambda path, leaf: path.split(".")[1] in numbers


def train_step(optimizer: Any) -> Any:
    def step(trained: Any, frozen: Any, state: Any, x: Tensor) -> Any:
        def loss_fn(trained: Any) -> Tensor:
            return mlp(tree.merge(trained, frozen), x).square().mean()

        loss, grads = fzero.value_and_grad(loss_fn)(trained)
        updates, state = optimizer.update(grads, state, trained)
        return optim.apply_updates(trained, updates), state, loss

    return step


def run_phases(params: Any, make: Any, run: Any) -> Any:
    """Two steps of each phase. `make(numbers)` is the optimizer of the leaves that train."""
    state: Any = None
    for numbers in PHASES:
        optimizer = make(numbers)
        trained, frozen = tree.split(params, in_layers(numbers))
        first = optimizer.init(trained)
        state = first if state is None else optim.carry_state(state, first)
        step = run(optimizer)
        for _ in range(2):
            trained, state, _ = step(trained, frozen, state, BATCH)
        params = tree.merge(trained, frozen)
    return params, state


def run_torch(params: Any, kind: Any, **options: Any) -> Any:
    """The same by torch, which counts the steps of each parameter, and forgets what is frozen."""
    weights = tree.map(lambda x: x.clone().requires_grad_(), params)
    optimizer = kind(tree.leaves(weights), **options)
    for numbers in PHASES:
        trained, frozen = tree.split(weights, in_layers(numbers))
        for weight in tree.leaves(frozen):
            optimizer.state.pop(weight, None)
        for _ in range(2):
            optimizer.zero_grad()
            mlp(tree.merge(trained, tree.map(torch.Tensor.detach, frozen)), BATCH).square().mean().backward()
            optimizer.step()
    return tree.map(torch.Tensor.detach, weights)


def make_adamw(numbers: tuple[str, ...]) -> Any:
    """A group, and so a step count, for each layer."""
    groups = {number: optim.adamw(0.1, eps=1e-3) for number in numbers}
    return optim.multi_transform(groups, lambda path, leaf: path.split(".")[1])


def make_momentum(numbers: tuple[str, ...]) -> Any:
    return optim.sgd(0.3, momentum=0.9)


OPTIMIZERS: dict[str, Any] = {
    "adamw": (make_adamw, torch.optim.AdamW, {"lr": 0.1, "eps": 1e-3}),
    "momentum": (make_momentum, torch.optim.SGD, {"lr": 0.3, "momentum": 0.9}),
}


def assert_close(got: Any, want: Any) -> None:
    for path, a, b in zip(tree.paths(want), tree.leaves(got), tree.leaves(want), strict=True):
        # Eight steps of a rate of 0.1 round gradients of size 0.1 in another order.
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5, msg=lambda text, path=path: f"{path}: {text}")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_phases_are_torchs(name: str) -> None:
    make, kind, options = OPTIMIZERS[name]
    params = layers()
    got, _ = run_phases(params, make, train_step)
    assert_close(got, run_torch(params, kind, **options))
    assert all((a - b).abs().max() > 0.01 for a, b in zip(tree.leaves(got), tree.leaves(params)))


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("world", [1, 2, 8])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_phases_on_ranks_are_the_plain_ones(name: str, world: int, stage: int) -> None:
    mesh, make = VirtualMesh(fsdp=world), OPTIMIZERS[name][0]
    got = run_phases(
        fzero.partition(layers(), mesh),
        make,
        lambda optimizer: fzero.simulate(train_step(optimizer), mesh, stage=stage),
    )
    assert_close(fzero.unpartition(got), run_phases(layers(), make, train_step))


def test_a_change_costs_one_trace_and_frozen_leaves_move_no_gradient(caplog: pytest.LogCaptureFixture) -> None:
    mesh, optimizer = VirtualMesh(fsdp=2), optim.sgd(0.1, momentum=0.9)
    step = fzero.simulate(train_step(optimizer), mesh)
    params, state, scattered = fzero.partition(layers(), mesh), None, []
    caplog.set_level(logging.WARNING, "fzero")
    for numbers in PHASES:
        trained, frozen = tree.split(params, in_layers(numbers))
        first = optimizer.init(trained)
        state = first if state is None else optim.carry_state(state, first)
        program = step.trace(trained, frozen, state, BATCH)
        scattered.append({comm.bucket for comm in program.comm() if comm.op == "reduce_scatter"})
        for _ in range(3):
            trained, state, _ = step(trained, frozen, state, BATCH)
        params = tree.merge(trained, frozen)
    assert scattered == [{f"layers.{number}" for number in numbers} for numbers in PHASES]
    assert sum("is traced again" in record.message for record in caplog.records) == len(PHASES) - 1


def test_state_that_goes_on_is_the_very_same() -> None:
    params = layers()
    optimizer = make_adamw(("1", "2"))
    early, _ = tree.split(params, in_layers(("2",)))
    more, _ = tree.split(params, in_layers(("1", "2")))
    old = make_adamw(("2",)).init(early)
    old = tree.map(lambda x: x + 3, old)
    new = optim.carry_state(old, optimizer.init(more))
    kept = dict(zip(tree.paths(old), tree.leaves(old)))
    begun = 0
    for path, leaf in zip(tree.paths(new), tree.leaves(new)):
        if path in kept:
            assert leaf is kept[path]
        else:
            begun += 1
            assert not leaf.any()
    assert begun == 5  # a count, and two moments of two leaves


def test_a_group_that_had_no_leaf_starts_to_count() -> None:
    both = optim.multi_transform({"w": optim.adamw(), "b": optim.adamw()}, lambda path, leaf: path[-1])
    params = layers(1)
    weights, _ = tree.split(params, lambda path, leaf: path.endswith("w"))
    _, old = both.update(weights, both.init(weights), weights)
    assert old.inner_states["b"][0].count == 1  # of no leaves
    new = optim.carry_state(old, both.init(params))
    assert (new.inner_states["w"][0].count, new.inner_states["b"][0].count) == (1, 0)


def test_schedules_count_on() -> None:
    optimizer = optim.sgd(optim.linear_schedule(1.0, 0.0, 10), momentum=0.9)
    params = layers(2)
    some, _ = tree.split(params, in_layers(("0",)))
    _, old = optimizer.update(some, optimizer.init(some), some)
    assert optim.carry_state(old, optimizer.init(params))[-1].count == 1


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: optim.apply_if_finite(x, 3)])
def test_a_leaf_that_begins_beside_others_of_one_count_is_refused(wrap: Any) -> None:
    optimizer, params = wrap(optim.adamw()), layers(2)
    some, _ = tree.split(params, in_layers(("0",)))
    with pytest.raises(FzeroError, match=r"layers\.1\.b: begins to train beside .*0\.b, whose steps are counted"):
        optim.carry_state(optimizer.init(some), optimizer.init(params))


def test_state_of_other_parameters_is_refused() -> None:
    optimizer = optim.sgd(0.1, momentum=0.9)
    with pytest.raises(FzeroError, match=r"layers\.0\.b: is torch\.float32 \[5\], and would be .* \[4\]; give"):
        optim.carry_state(optimizer.init(layers()), optimizer.init(layers(width=4)))


# averages


@pytest.mark.parametrize("donate", [True, False])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_average_is_evaluated_and_swapped_in(stage: int, donate: bool) -> None:
    mesh, optimizer = VirtualMesh(fsdp=4), optim.adamw(0.1, eps=1e-3)

    def step(params: Any, ema: Any, state: Any, x: Tensor) -> Any:
        _, grads = fzero.value_and_grad(lambda p: mlp(p, x).square().mean())(params)
        updates, state = optimizer.update(grads, state, params)
        params = optim.apply_updates(params, updates)
        return params, optim.incremental_update(params, ema, step_size=0.25), state

    def evaluate(params: Any, x: Tensor) -> Tensor:
        return mlp(params, x).square().mean()

    def run(params: Any, step: Any, evaluate: Any) -> Any:
        ema, state, losses = tree.map(lambda x: x + 0, params), optimizer.init(params), []
        for _ in range(3):
            params, ema, state = step(params, ema, state, BATCH)
            losses += [evaluate(ema, BATCH), evaluate(params, BATCH)]
        params, ema = ema, params  # a run may go on from its average
        params, ema, state = step(params, ema, state, BATCH)
        return params, ema, torch.stack([*losses, evaluate(params, BATCH)])

    on_ranks = fzero.simulate(step, mesh, stage=stage, donate=donate), fzero.simulate(evaluate, mesh, stage=stage)
    got = run(fzero.partition(layers(), mesh), *on_ranks)
    want = run(layers(), step, evaluate)
    assert_close(fzero.unpartition(got[:2]), want[:2])
    torch.testing.assert_close(got[2], want[2], rtol=1e-4, atol=0)
    assert len(want[2].unique()) == 7
