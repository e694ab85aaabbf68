"""The fuse pass: one call of a fused kernel for all leaves, wherever the step updates parameters."""

from __future__ import annotations

import functools
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
    rows,
    trained,
    training,
    tried,
)
from torch import Tensor, fx

import fzero
from fzero import optim, tree, value_and_grad
from fzero.optim import operations
from fzero.passes import bucket, defer, fuse, skip
from fzero.program import ops
from fzero.program.program import Program
from fzero.program.records import name_of

UPDATES = (ops.adagrad, ops.adamw, ops.momentum, ops.sgd)
ROUNDING = {"rtol": 2e-6, "atol": 2e-7}  # some 20 float32 operations of 6e-8, in another order


def fused(case: Case) -> Program:
    """The program after `fuse`. Asserts that results stay the same, up to rounding where a kernel is called."""
    before = case.trace()
    program = apply(before, bucket, fuse)
    (assert_close if calls(program, *UPDATES) else assert_same)(case.run(program), case.run(before))
    return program


def assert_close(got: Outputs, expected: Outputs) -> None:
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, **ROUNDING)


def adamws(program: Program) -> list[tuple[int, float]]:
    """`(number of leaves, weight decay)` of each `adamw`, fewest leaves first."""
    return sorted((len(call.args[0]), call.args[-1]) for call in calls(program, ops.adamw))


def updates(program: Program) -> list[str]:
    """`"adamw 6"` for each call of a kernel for 6 leaves, in order."""
    return [f"{name_of(call)} {len(call.args[0])}" for call in calls(program, *UPDATES)]


@pytest.mark.parametrize(("name", "world"), EVERY_STEP)
def test_results_are_the_same_up_to_rounding(name: str, world: int) -> None:
    case, program, outputs = tried(name, world)
    assert_close(case.run(apply(program, fuse)), outputs)


@pytest.mark.parametrize("name", ["averaged", "unrolled"])
def test_steps_without_list_operations_are_left_alone(name: str) -> None:
    _, program, _ = tried(name, 2)
    assert names(fuse(program)) == names(program)


def test_adamw_of_all_leaves_is_one_call() -> None:
    program = fused(trained(optim.adamw(0.1, b1=0.8, b2=0.95, eps=1e-6, weight_decay=0.3), layers(), MESH))
    (call,) = calls(program, ops.adamw)
    assert [len(column) for column in call.args[:4]] == [6, 6, 6, 6]
    assert call.args[5:] == (0.1, 0.8, 0.95, 1e-6, 0.3)
    assert not {"scale_by_adam", "_foreach_add", "_foreach_mul"} & set(names(program))


def test_lists_of_the_call_belong_together() -> None:
    program = fused(trained(optim.adamw(0.1), layers(), MESH))
    (call,) = calls(program, ops.adamw)
    leaf = {node: (a.bucket, a.leaf) for node, a in zip(program.placeholders, program.arguments)}
    params, grads, mu, nu = call.args[:4]
    assert [leaf[x] for x in params] == [leaf[x] for x in mu] == [leaf[x] for x in nu]
    assert [leaf[x] for x in params] == [(part.args[1], part.args[2][part.args[3]]) for part in grads]
    assert [program.arguments[program.placeholders.index(x)].path for x in (mu[0], nu[0])] == [
        "1.0.mu.layers.0.b", "1.0.nu.layers.0.b"
    ]  # fmt: skip


def test_adam_is_adamw_without_decay() -> None:
    assert adamws(fused(trained(optim.adam(0.1), layers(), MESH))) == [(6, 0.0)]


def test_a_decay_of_one_is_no_decay_of_another_size() -> None:
    assert adamws(fused(trained(optim.adamw(0.1, weight_decay=1.0), layers(1), MESH))) == [(2, 1)]


def test_a_decay_without_a_factor_is_one() -> None:
    decayed = optim.chain(
        optim.scale_by_adam(),
        optim.stateless(lambda updates, params: tree.unflatten(
            tree.flatten(updates)[1], torch._foreach_add(tree.leaves(updates), tree.leaves(params))
        )),
        optim.scale_by_learning_rate(0.1),
    )  # fmt: skip
    assert adamws(fused(trained(decayed, layers(1), MESH))) == [(2, 1)]


