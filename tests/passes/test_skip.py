"""The defer and skip passes: an update that may be skipped is one operation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from programs import (
    EVERY_STEP,
    MESH,
    Case,
    Outputs,
    apply,
    assert_same,
    calls,
    layers,
    loss,
    names,
    trained,
    training,
    tried,
)
from torch import Tensor

import fzero
from fzero import optim, tree, value_and_grad
from fzero.passes import bucket, defer, donate, fuse, skip
from fzero.program import ops
from fzero.program.program import Program

FILL = torch.ops.fzero._foreach_masked_fill.Scalar
CHOOSE = torch.ops.fzero._foreach_masked_fill.List


def safe(optimizer: optim.GradientTransformation) -> optim.GradientTransformation:
    return optim.apply_if_finite(optimizer, 5)


def skipped(case: Case) -> Program:
    """The program after both passes. Asserts that results are those of `fuse` alone, bit for bit, also for gradients
    that are not finite."""
    before = apply(case.trace(), bucket, fuse)
    program = apply(case.trace(), bucket, defer, fuse, skip)
    fused = apply(case.trace(), bucket, defer, fuse)
    for factor in (1.0, float("nan")):
        *state, batch = case.args
        given = case._replace(args=(*state, batch * factor))
        assert_equal(given.run(program), given.run(fused))
        if not calls(program, ops.adamw):
            assert_equal(given.run(program), given.run(before))
    return program


def assert_equal(got: Outputs, expected: Outputs) -> None:
    """As `assert_same`; a loss may be nan."""
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


def wheres(program: Program) -> list[tuple[int, bool]]:
    """`(number of leaves, whether there is a condition)` of each `adamw`."""
    return [(len(call.args[0]), "where" in call.kwargs) for call in calls(program, ops.adamw)]


@pytest.mark.parametrize(("name", "world"), EVERY_STEP)
def test_results_are_the_same(name: str, world: int) -> None:
    case, program, outputs = tried(name, world)
    assert_same(case.run(apply(program, defer, skip)), outputs)


@pytest.mark.parametrize(
    "optimizer",
    [
        optim.adamw(0.1),
        optim.adam(0.1),
        optim.adamw(optim.linear_schedule(0.1, 0.0, 5), weight_decay=0.0),
        optim.chain(optim.clip_by_global_norm(0.1), optim.adamw(0.1)),
    ],
    ids=["adamw", "adam", "scheduled", "clipped"],
)
def test_a_fused_update_takes_the_condition(optimizer: optim.GradientTransformation) -> None:
    program = skipped(trained(safe(optimizer), layers(), MESH))
    assert wheres(program) == [(6, True)]
    assert "scale_by_adam" not in names(program)
    rows = [len(call.args[0]) for call in calls(program, CHOOSE)]
    assert len(rows) == 1 and rows[0] <= 3  # counts and flags


def test_loss_scale_and_clipping_keep_one_update() -> None:
    scaler = optim.loss_scale.dynamic()
    optimizer = safe(optim.chain(optim.clip_by_global_norm(0.1), optim.adamw(0.1)))

    def step(params: Any, state: Any, scale: Any, x: Tensor) -> Any:
        value, grads = value_and_grad(lambda p: loss(p, x) * scale.scale)(params)
        updates, state = optimizer.update(optim.loss_scale.unscale(grads, scale), state, params)
        return optim.apply_updates(params, updates), state, scaler.update(scale, state.last_finite), value

    case = trained(optimizer, layers(), MESH)
    params, state, batch = case.args
    program = skipped(case._replace(step=step, args=(params, state, scaler.init(params), batch)))
    assert wheres(program) == [(6, True)]
    final = fzero.simulate(step, MESH).trace(params, state, scaler.init(params), batch)
    assert [name for name in names(final) if "adam" in name] == ["adamw_"]


def test_groups_take_the_condition_each() -> None:
    groups = {True: optim.adamw(0.1), False: optim.adamw(0.01, weight_decay=0.0)}
    program = skipped(trained(safe(optim.multi_transform(groups, lambda path, leaf: leaf.ndim > 1)), layers(), MESH))
    assert wheres(program) == [(3, True), (3, True)]


def test_one_group_of_two_may_be_skipped() -> None:
    groups = {True: safe(optim.adamw(0.1)), False: optim.adamw(0.01)}
    program = skipped(trained(optim.multi_transform(groups, lambda path, leaf: leaf.ndim > 1), layers(), MESH))
    assert sorted(wheres(program)) == [(3, False), (3, True)]


def test_a_masked_decay_makes_two_updates_of_one_condition() -> None:
    program = skipped(trained(safe(optim.adamw(0.1, mask=lambda path, leaf: leaf.ndim > 1)), layers(), MESH))
    assert wheres(program) == [(3, True), (3, True)]


@pytest.mark.parametrize("optimizer", [optim.lion(0.1), optim.chain(optim.ema(0.9), optim.lion(0.1))])
def test_an_update_without_a_fused_form_chooses_before_the_addition(optimizer: Any) -> None:
    case = trained(safe(optimizer), layers(), MESH)
    program = skipped(case)
    (fill,) = [call for call in calls(program, FILL) if str(call.args[2]) == "-0.0"]
    assert len(fill.args[0]) == 6
    names_of = [name for name in names(donate(program)) if name.startswith("_foreach_masked_fill")]
    assert names_of == ["_foreach_masked_fill_"] * 2  # the steps, and the state


def test_an_update_without_a_choice_is_left_alone() -> None:
    assert wheres(skipped(trained(optim.adamw(0.1), layers(), MESH))) == [(6, False)]


def case_with(use: Callable[[tree.Tree, Any], Any]) -> Case:
    optimizer = safe(optim.adamw(0.1))

    def step(params: tree.Tree, state: Any, x: Tensor) -> Any:
        _, grads = value_and_grad(loss)(params, x)
        updates, state = optimizer.update(grads, state, params)
        return optim.apply_updates(params, updates), state, use(updates, state)

    return trained(optimizer, layers(), MESH)._replace(step=step)


def test_updates_with_another_use_are_left_alone() -> None:
    assert wheres(skipped(case_with(lambda updates, state: tree.leaves(updates)[0].square().sum()))) == []


def test_state_with_another_use_may_be_fused() -> None:
    program = skipped(case_with(lambda updates, state: tree.leaves(state.inner_state[0].mu)[0].square().sum()))
    assert wheres(program) == [(6, True)]


def test_a_choice_by_hand_is_folded_too() -> None:
    """`select` of whole trees, as users write it."""
    optimizer = optim.adamw(0.1)

    def step(params: tree.Tree, state: Any, x: Tensor) -> Any:
        _, grads = value_and_grad(loss)(params, x)
        updates, new = optimizer.update(grads, state, params)
        return optim.select(optim.all_finite(grads), (optim.apply_updates(params, updates), new), (params, state))

    assert wheres(skipped(trained(optimizer, layers(), MESH)._replace(step=step))) == [(6, True)]


def test_choices_by_two_conditions_are_left_alone() -> None:
    optimizer = optim.adamw(0.1)

    def step(params: tree.Tree, state: Any, x: Tensor) -> Any:
        _, grads = value_and_grad(loss)(params, x)
        updates, new = optimizer.update(grads, state, params)
        moved = optim.select(optim.all_finite(grads), optim.apply_updates(params, updates), params)
        return moved, optim.select(optim.all_finite(params), new, state)

    assert wheres(skipped(trained(optimizer, layers(), MESH)._replace(step=step))) == [(6, False)]


def test_a_choice_of_other_old_values_is_left_alone() -> None:
    optimizer = optim.adamw(0.1)

    def step(params: tree.Tree, state: Any, x: Tensor) -> Any:
        _, grads = value_and_grad(loss)(params, x)
        updates, new = optimizer.update(grads, state, params)
        others = tree.map(lambda p: p * 2, params)
        finite = optim.all_finite(grads)
        return optim.select(finite, (optim.apply_updates(params, updates), new), (others, state))

    assert wheres(skipped(trained(optimizer, layers(), MESH)._replace(step=step))) == [(6, False)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_parameters_of_other_dtypes(dtype: torch.dtype) -> None:
    params = tree.map(lambda x: x.to(dtype), layers())
    optimizer = safe(optim.adamw(0.1))
    held = fzero.partition(params, MESH)
    batch = torch.randn(4, 5).to(dtype)
    assert wheres(skipped(Case(training(optimizer), MESH, (held, optimizer.init(held), batch)))) == [(6, True)]


@pytest.mark.parametrize("optimizer", [optim.adamw(0.1), optim.sgd(0.1, momentum=0.9)], ids=["adamw", "sgd"])
def test_a_step_that_may_be_skipped_has_the_memory_of_one_that_may_not(optimizer: Any) -> None:
    """But for two counts and a bool."""

    def peak(optimizer: optim.GradientTransformation) -> int:
        case = trained(optimizer, layers(4, width=64), MESH, width=64)
        return fzero.simulate(case.step, MESH).trace(*case.args).memory().peak

    assert peak(safe(optimizer)) == peak(optimizer) + 9
