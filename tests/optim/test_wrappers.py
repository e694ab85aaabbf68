"""Wrappers: parameter groups against torch's, averages by hand, skipped updates bit for bit."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from programs import layers, loss, names, rows, trained, training
from torch import Tensor

import fzero
from fzero import FzeroError, VirtualMesh, optim, tree
from fzero.program import ops

ROUNDING = {"rtol": 2e-6, "atol": 2e-7}  # some 20 float32 operations of 6e-8


def is_matrix(path: str, leaf: Any) -> bool:
    return leaf.ndim > 1


def by_shape(path: str, leaf: Any) -> str:
    return "matrix" if leaf.ndim > 1 else "rest"


def run_torch(make: Callable[[list[Tensor], list[Tensor]], torch.optim.Optimizer], steps: int) -> tree.Tree:
    """The parameters after some steps of plain torch on the batch of all ranks of 8."""
    params = tree.map(lambda x: x.clone().requires_grad_(), layers())
    matrices, rest = (tree.leaves(part) for part in tree.split(params, is_matrix))
    optimizer = make(matrices, rest)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(params, rows(VirtualMesh(fsdp=8))).backward()
        optimizer.step()
    return tree.map(Tensor.detach, params)


def run(optimizer: optim.GradientTransformation, world: int, stage: int, steps: int) -> tree.Tree:
    """The parameters after the same steps on virtual ranks, which share that batch."""
    mesh, batch = VirtualMesh(fsdp=world), rows(VirtualMesh(fsdp=8))
    params = fzero.partition(layers(), mesh)
    state, step = optimizer.init(params), fzero.simulate(training(optimizer), mesh, stage=stage)
    for _ in range(steps):
        params, state, _ = step(params, state, batch)
    return fzero.unpartition(params)


def assert_close(got: tree.Tree, expected: tree.Tree) -> None:
    for a, b in zip(tree.leaves(got), tree.leaves(expected), strict=True):
        torch.testing.assert_close(a, b, **ROUNDING)


@pytest.mark.parametrize(("world", "stage"), [(1, 3), (8, 1), (8, 2), (8, 3)])
def test_multi_transform_is_torchs_two_parameter_groups(world: int, stage: int) -> None:
    groups = {"matrix": optim.adamw(0.02, eps=1e-3, weight_decay=0.3), "rest": optim.adamw(0.1, weight_decay=0.0)}
    expected = run_torch(
        lambda matrices, rest: torch.optim.AdamW(
            [{"params": matrices, "lr": 0.02, "weight_decay": 0.3, "eps": 1e-3}, {"params": rest, "lr": 0.1}],
            weight_decay=0.0,
        ),
        3,
    )
    assert_close(run(optim.multi_transform(groups, by_shape), world, stage, 3), expected)


@pytest.mark.parametrize("world", [1, 8])
def test_masked_leaves_others_alone(world: int) -> None:
    """Weight decay for matrices only."""
    optimizer = optim.chain(optim.masked(optim.add_decayed_weights(0.3), is_matrix), optim.sgd(0.1, momentum=0.9))
    expected = run_torch(
        lambda matrices, rest: torch.optim.SGD(
            [{"params": matrices, "weight_decay": 0.3}, {"params": rest}], lr=0.1, momentum=0.9
        ),
        3,
    )
    assert_close(run(optimizer, world, 3, 3), expected)


def test_each_group_is_one_fused_update() -> None:
    groups = {"matrix": optim.adamw(0.02, weight_decay=0.3), "rest": optim.adamw(0.1)}
    optimizer = optim.apply_if_finite(optim.multi_transform(groups, by_shape), 5)
    case = trained(optimizer, layers(), VirtualMesh(fsdp=2))
    program = fzero.simulate(case.step, case.mesh).trace(*case.args)
    calls = [node for node in program.graph.nodes if ops.is_call(node, *ADAMW)]
    assert [len(call.args[0]) for call in calls] == [3, 3] and "scale_by_adam" not in names(program)


ADAMW = [ops.adamw, ops.record(ops.adamw).in_place]


def test_groups_keep_state_of_their_own_leaves_only() -> None:
    params = {"w": torch.ones(2, 2), "b": torch.ones(2), "frozen": torch.nn.Parameter(torch.ones(2), False)}
    groups = {"matrix": optim.sgd(0.1, momentum=0.9), "rest": optim.set_to_zero()}
    optimizer = optim.multi_transform(groups, by_shape)
    state = optimizer.init(params)
    assert tree.paths(state) == ["inner_states.matrix.0.trace.w"]
    grads = {"w": torch.ones(2, 2), "b": torch.ones(2), "frozen": None}
    updates, state = optimizer.update(grads, state, params)
    assert updates["b"].tolist() == [0.0, 0.0] and updates["w"].eq(-0.1).all() and updates["frozen"] is None
    assert optim.masked(optim.adam(0.1), is_matrix).update(
        grads, optim.masked(optim.adam(0.1), is_matrix).init(params)
    )[0]["b"] is grads["b"]  # fmt: skip


def test_an_unknown_label_names_the_leaf() -> None:
    optimizer = optim.multi_transform({"matrix": optim.sgd(0.1)}, by_shape)
    with pytest.raises(FzeroError, match=r"^layers\.0\.b: has the label 'rest'; give one of \['matrix'\]"):
        optimizer.init(layers())


@pytest.mark.parametrize("label", [["matrix"], {}, None, torch.ones(2)], ids=repr)
def test_a_label_that_is_none_of_the_transforms_names_the_leaf(label: Any) -> None:
    optimizer = optim.multi_transform({"matrix": optim.sgd(0.1), 3: optim.sgd(0.2)}, lambda path, leaf: label)
    message = re.escape(f"layers.0.b: has the label {label!r}; give one of ['matrix', 3]")
    with pytest.raises(FzeroError, match=f"^{message}"):
        optimizer.init(layers())


def test_a_transform_that_no_label_names_holds_no_leaves() -> None:
    groups = {"matrix": optim.sgd(0.5), "rest": optim.sgd(0.25), "unused": optim.adam()}
    optimizer, params = optim.multi_transform(groups, by_shape), {"w": torch.ones(2, 2), "b": torch.ones(2)}
    updates, state = optimizer.update(params, optimizer.init(params), params)
    assert updates["w"].eq(-0.5).all() and updates["b"].eq(-0.25).all()
    assert tree.paths(state) == ["inner_states.unused.0.count"]


def test_groups_that_are_none_are_named() -> None:
    with pytest.raises(FzeroError, match="multi_transform: has no transform; give one for each label"):
        optim.multi_transform({}, by_shape)
    with pytest.raises(FzeroError, match="multi_transform: labels is .'w': 'a'.; give a function"):
        optim.multi_transform({"a": optim.sgd()}, {"w": "a"})  # type: ignore[arg-type]
    params = {"w": torch.ones(2, 2)}
    state = optim.multi_transform({"all": optim.sgd()}, lambda path, leaf: "all").init(params)
    with pytest.raises(FzeroError, match=r"the state has the labels \['all'\], the optimizer \['matrix'\]; give the"):
        optim.multi_transform({"matrix": optim.sgd()}, by_shape).update(params, state)


# apply_if_finite


def test_updates_are_taken_after_too_many_errors() -> None:
    optimizer = optim.apply_if_finite(optim.sgd(0.5), max_consecutive_errors=2)
    params = {"a": torch.tensor([1.0, -0.0])}
    state = optimizer.init(params)
    assert state.last_finite
    seen = []
    for gradient in (1.0, math.nan, math.inf, 2.0, math.inf, math.inf, math.inf):
        updates, state = optimizer.update({"a": torch.full((2,), gradient)}, state, params)
        seen.append((updates["a"][0].item(), int(state.notfinite_count), bool(state.last_finite)))
    assert seen == [
        (-0.5, 0, True), (0.0, 1, False), (0.0, 2, False), (-1.0, 0, True), (0.0, 1, False), (0.0, 2, False),
        (-math.inf, 3, False),
    ]  # fmt: skip
    assert state.total_notfinite == 5


OPTIMIZERS = {
    "adamw": optim.adamw(0.1),
    "scheduled": optim.adamw(optim.linear_schedule(0.1, 0.0, 10), mask=is_matrix),
    "momentum": optim.sgd(0.1, momentum=0.9, nesterov=True),
    "clipped": optim.chain(optim.clip_by_global_norm(0.1), optim.adam(0.1)),
    "ema": optim.chain(optim.ema(0.9), optim.sgd(0.1)),
}


@pytest.mark.parametrize(("world", "stage", "donate"), [(1, 3, True), (8, 1, True), (8, 2, False), (8, 3, True)])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_skipped_step_changes_no_bit(name: str, world: int, stage: int, donate: bool) -> None:
    mesh = VirtualMesh(fsdp=world)
    optimizer = optim.apply_if_finite(OPTIMIZERS[name], 5)
    step = fzero.simulate(training(optimizer), mesh, stage=stage, donate=donate)
    plain = fzero.simulate(training(OPTIMIZERS[name]), mesh, stage=stage, donate=donate)
    params = fzero.partition(layers(2), mesh)
    state = params, optimizer.init(params)
    expected = params, OPTIMIZERS[name].init(params)
    if donate:
        state, expected = (fzero.partition(fzero.unpartition(x), mesh, like=x) for x in (state, expected))
    for is_finite in (True, False, False, True):
        *state, _ = step(*state, rows(mesh) * (1.0 if is_finite else math.inf))
        if is_finite:
            *expected, _ = plain(*expected, rows(mesh))
        assert bits(state[0], state[1].inner_state) == bits(*expected)
    assert state[1].total_notfinite.full_tensor() == 2


def bits(*trees: Any) -> list[bytes]:
    return [bytes(x.reshape(-1).view(torch.uint8).tolist()) for x in tree.leaves(fzero.unpartition(trees))]


def test_all_finite_sees_every_leaf_and_dtype() -> None:
    dtypes = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.complex64)
    values = {str(dtype): torch.full((3,), torch.finfo(dtype).max, dtype=dtype) for dtype in dtypes}
    values |= {"ids": torch.arange(3), "empty": torch.zeros(0), "scalar": torch.tensor(1.0)}
    assert optim.all_finite(values) and optim.all_finite({}) and optim.all_finite({"ids": torch.arange(3)})
    for key in (*map(str, dtypes), "scalar"):
        for wrong in (math.inf, -math.inf, math.nan):
            bad = values[key].clone()
            bad.view(-1)[-1] = wrong
            assert not optim.all_finite(values | {key: bad})


def test_select_takes_whole_trees() -> None:
    new, old = {"a": torch.tensor([math.nan, 1.0]), "n": torch.tensor(3)}, {"a": torch.zeros(2), "n": torch.tensor(4)}
    assert optim.select(torch.tensor(True), new, old)["n"] == 3
    assert optim.select(torch.tensor(False), new, old)["a"].tolist() == [0.0, 0.0]
    with pytest.raises(FzeroError, match="^n: this leaf is missing"):
        optim.select(torch.tensor(True), {"a": new["a"]}, old)


def test_a_choice_has_a_derivative() -> None:
    def chosen(x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        return optim.select(mask, [x * 2], [y * 3])[0].sum()

    x, y = torch.ones(2), torch.ones(2)
    for mask, expected in ((True, (2.0, 0.0)), (False, (0.0, 3.0))):
        of = functools.partial(chosen, mask=torch.tensor(mask))
        got = torch.func.grad(of, argnums=(0, 1))(x, y)
        assert tuple(g[0].item() for g in got) == expected
        _, tangent = torch.func.jvp(of, (x, y), (x, y))
        assert tangent == 2 * sum(expected)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: optim.apply_if_finite(optim.sgd(0.1), -1), "max_consecutive_errors is -1"),
        (lambda: optim.ema(1.0), "ema: decay is 1.0"),
    ],
)
def test_bad_numbers_are_named(make: Any, message: str) -> None:
    with pytest.raises(FzeroError, match=message):
        make()


# averages


@pytest.mark.parametrize("debias", [True, False])
def test_ema_is_its_formula(debias: bool) -> None:
    stage, mean = optim.ema(0.9, debias), torch.zeros(3, dtype=torch.float64)
    state = stage.init({"a": torch.zeros(3)})
    for count in range(1, 6):
        g = torch.randn(3)
        updates, state = stage.update({"a": g}, state)
        mean = 0.9 * mean + 0.1 * g
        torch.testing.assert_close(updates["a"], (mean / (1 - 0.9**count if debias else 1)).float(), **ROUNDING)
    assert state.count == 5


def test_ema_in_a_wider_dtype() -> None:
    stage = optim.ema(0.999, accumulator_dtype=torch.float32)
    params = {"a": torch.ones(2, dtype=torch.bfloat16)}
    updates, state = stage.update(params, stage.init(params))
    assert state.ema["a"].dtype == torch.float32 and updates["a"].tolist() == pytest.approx([1.0, 1.0])


@pytest.mark.parametrize("world", [1, 8])
def test_an_average_of_parameters_is_swapped_in(world: int) -> None:
    mesh, batch = VirtualMesh(fsdp=world), rows(VirtualMesh(fsdp=8))
    train = training(optim.sgd(0.1))

    def step(params: Any, average: Any, state: Any, x: Tensor) -> Any:
        params, state, _ = train(params, state, x)
        return params, optim.incremental_update(params, average, 0.25), state

    params = fzero.partition(layers(), mesh)
    average = fzero.partition(tree.map(Tensor.double, layers()), mesh)  # wider than the parameters
    state, plain, expected = optim.sgd(0.1).init(params), layers(), tree.map(Tensor.double, layers())
    run, evaluate = fzero.simulate(step, mesh), fzero.simulate(lambda p, x: loss(p, x.double()), mesh)
    for _ in range(3):
        params, average, state = run(params, average, state, batch)
        plain, _, _ = train(plain, optim.sgd(0.1).init(plain), batch)
        expected = tree.map(lambda old, new: 0.75 * old + 0.25 * new, expected, plain)
    assert_close(fzero.unpartition(average), expected)
    torch.testing.assert_close(evaluate(average, batch), loss(expected, batch.double()), **ROUNDING)


def test_a_narrow_average_rounds_its_state_only() -> None:
    """Gradients of float32 beside a state of bfloat16: the average of the step is as exact as the state was."""
    stage = optim.ema(0.9, accumulator_dtype=torch.bfloat16)
    first, second = torch.tensor([1.0, 1.001953125]), torch.tensor([1.00390625, 3.0])
    state = stage.init({"a": first})
    updates, state = stage.update({"a": first}, state)
    torch.testing.assert_close(updates["a"], first)
    held = (0.1 * first).bfloat16()
    assert torch.equal(state.ema["a"], held)
    updates, state = stage.update({"a": second}, state)
    torch.testing.assert_close(updates["a"], (0.9 * held.float() + 0.1 * second) / (1 - 0.9**2))
    assert state.ema["a"].dtype == torch.bfloat16