def test_the_call_stands_where_its_chain_has_ended() -> None:
    optimizer = optim.adamw(0.1)

    def step(params: tree.Tree, state: Any, x: Tensor) -> Any:
        updates, state = optimizer.update(value_and_grad(loss)(params, x)[1], state, params)
        between = x.exp()
        return optim.apply_updates(params, updates), state, between, x.cos()

    order = names(fused(trained(optimizer, layers(1), MESH)._replace(step=step)))
    assert [name for name in order if name in ("exp", "adamw", "cos")] == ["exp", "adamw", "cos"]


def test_a_mask_makes_one_call_for_each_decay() -> None:
    program = fused(trained(optim.adamw(0.1, weight_decay=0.3, mask=lambda path, leaf: leaf.ndim > 1), layers(), MESH))
    assert adamws(program) == [(3, 0.0), (3, 0.3)] and "scale_by_adam" not in names(program)


def test_a_schedule_gives_a_rate_that_is_computed() -> None:
    program = fused(trained(optim.adamw(optim.linear_schedule(0.2, 0.1, 10)), layers(), MESH))
    (call,) = calls(program, ops.adamw)
    assert isinstance(call.args[5], fx.Node) and adamws(program) == [(6, 1e-2)]


def test_clipping_before_stays_before() -> None:
    program = fused(trained(optim.chain(optim.clip_by_global_norm(1e-3), optim.adamw(0.1)), layers(), MESH))
    assert len(adamws(program)) == 1 and names(program).count("_foreach_mul") == 1


def test_each_dtype_has_a_call_of_its_own() -> None:
    params = {"layers": [layers(1)["layers"][0], tree.map(Tensor.double, layers(1)["layers"][0])]}
    program = fused(
        trained(optim.adamw(0.1), params, MESH, lambda p, x: loss(tree.map(lambda leaf: leaf.float(), p), x))
    )
    assert adamws(program) == [(2, 1e-2), (2, 1e-2)]
    assert [{x.meta["val"].dtype for x in call.args[0]} for call in calls(program, ops.adamw)] in (
        [{torch.float32}, {torch.float64}], [{torch.float64}, {torch.float32}]
    )  # fmt: skip


def test_parameters_narrower_than_their_moments_are_left_alone() -> None:
    optimizer = optim.adamw(0.1)
    params = fzero.partition(layers(), MESH)
    narrow = tree.map(lambda p: p.to(torch.bfloat16), params)
    assert (
        adamws(fused(Case(training(optimizer), MESH, (narrow, optimizer.init(params), rows(MESH).to(torch.bfloat16)))))
        == []
    )


def test_two_optimizers_have_a_call_each() -> None:
    slow, fast = optim.adamw(0.01), optim.adamw(0.1)

    def step(params: tree.Tree, states: tuple[Any, Any], x: Tensor) -> tuple[tree.Tree, tuple[Any, Any]]:
        halves = tree.split(params, lambda path, leaf: path.endswith("w"))
        _, grads = value_and_grad(lambda *halves: loss(tree.merge(*halves), x))(*halves)
        _, others = value_and_grad(lambda b, w: loss(tree.merge(w, b), x))(*reversed(halves))
        done = [o.update(g, s, p) for o, g, s, p in zip((slow, fast), (grads, others), states, halves)]
        params = tree.merge(*(optim.apply_updates(p, updates) for p, (updates, _) in zip(halves, done)))
        return params, (done[0][1], done[1][1])

    params = fzero.partition(layers(), MESH)
    weights, biases = tree.split(params, lambda path, leaf: path.endswith("w"))
    program = fused(Case(step, MESH, (params, (slow.init(weights), fast.init(biases)), rows(MESH))))
    assert sorted((len(call.args[0]), call.args[5]) for call in calls(program, ops.adamw)) == [(3, 0.01), (3, 0.1)]


def test_each_of_two_updates_in_a_row_is_a_call() -> None:
    once = trained(optim.adamw(0.1), layers(), MESH)

    def step(params: tree.Tree, state: Any, x: Tensor) -> Any:
        params, state, _ = once.step(params, state, x)
        return once.step(params, state, x)

    program = fused(once._replace(step=step))
    assert adamws(program) == [(6, 1e-2), (6, 1e-2)] and "scale_by_adam" not in names(program)


