"""Clipping: against torch's own function, and against formulas by hand; norms that are not finite."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from programs import layers, names, rows, trained
from torch import Tensor

import fzero
from fzero import FzeroError, VirtualMesh, optim, tree
from fzero.optim.clipping import NonfiniteNorm

ROUNDING = {"rtol": 1e-6, "atol": 0}  # a dozen float32 operations


def updates(seed: int = 0, factor: float = 1.0) -> tree.Tree:
    draw = torch.Generator().manual_seed(seed)
    leaf = lambda *shape: factor * torch.randn(shape, generator=draw)  # noqa: E731
    return {"a": leaf(3, 4), "b": [leaf(5), leaf()], "empty": leaf(0, 2)}


def run(stage: optim.GradientTransformation, given: tree.Tree) -> tree.Tree:
    return stage.update(given, stage.init(given))[0]


def norm_of(given: tree.Tree) -> float:
    return math.sqrt(sum(x.double().square().sum().item() for x in tree.leaves(given)))


def assert_scaled(got: tree.Tree, given: tree.Tree, factor: float) -> None:
    for a, b in zip(tree.leaves(got), tree.leaves(given), strict=True):
        torch.testing.assert_close(a, (b.double() * factor).float(), **ROUNDING)


@pytest.mark.parametrize("factor", [0.01, 1.0, 1e4])
def test_torchs_kind_is_torchs_function(factor: float) -> None:
    given = updates(factor=factor)
    params = [torch.zeros_like(x).requires_grad_() for x in tree.leaves(given)]
    for param, grad in zip(params, tree.leaves(given)):
        param.grad = grad.clone()
    torch.nn.utils.clip_grad_norm_(params, 1.5, foreach=False)
    got = run(optim.clip_by_global_norm(1.5, "torch"), given)
    for ours, param in zip(tree.leaves(got), params, strict=True):
        torch.testing.assert_close(ours, param.grad, **ROUNDING)


@pytest.mark.parametrize("factor", [0.01, 1.0, 1e4])
@pytest.mark.parametrize("bound", [1e-6, 1.5])
def test_each_kind_is_its_formula(factor: float, bound: float) -> None:
    given = updates(factor=factor)
    norm = norm_of(given)
    factors = {
        "optax": 1.0 if norm < bound else bound / norm,
        "torch": min(1.0, bound / (norm + 1e-6)),
        "deepspeed": 1 / max(1.0, (norm + 1e-6) / bound),
    }
    for kind, expected in factors.items():
        assert_scaled(run(optim.clip_by_global_norm(bound, kind), given), given, expected)


def test_kinds_differ_where_the_norm_is_small() -> None:
    given = {"a": torch.full((4,), 5e-7)}  # of norm 1e-6
    got = {kind: run(optim.clip_by_global_norm(1e-6, kind), given)["a"][0].item() for kind in ("optax", "torch")}
    assert got == pytest.approx({"optax": 5e-7, "torch": 2.5e-7}, rel=1e-5)


def test_clip_by_value() -> None:
    given = {"a": torch.tensor([-3.0, -0.5, 0.0, 2.0]), "b": torch.tensor(9.0)}
    got = run(optim.clip(1.5), given)
    assert got["a"].tolist() == [-1.5, -0.5, 0.0, 1.5] and got["b"] == 1.5
    assert run(optim.clip(1.5), {}) == {}


def test_clip_by_block_rms_looks_at_each_leaf() -> None:
    given = updates(factor=0.8)
    got = run(optim.clip_by_block_rms(0.5), given)
    factors = []
    for ours, x in zip(tree.leaves(got), tree.leaves(given)):
        rms = x.square().mean().sqrt().item() if x.numel() else 0.0
        factors.append(1 / max(1.0, rms / 0.5))
        torch.testing.assert_close(ours, x * factors[-1], **ROUNDING)
    assert len(set(factors)) > 2 and 1.0 in factors


@pytest.mark.parametrize("wrong", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("make", [optim.clip_by_global_norm, optim.clip_by_block_rms])
def test_a_norm_that_is_not_finite_goes_no_further(make: Any, wrong: float) -> None:
    given = updates()
    given["a"][1, 2] = wrong
    for stage in (make(1.0), make(1.0, on_nonfinite="zero")):
        got, state = stage.update(given, stage.init(given))
        assert all(not x.any() for x in tree.leaves(got))
    assert state == optim.EmptyState()


@pytest.mark.parametrize("kind", ["optax", "torch", "deepspeed"])
def test_the_flag_stays_and_says_which_norm(kind: Any) -> None:
    stage = optim.clip_by_global_norm(1.0, kind)
    state = stage.init(updates())
    optim.check_flags(state)
    for factor in (1.0, math.inf, 1.0):
        _, state = stage.update(updates(factor=factor), state)
    with pytest.raises(FzeroError, match=r"^clip_by_global_norm: the norm of the updates is (inf|nan)"):
        optim.check_flags(state)


def test_a_state_without_a_flag_is_refused() -> None:
    with pytest.raises(FzeroError, match="^ClipState: the state is of type EmptyState, not ClipState; give"):
        optim.clip_by_global_norm(1.0).update(updates(), optim.EmptyState())


def test_a_norm_too_large_for_float32_is_not_finite() -> None:
    stage = optim.clip_by_global_norm(1.0)
    got, state = stage.update({"a": torch.full((4,), 1e30)}, stage.init({"a": torch.zeros(4)}))
    assert not got["a"].any() and math.isinf(state.failed.value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: optim.clip(0.0), "max_delta is 0.0"),
        (lambda: optim.clip_by_block_rms(math.nan), "threshold is nan"),
        (lambda: optim.clip_by_global_norm(-1.0), "max_norm is -1.0"),
        (
            lambda: optim.clip_by_global_norm(1.0, "jax"),
            r"kind is 'jax'; give one of \['optax', 'torch', 'deepspeed'\]",
        ),
        (lambda: optim.clip_by_global_norm(1.0, on_nonfinite="skip"), "on_nonfinite is 'skip'"),
        (lambda: optim.clip_by_block_rms(1.0, on_nonfinite="skip"), "clip_by_block_rms: on_nonfinite is 'skip'"),
    ],
)
def test_bad_numbers_are_named(make: Any, message: str) -> None:
    with pytest.raises(FzeroError, match=message):
        make()


# in a step


@pytest.mark.parametrize(("world", "stage"), [(1, 3), (8, 1), (8, 3)])
def test_the_next_call_of_a_step_raises(world: int, stage: int) -> None:
    mesh = VirtualMesh(fsdp=world)
    case = trained(optim.chain(optim.clip_by_global_norm(1.0), optim.sgd(0.1)), layers(1), mesh)
    step = fzero.simulate(case.step, mesh, stage=stage)
    params, state, batch = case.args
    params, state, _ = step(params, state, batch)
    before = tree.map(torch.clone, fzero.unpartition(params))
    params, state, _ = step(params, state, batch * math.nan)
    for a, b in zip(tree.leaves(fzero.unpartition(params)), tree.leaves(before)):
        assert torch.equal(a, b)  # what is not finite went no further
    with pytest.raises(FzeroError, match=r"clip_by_global_norm: the norm of the updates is nan; .*apply_if_finite"):
        step(params, state, batch)
    assert isinstance(state[0].failed, NonfiniteNorm)
    params, state, _ = step(params, (optim.chain(optim.clip_by_global_norm(1.0)).init(params)[0], state[1]), batch)


@pytest.mark.parametrize("stage", [optim.clip(0.5), optim.clip_by_block_rms(0.5), optim.clip_by_global_norm(0.5)])
def test_clipping_is_a_few_list_operations(stage: optim.GradientTransformation) -> None:
    def count(layer_count: int) -> int:
        mesh = VirtualMesh(fsdp=2)
        program = trained(optim.chain(stage, optim.sgd(0.1)), layers(layer_count), mesh).trace()
        return sum(name.startswith("_foreach_") for name in names(program))

    assert count(1) == count(3) <= 4  # with the two of sgd and apply_updates


def test_one_collective_for_the_norm_and_for_finiteness() -> None:
    mesh = VirtualMesh(fsdp=2)
    optimizer = optim.apply_if_finite(optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(0.1)), 5)
    case = trained(optimizer, layers(), mesh)

    def step(params: Any, state: Any, x: Tensor) -> Any:
        return case.step(params, state, x)[:2]  # without the loss, which is a collective of its own

    program = fzero.simulate(step, mesh).trace(*case.args)
    assert [entry.op for entry in program.comm()].count("all_reduce") == 1
    with_replicas = VirtualMesh(replica=2, fsdp=2)
    params = fzero.partition(layers(), with_replicas)
    program = fzero.simulate(step, with_replicas).trace(params, optimizer.init(params), rows(with_replicas))
    norms = [entry for entry in program.comm() if entry.op == "all_reduce" and entry.axis == "fsdp"]
    assert len(norms) == 1
