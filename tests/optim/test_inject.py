"""Hyperparameters as schedules: against torch.optim with numbers that change between steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from programs import layers, loss, names, rows, training
from torch import Tensor

import fzero
from fzero import FzeroError, VirtualMesh, optim, tree
from fzero.optim import kernels

STEPS = 4
ROUNDING = {"rtol": 4e-6, "atol": 4e-7}  # some 30 float32 operations, and a schedule rounds 0.9 to float32


def run(optimizer: optim.GradientTransformation, world: int, stage: int = 3) -> tuple[tree.Tree, Any]:
    mesh, batch = VirtualMesh(fsdp=world), rows(VirtualMesh(fsdp=8))
    params = fzero.partition(layers(), mesh)
    state, step = optimizer.init(params), fzero.simulate(training(optimizer), mesh, stage=stage)
    for _ in range(STEPS):
        params, state, _ = step(params, state, batch)
    return fzero.unpartition(params), state


def run_torch(make: Any, change: Any) -> tree.Tree:
    """Plain torch, where `change(group, step)` sets the numbers of a step."""
    params = tree.map(lambda x: x.clone().requires_grad_(), layers())
    optimizer = make(tree.leaves(params))
    for step in range(STEPS):
        change(optimizer.param_groups[0], step)
        optimizer.zero_grad()
        loss(params, rows(VirtualMesh(fsdp=8))).backward()
        optimizer.step()
    return tree.map(Tensor.detach, params)


def assert_close(got: tree.Tree, expected: tree.Tree) -> None:
    for a, b in zip(tree.leaves(got), tree.leaves(expected), strict=True):
        torch.testing.assert_close(a, b, **ROUNDING)


@pytest.mark.parametrize(("world", "stage"), [(1, 3), (8, 1), (8, 3)])
def test_scheduled_betas_are_torchs_with_betas_that_change(world: int, stage: int) -> None:
    optimizer = optim.inject_hyperparams(optim.adamw)(
        optim.linear_schedule(0.1, 0.02, 4),
        b1=optim.linear_schedule(0.8, 0.9, 4),
        b2=lambda count: 0.99,
        eps=1e-3,
        weight_decay=optim.linear_schedule(0.0, 0.4, 4),
    )

    def change(group: dict[str, Any], step: int) -> None:
        group |= {"lr": 0.1 - 0.02 * step, "betas": (0.8 + 0.025 * step, 0.99), "weight_decay": 0.1 * step}

    got, state = run(optimizer, world, stage)
    assert_close(got, run_torch(lambda params: torch.optim.AdamW(params, eps=1e-3), change))
    assert state.count.full_tensor() == STEPS
    assert {name: round(x.full_tensor().item(), 4) for name, x in state.hyperparams.items()} == {
        "learning_rate": 0.04, "b1": 0.875, "b2": 0.99, "weight_decay": 0.3
    }  # fmt: skip


def test_deepspeeds_one_cycle_moves_the_betas_of_adamw() -> None:
    cycle = optim.deepspeed.one_cycle(0.01, 0.1, cycle_first_step_size=2)
    optimizer = optim.inject_hyperparams(optim.adamw)(*cycle, eps=1e-3, weight_decay=0.0)
    rates, betas = (0.01, 0.055, 0.1, 0.055), (0.8, 0.85, 0.8, 0.85)  # step 0 runs at the constructor's values

    def change(group: dict[str, Any], step: int) -> None:
        group |= {"lr": rates[step], "betas": (betas[step], 0.99), "weight_decay": 0.0}

    assert_close(run(optimizer, 2)[0], run_torch(lambda params: torch.optim.AdamW(params, eps=1e-3), change))


@pytest.mark.parametrize("nesterov", [False, True])
def test_scheduled_momentum(nesterov: bool) -> None:
    optimizer = optim.inject_hyperparams(optim.sgd)(
        0.05, momentum=optim.linear_schedule(0.5, 0.9, 4), nesterov=nesterov
    )

    def change(group: dict[str, Any], step: int) -> None:
        group["momentum"] = 0.5 + 0.1 * step

    expected = run_torch(lambda params: torch.optim.SGD(params, 0.05, momentum=0.5, nesterov=nesterov), change)
    assert_close(run(optimizer, 8)[0], expected)


def test_a_tensor_changes_by_hand_between_steps() -> None:
    optimizer = optim.inject_hyperparams(optim.sgd)(torch.tensor(0.5))
    mesh = VirtualMesh(fsdp=2)
    params = fzero.partition({"a": torch.ones(3)}, mesh)
    state, step = optimizer.init(params), fzero.simulate(_descend(optimizer), mesh)
    params, state = step(params, state)
    assert fzero.unpartition(params)["a"].tolist() == [0.5] * 3
    state.hyperparams["learning_rate"] = state.hyperparams["learning_rate"] * 0.5
    params, state = step(params, state)
    assert fzero.unpartition(params)["a"].tolist() == [0.25] * 3


def _descend(optimizer: optim.GradientTransformation) -> Any:
    def step(params: Any, state: Any) -> Any:
        updates, state = optimizer.update(tree.map(torch.ones_like, params), state, params)
        return optim.apply_updates(params, updates), state

    return step


def test_numbers_stay_numbers_for_the_fused_kernel() -> None:
    mesh = VirtualMesh(fsdp=2)
    params = fzero.partition(layers(), mesh)

    def names_of(optimizer: optim.GradientTransformation) -> list[str]:
        step = fzero.simulate(training(optimizer), mesh)
        return names(step.trace(params, optimizer.init(params), rows(mesh)))

    rate = optim.linear_schedule(0.1, 0.0, 10)
    assert "adamw_" in names_of(optim.inject_hyperparams(optim.adamw)(rate))
    scheduled = names_of(optim.inject_hyperparams(optim.adamw)(rate, b1=rate))
    assert "adamw_" not in scheduled and scheduled.count("scale_by_adam") == 1


def test_static_arguments_may_be_functions() -> None:
    optimizer = optim.inject_hyperparams(optim.adamw, static_args="mask")(0.1, mask=lambda path, leaf: path == "a")
    params = {"a": torch.ones(2), "b": torch.ones(2)}
    state = optimizer.init(params)
    assert state.hyperparams == {}
    updates, _ = optimizer.update(tree.map(torch.zeros_like, params), state, params)
    assert updates["a"].any() and not updates["b"].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_adam_with_tensors_is_adam_with_numbers(dtype: torch.dtype) -> None:
    lists = [[torch.rand(shape).to(dtype) for shape in ((3, 4), (), (0, 2))] for _ in range(3)]
    count, numbers = torch.tensor(3), (0.75, 0.875, 2.0**-20)  # exact in every dtype
    tensors = [torch.tensor(x) for x in numbers]
    args = (*lists, count, *tensors)
    torch.library.opcheck(kernels.scale_by_adam.tensors, args, test_utils=("test_schema", "test_faketensor"))
    rounding = {torch.float32: 4e-7, torch.bfloat16: 2**-8, torch.float64: 1e-15}[dtype]
    for ours, theirs in zip(kernels.scale_by_adam(*args), kernels.scale_by_adam(*lists, count, *numbers)):
        torch.testing.assert_close(ours, theirs, rtol=rounding, atol=0)


def test_bad_arguments_are_named() -> None:
    with pytest.raises(FzeroError, match="adamw: has no argument 'masks'"):
        optim.inject_hyperparams(optim.adamw, static_args="masks")
    optimizer = optim.inject_hyperparams(optim.sgd)(torch.tensor(0.1))
    state = optimizer.init({"a": torch.ones(2)})
    with pytest.raises(FzeroError, match=r"the state has \['lr'\], the optimizer \['learning_rate'\]"):
        optimizer.update({"a": torch.ones(2)}, state._replace(hyperparams={"lr": torch.tensor(0.1)}))
    of_number = optim.inject_hyperparams(optim.sgd)(0.1)
    state = of_number.init({"a": torch.ones(2)})
    with pytest.raises(FzeroError, match="a number is no state: give learning_rate as a 0-d tensor to change it"):
        of_number.update({"a": torch.ones(2)}, state._replace(hyperparams={"learning_rate": torch.tensor(0.5)}))
    with pytest.raises(FzeroError, match="b1 is 1.0"):
        optim.inject_hyperparams(optim.adamw)(0.1, b1=1.0).init({"a": torch.ones(2)})


def test_a_mask_in_the_place_of_a_schedule_is_named() -> None:
    with pytest.raises(FzeroError, match="mask is a function that does not take a step count; give static_args='mask'"):
        optim.inject_hyperparams(optim.adamw)(1e-3, mask=lambda path, leaf: True)


@pytest.mark.parametrize(("factory", "name"), [(optim.clip, "max_delta"), (optim.ema, "decay")])
def test_a_number_that_cannot_change_is_named(factory: Any, name: str) -> None:
    optimizer = optim.inject_hyperparams(factory)(lambda count: 0.5)
    with pytest.raises(FzeroError, match=f"^{factory.__name__}: {name} is a tensor; give a number"):
        optimizer.init({"a": torch.ones(2)})


def test_a_bound_of_the_norm_may_be_a_schedule() -> None:
    stage, mesh = optim.inject_hyperparams(optim.clip_by_global_norm)(lambda count: 1.0 + count), VirtualMesh(fsdp=2)
    params = {"a": torch.full((3,), 4.0)}
    step = fzero.simulate(lambda p, state: stage.update(p, state), mesh)
    p = fzero.partition(params, mesh)
    state, plain = stage.init(p), stage.init(params)
    for bound in (1.0, 2.0):
        clipped, state = step(p, state)
        expected, plain = stage.update(params, plain)
        p = fzero.partition(params, mesh)
        torch.testing.assert_close(fzero.unpartition(clipped), expected)
        assert expected["a"].norm() == pytest.approx(bound)