# other optimizers


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        (optim.sgd(0.1), (0.1, 0.0)),
        (optim.sgd(0.1, weight_decay=0.3), (0.1, 0.3)),
        (optim.sgd(optim.linear_schedule(0.2, 0.1, 10)), (None, 0.0)),
    ],
)
def test_sgd_is_one_call(optimizer: optim.GradientTransformation, expected: tuple[Any, ...]) -> None:
    program = fused(trained(optimizer, layers(), MESH))
    (call,) = calls(program, ops.sgd)
    assert len(call.args[0]) == 6 and not has_lists(program)
    assert tuple(None if isinstance(x, fx.Node) else x for x in call.args[2:]) == expected


def has_lists(program: Program) -> bool:
    return any(name.startswith("_foreach_") or name in operations.STAGES for name in names(program))


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_sgd_with_momentum_is_one_call(nesterov: bool, decay: float) -> None:
    program = fused(trained(optim.sgd(0.1, 0.9, nesterov, weight_decay=decay), layers(), MESH))
    (call,) = calls(program, ops.momentum)
    assert call.args[3:] == (0.1, 0.9, nesterov, decay) and not has_lists(program)
    assert {argument_of(program, x).path[:10] for x in call.args[2]} == {"1.0.trace." if not decay else "1.1.trace."}


def argument_of(program: Program, node: fx.Node) -> Any:
    return program.arguments[program.placeholders.index(node)]


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_adagrad_is_one_call(decay: float) -> None:
    program = fused(trained(optim.adagrad(0.1, eps=1e-3, weight_decay=decay), layers(), MESH))
    (call,) = calls(program, ops.adagrad)
    assert call.args[3:] == (0.1, 1e-3, decay) and not has_lists(program)


def test_the_decay_of_adam_stays_in_front() -> None:
    program = fused(trained(optim.adam(0.1, weight_decay=0.3), layers(), MESH))
    assert updates(program) == ["adamw 6"] and names(program).count("_foreach_add") == 1


def test_momentum_that_is_no_state_is_a_direction() -> None:
    def step(params: tree.Tree, state: Any, x: Tensor) -> Any:
        grads = tree.leaves(fzero.grad(loss)(params, x))
        weights = tree.leaves(params)
        steps = torch._foreach_mul(torch._foreach_add(grads, tree.leaves(state), alpha=0.9), -0.1)
        return torch._foreach_add(weights, steps), state

    program = fused(on_two_trees(step))
    assert updates(program) == ["sgd 6"] and names(program).count("_foreach_add") == 1


def on_two_trees(step: Callable[..., Any]) -> Case:
    return Case(step, MESH, (*(fzero.partition(layers(), MESH) for _ in range(2)), rows(MESH)))


def test_a_rate_that_depends_on_the_new_momentum_leaves_the_momentum_alone() -> None:
    optimizer = optim.trace(0.9)

    def step(params: tree.Tree, state: Any, x: Tensor) -> Any:
        updates, state = optimizer.update(fzero.grad(loss)(params, x), state)
        rate = -0.1 / (1 + optim.global_norm(state.trace))
        steps = torch._foreach_mul(tree.leaves(updates), rate)
        return torch._foreach_add(tree.leaves(params), steps), state

    params = fzero.partition(layers(), MESH)
    program = fused(Case(step, MESH, (params, optimizer.init(params), rows(MESH))))
    assert updates(program) == ["sgd 6"]


def test_leaves_that_move_along_the_momentum_of_one_are_not_updated_twice() -> None:
    def step(params: tree.Tree, state: Any, x: Tensor) -> Any:
        first, second = (layer["b"] for layer in params["layers"])
        trace = torch._foreach_add([first * 2], [state["layers"][0]["b"]], alpha=0.9)
        steps = torch._foreach_mul([trace[0], trace[0]], -0.1)
        return torch._foreach_add([first, first], steps), trace, second

    case = Case(step, MESH, (*(fzero.partition(layers(2), MESH) for _ in range(2)), rows(MESH)))
    assert len(updates(fused(case))) == 1


END = ["_foreach_mul", "_foreach_add"]  # the rate, and `apply_updates`
STAGES_OF_OTHERS = {
    "lion": (optim.lion(0.1, weight_decay=0.1), ["scale_by_lion", "_foreach_add", *END]),
    "amsgrad": (optim.amsgrad(), ["scale_by_amsgrad", *END]),
    "nadam": (optim.nadam(), ["scale_by_nadam", *END]),
    "rmsprop": (optim.rmsprop(momentum=0.9), ["scale_by_rms", "_foreach_add", *END]),
    "rmsprop, centered": (optim.rmsprop(centered=True), ["scale_by_stddev", *END]),
    "lamb": (optim.lamb(0.1), ["scale_by_adam", "_foreach_add", "sums_of_squares", "scale_each", *END]),
    "schedule_free": (optim.schedule_free(optim.sgd(0.1), 0.1), ["_foreach_mul", "schedule_free", "_foreach_add"]),
    "adafactor": (optim.adafactor(), [
        "average_rows_and_columns", "_foreach_mul", "_foreach_mul", "_foreach_add", "scale_by_factors",
        "scale_by_floored_rms", "sums_of_squares", "scale_each", "_foreach_masked_fill", "sums_of_squares",
        "scale_each", "_foreach_mul", *END,
    ]),
}  # fmt: skip
"""Optimizer -> its list operations."""


@pytest.mark.parametrize("name", STAGES_OF_OTHERS)
def test_other_optimizers_have_a_list_operation_a_stage(name: str) -> None:
    optimizer, expected = STAGES_OF_OTHERS[name]
    program = fused(trained(optimizer, layers(), MESH))
    ours = {*operations.STAGES, *operations.SUMS, *operations.MAPS}
    assert [each for each in names(program) if each.startswith("_foreach_") or each in ours] == expected
    assert updates(program) == []


def test_adamw_is_found_behind_clipping_with_a_schedule_and_a_mask() -> None:
    schedule = optim.warmup_cosine_decay_schedule(0.0, 0.1, 2, 10)
    adamw = optim.adamw(schedule, weight_decay=0.3, mask=lambda path, leaf: leaf.ndim > 1)
    program = fused(trained(optim.chain(optim.clip_by_global_norm(1e-3), adamw), layers(), MESH))
    assert adamws(program) == [(3, 0.0), (3, 0.3)] and names(program).count("_foreach_mul") == 1


def test_adamw_is_found_in_front_of_a_choice_between_new_and_old_values() -> None:
    """As behind a loss scale: a step with an overflow changes nothing."""
    once = trained(optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(0.1)), layers(), MESH)

    def step(params: tree.Tree, state: Any, x: Tensor) -> Any:
        new, new_state, value = once.step(params, state, x)
        finite = fzero.pmean(value, "fsdp") < 1e3
        return (*tree.map(lambda a, b: torch.where(finite, a, b), (new, new_state), (params, state)), value)

    assert adamws(fused(once._replace(step=step))) == [(6, 1e-2)]


def with_updates(optimizer: optim.GradientTransformation, use: Callable[[tree.Tree], Any]) -> Case:
    """Training that also returns `use(updates)`."""

    def step(params: tree.Tree, state: Any, x: Tensor) -> tuple[tree.Tree, Any, Any]:
        _, grads = value_and_grad(loss)(params, x)
        updates, state = optimizer.update(grads, state, params)
        return optim.apply_updates(params, updates), state, use(updates)

    return trained(optimizer, layers(), MESH)._replace(step=step)


def test_updates_that_are_used_elsewhere_are_left_alone() -> None:
    assert adamws(fused(with_updates(optim.adamw(0.1), lambda updates: updates))) == []


def test_a_leaf_whose_update_is_used_elsewhere_is_left_alone_among_others() -> None:
    program = fused(with_updates(optim.adamw(0.1), lambda updates: updates["layers"][0]["w"].square().sum()))
    assert adamws(program) == [(5, 1e-2)]
    assert rows_of_lists(program) == {"scale_by_adam": {1}, "_foreach_add": {1}, "_foreach_mul": {1}}


def rows_of_lists(program: Program) -> dict[str, set[int]]:
    """List operation -> the numbers of leaves that its calls have."""
    found: dict[str, set[int]] = {}
    for node in program.graph.nodes:
        if node.op == "call_function" and (name_of(node) in operations.STAGES or name_of(node).startswith("_foreach_")):
            found.setdefault(name_of(node), set()).add(len(node.args[0]))
    return found


@pytest.mark.parametrize("is_apart", [True, False])
def test_beside_another_optimizer_nothing_is_computed_twice(is_apart: bool) -> None:
    """The list operations in front of the call have the rows of the other optimizer's leaves alone."""
    pair = {"w": optim.lion(0.1, weight_decay=0.1), "b": optim.adamw(0.1)}
    groups = optim.multi_transform(pair, lambda path, leaf: path[-1])
    safe = optim.apply_if_finite(groups, 3)
    case = trained(groups if is_apart else safe, layers(), MESH)
    program = fused(case) if is_apart else apply(case.trace(), bucket, defer, fuse, skip)
    assert adamws(program) == [(3, 1e-2)] and "scale_by_adam" not in names(program)
    assert rows_of_lists(program)["_foreach_add"] == {3}


def test_a_chain_without_a_rate_is_left_alone() -> None:
    assert adamws(fused(trained(optim.scale_by_adam(), layers(), MESH))) == []


def test_updates_that_are_not_simply_multiplied_are_left_alone() -> None:
    def divide(updates: tree.Tree, params: tree.Tree | None) -> tree.Tree:
        leaves, treedef = tree.flatten(updates)
        return tree.unflatten(treedef, torch._foreach_div(leaves, -10.0))

    assert adamws(fused(trained(optim.chain(optim.scale_by_adam(), optim.stateless(divide)), layers(), MESH))) == []


@pytest.mark.parametrize(
    "apply_updates", [torch._foreach_sub, functools.partial(torch._foreach_add, alpha=2.0)], ids=["subtracted", "twice"]
)
def test_updates_that_are_not_simply_added_are_left_alone(apply_updates: Callable[..., list[Tensor]]) -> None:
    optimizer = optim.adamw(0.1)

    def step(params: tree.Tree, state: Any, x: Tensor) -> tuple[Any, Any]:
        _, grads = value_and_grad(loss)(params, x)
        updates, state = optimizer.update(grads, state, params)
        return apply_updates(tree.leaves(params), tree.leaves(updates)), state

    assert adamws(fused(trained(optimizer, layers(), MESH)._replace(step=step))) == []


def test_a_step_that_returns_one_moment_only_is_left_alone() -> None:
    training_case = trained(optim.adamw(0.1), layers(), MESH)

    def step(*args: Any) -> tuple[Any, Any]:
        params, (adam, *_), _ = training_case.step(*args)
        return params, adam.mu

    assert updates(fused(training_case._replace(step=step))) == []


def test_decay_towards_other_weights_is_left_alone() -> None:
    anchored = optim.chain(
        optim.scale_by_adam(),
        optim.stateless(lambda updates, params: tree.unflatten(
            tree.flatten(updates)[1],
            torch._foreach_add(tree.leaves(updates), [p * 2 for p in tree.leaves(params)], alpha=0.1),
        )),
        optim.scale_by_learning_rate(0.1),
    )  # fmt: skip
    assert updates(fused(trained(anchored, layers(), MESH))) == []


def test_state_that_is_not_returned_is_no_reason_to_fail() -> None:
    def step(*args: Any) -> Any:
        return training(optim.adamw(0.1))(*args)[0]

    fused(trained(optim.adamw(0.1), layers(), MESH)._replace(step=step))


def test_a_power_of_a_list_whose_items_nothing_uses_is_dropped() -> None:
    """Its first operand is a number."""
    mesh, plain = fzero.VirtualMesh(fsdp=2), {"a": torch.ones(4), "b": torch.full((4,), 2.0)}

    def step(params: Any) -> Any:
        leaves, treedef = fzero.tree.flatten(params)
        powers = torch._foreach_pow(2.0, leaves)
        return fzero.tree.unflatten(treedef, torch._foreach_add(leaves, [powers[0]] * 2))

    def unused(params: Any) -> Any:
        powers = torch._foreach_pow(2.0, [*params.values()])
        return {name: p + 0 * powers[0].mean() for name, p in zip(params, torch._foreach_add([*params.values()], 1.0))}

    for each in (step, unused):
        got = fzero.unpartition(fzero.simulate(each, mesh)(fzero.partition(plain, mesh)))
        assert all(torch.equal(got[name], each(plain)[name]) for name in plain)
