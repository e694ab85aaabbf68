"""The donate pass: state is updated in its own memory, and only where nobody could tell."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from programs import (
    EVERY_STEP,
    MESH,
    Case,
    apply,
    assert_same,
    calls,
    dense,
    layers,
    loss,
    names,
    on_rows,
    rows,
    trained,
    tried,
)
from torch import Tensor

import fzero
from fzero import optim, tree
from fzero.base.mesh import VirtualMesh
from fzero.layout.layout import replicated_layout
from fzero.passes import bucket, defaults, donate, fuse, relieve
from fzero.program import ops
from fzero.program.program import Program
from fzero.program.records import name_of
from fzero.ranks.virtual import virtual
from fzero.values.sharded import Sharded

ALONE = VirtualMesh(fsdp=1)
WITHOUT = functools.partial(defaults, in_place=False)


def on_params(step: Callable[..., Any], mesh: VirtualMesh = MESH, count: int = 2) -> Case:
    """`step(params, x)`."""
    return on_rows(step, layers(count), mesh=mesh)


def on_two_trees(step: Callable[..., Any], mesh: VirtualMesh = MESH) -> Case:
    """`step(params, others, x)` with two trees of one layout."""
    return on_rows(step, layers(2), layers(2, seed=1), mesh=mesh)


def doubled(params: tree.Tree) -> tree.Tree:
    return tree.map(lambda p: p * 2, params)


def donated(case: Case) -> tuple[Program, set[str]]:
    """The program after `donate`, and the first entry of each donated path. Checks that results stay the same."""
    before = apply(case.trace(), bucket, fuse)
    program = apply(before, donate)
    assert_same(case.run(program), case.run(before))
    return program, {argument.path.split(".")[0] for argument in program.arguments if argument.donated}


def state_results(program: Program) -> list[str]:
    """The `op` of the node of each result that is state."""
    pairs = zip((r for r in program.results if not r.is_constant), program.output.args[0])
    return [node.op for result, node in pairs if result.bucket is not None]


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(("name", "world"), EVERY_STEP)
def test_results_are_the_same_bit_for_bit(name: str, world: int, stage: int) -> None:
    case, program, _ = tried(name, world)
    program = apply(program, *WITHOUT(stage=stage))
    assert_same(case.run(apply(program, donate)), case.run(program))


@pytest.mark.parametrize(("name", "world"), EVERY_STEP)
def test_results_are_the_same_before_any_other_pass(name: str, world: int) -> None:
    case, program, outputs = tried(name, world)
    assert_same(case.run(apply(program, donate)), outputs)


def test_training_donates_all_state_and_no_batch() -> None:
    program = apply(trained(optim.adamw(0.1), layers(), MESH).trace(), bucket, fuse, donate)
    assert {(a.path.split(".")[0], a.donated) for a in program.arguments} == {("0", True), ("1", True), ("2", False)}
    assert set(state_results(program)) == {"placeholder"}
    (call,) = calls(program, ops.adamw_)
    assert not calls(program, ops.adamw) and call.meta["val"] is None


def test_the_given_program_is_left_as_it_was() -> None:
    program = trained(optim.adamw(0.1), layers(), MESH).trace()
    before = str(program.graph)
    donate(program)
    assert str(program.graph) == before and not any(argument.donated for argument in program.arguments)


def test_momentum_and_parameters_are_updated_in_place() -> None:
    program, paths = donated(trained(optim.sgd(0.1, momentum=0.9), layers(), MESH))
    assert paths == {"0", "1"} and set(state_results(program)) == {"placeholder"}
    assert len(calls(program, ops.momentum_)) == 1 and "_foreach_copy_" not in names(program)


def test_the_update_needs_no_second_copy_of_the_state() -> None:
    before = apply(trained(optim.adamw(0.1), layers(1, width=64), ALONE, width=64).trace(), bucket, fuse)
    after = apply(before, donate)
    held = [bytes_at(program, target) for program, target in ((before, ops.adamw), (after, ops.adamw_))]
    assert held[0] - held[1] == 3 * (64 * 64 + 64) * 4 + 4  # parameters and both moments, and the step count


def bytes_at(program: Program, target: object) -> int:
    """Bytes alive behind the one call of `target`."""
    (call,) = calls(program, target)
    return program.memory().timeline[list(program.graph.nodes).index(call)]


def test_what_is_read_behind_the_update_is_not_overwritten_before() -> None:
    def step(params: tree.Tree, x: Tensor) -> tuple[tree.Tree, Tensor]:
        new = optim.apply_updates(params, doubled(params))
        return new, sum((n * p).sum() for n, p in zip(tree.leaves(new), tree.leaves(params)))

    program, paths = donated(on_params(step))
    assert paths == {"0"} and names(program)[-1] == "_foreach_copy_"


def test_an_argument_that_is_gathered_behind_its_update_is_not_overwritten_before() -> None:
    def step(params: tree.Tree, x: Tensor) -> tuple[tree.Tree, Tensor]:
        return optim.apply_updates(params, doubled(params)), loss(params, x)

    for mesh in (ALONE, MESH):
        donated(on_params(step, mesh))


def test_alone_a_view_of_a_gathered_leaf_is_read_before_the_leaf_is_overwritten() -> None:
    params = {"w": torch.arange(16.0).view(4, 4)}

    def step(params: tree.Tree, x: Tensor) -> tuple[tree.Tree, Tensor]:
        view = params["w"].full_tensor().t()
        y = x @ view
        return optim.apply_updates(params, doubled(params)), y @ view

    donated(on_rows(step, params, mesh=ALONE, width=4))


def test_alone_a_gathered_leaf_that_is_returned_is_the_argument_itself() -> None:
    params = {"w": torch.arange(16.0).view(4, 4)}

    def step(params: tree.Tree, x: Tensor) -> tuple[tree.Tree, Tensor]:
        return doubled(params), params["w"].full_tensor().t()

    donated(on_rows(step, params, mesh=ALONE))


def test_an_operation_without_an_in_place_form_is_copied_back_at_the_end() -> None:
    def step(params: tree.Tree, others: tree.Tree, x: Tensor) -> tuple[tree.Tree, tree.Tree]:
        return tree.map(lambda p: torch.where(p > 0, p * 2, p), params), doubled(others)

    program, paths = donated(on_two_trees(step))
    assert paths == {"0", "1"} and set(state_results(program)) == {"placeholder"}
    assert names(program)[-1] == "_foreach_copy_" and names(program).count("mul_") == 4


def test_numbers_and_operations_without_an_in_place_form_are_left_alone() -> None:
    def step(params: tree.Tree, x: Tensor) -> tuple[tree.Tree]:
        return (tree.map(lambda leaf: 1 - leaf if leaf.ndim > 1 else 2**leaf, params),)

    program, paths = donated(on_params(step))
    assert paths == {"0"} and names(program) == ["pow", "rsub", "pow", "rsub", "_foreach_copy_"]


def test_lists_of_gradients_that_die_are_overwritten() -> None:
    def step(params: tree.Tree, x: Tensor) -> tree.Tree:
        grads = fzero.grad(loss)(params, x)
        updates = torch._foreach_mul(torch._foreach_add(tree.leaves(grads), 1.0), 0.1)
        weights, treedef = tree.flatten(params)
        return tree.unflatten(treedef, torch._foreach_sub(weights, updates))

    program, paths = donated(on_params(step))
    lists = [node for node in program.graph.nodes if "foreach" in name_of(node)]
    assert paths == {"0"} and [node.meta["val"] for node in lists] == [None] * 3
    assert [name_of(node) for node in lists] == ["_foreach_add_", "_foreach_mul_", "_foreach_sub_"]


@pytest.mark.parametrize("donate", [True, False])
def test_a_rate_that_the_dtype_rounds_to_nothing_is_no_zero(donate: bool) -> None:
    """1e-8 is 0 in float16, and 30000 times 1e-8 is not."""
    weights = {"w": torch.full((40,), 30000.0, dtype=torch.float16)}
    one = VirtualMesh(fsdp=1)

    def step(params: tree.Tree) -> tree.Tree:
        return {"w": torch._foreach_mul(torch._foreach_neg([params["w"]]), 1e-8)[0]}

    got = fzero.unpartition(fzero.simulate(step, one, donate=donate)(fzero.partition(weights, one)))
    assert torch.equal(got["w"], step(weights)["w"]) and got["w"].all()


def test_a_view_of_what_is_updated_is_no_operand_of_an_update_in_place() -> None:
    weight = torch.arange(9.0).view(3, 3)

    def step(params: tree.Tree, others: tree.Tree, x: Tensor) -> tuple[tree.Tree, tree.Tree]:
        return {"w": params["w"] + params["w"].t()}, {"w": torch._foreach_mul([others["w"]], [others["w"].t()])[0]}

    layout, on = replicated_layout((3, 3), MESH), virtual(MESH)
    trees = [{"w": Sharded(weight.clone(), layout, 0, on)} for _ in range(2)]
    program, paths = donated(Case(step, MESH, (*trees, rows(MESH))))
    assert paths == {"0", "1"} and names(program)[-1] == "_foreach_copy_"


def changed_places(params: tree.Tree, others: tree.Tree, x: Tensor) -> tuple[Any, tree.Tree]:
    kept = tree.map(lambda p: torch.where(p > 0, p, 0.0), params)
    return {"layers": [{"w": layer["b"], "b": layer["w"]} for layer in kept["layers"]]}, doubled(others)


def crossed(params: tree.Tree, others: tree.Tree, x: Tensor) -> tuple[tree.Tree, tree.Tree]:
    (a, treedef), b = tree.flatten(params), tree.leaves(others)
    news = torch._foreach_add([*a, *b], [*b, *a], alpha=0.5)
    return tree.unflatten(treedef, news[: len(a)]), tree.unflatten(treedef, news[len(a) :])


DONATED: dict[str, tuple[Case, set[str]]] = {
    "what is returned as it was": (on_params(lambda p, x: (p, doubled(p))), set()),
    "an argument that is returned as another": (on_two_trees(lambda a, b, x: (doubled(a), a)), set()),
    "an argument twice in a list": (
        on_params(lambda p, x: torch._foreach_mul([p["layers"][0]["w"]] * 2, [2.0, 3.0])),
        set(),
    ),
    "gradients beside parameters": (on_params(lambda p, x: (fzero.grad(loss)(p, x),)), set()),
    "state of another dtype": (on_params(lambda p, x: (tree.map(lambda leaf: leaf.to(torch.bfloat16), p), x)), set()),
    "swapped arguments": (on_two_trees(lambda a, b, x: (b, a)), set()),
    "leaves that change places": (on_two_trees(changed_places), {"1"}),
    "a sum so far": (on_two_trees(lambda p, total, x: tree.map(torch.add, total, fzero.grad(loss)(p, x))), {"1"}),
    "arguments in two orders": (on_two_trees(crossed), {"0", "1"}),
    "an argument that is added to itself": (
        on_params(lambda p, x: tree.map(lambda leaf: torch.add(leaf, leaf, alpha=0.5), p)),
        {"0"},
    ),
}


@pytest.mark.parametrize(("case", "expected"), DONATED.values(), ids=DONATED)
def test_arguments_are_donated_whose_memory_a_result_of_the_same_leaf_can_take(case: Case, expected: set[str]) -> None:
    program, paths = donated(case)
    assert paths == expected
    if not paths:
        assert "_foreach_copy_" not in names(program)


def test_an_argument_that_is_added_to_itself_is_overwritten() -> None:
    assert names(donated(DONATED["an argument that is added to itself"][0])[0]) == ["add_"] * 4


def test_swapped_arguments_are_left_alone() -> None:
    assert names(donated(DONATED["swapped arguments"][0])[0]) == []
    donated(on_two_trees(lambda a, b, x: tuple(tree.map(lambda leaf: leaf.detach(), t) for t in (b, a))))


def returned_gradients(params: tree.Tree, x: Tensor) -> tuple[tree.Tree, list[Tensor]]:
    grads = [x @ x.T, x.T @ x]
    return params, [*grads, *torch._foreach_mul(grads, 2.0)]


def twice_in_a_list(params: tree.Tree, x: Tensor) -> list[Tensor]:
    y = x * 2
    return torch._foreach_mul([y, y.t()], 2.0)


def read_as_a_view(params: tree.Tree, x: Tensor) -> list[Tensor]:
    doubled = torch._foreach_mul([x.T @ x], 2.0)
    return torch._foreach_add(doubled, [doubled[0].T])


def in_two_orders(params: tree.Tree, x: Tensor) -> list[Tensor]:
    made = torch._foreach_mul([x + 1, x + 2], 2.0)
    return torch._foreach_add(made, made[::-1])


def one_for_all(params: tree.Tree, x: Tensor) -> list[Tensor]:
    made = torch._foreach_mul([x + 1, x + 2], 2.0)
    return torch._foreach_add(made, [made[0]] * 2)


CONSTANT = torch.ones(2, 5)
OVERWRITTEN: dict[str, tuple[Callable[..., Any], list[str]]] = {
    "a list that dies": (lambda p, x: torch._foreach_add([x * 2], [x]), ["_foreach_add_"]),
    "gradients that are returned": (returned_gradients, ["_foreach_mul"]),
    "constants and batches": (lambda p, x: [torch._foreach_mul([y], 2.0) for y in (CONSTANT, x)], ["_foreach_mul"] * 2),
    "one memory twice in a list": (twice_in_a_list, ["_foreach_mul"]),
    "lists in two orders": (in_two_orders, ["_foreach_mul_", "_foreach_add"]),
    "one value for all items": (one_for_all, ["_foreach_mul_", "_foreach_add"]),
    "a list with itself": (
        lambda p, x: (lambda y: torch._foreach_mul(y, y))([x * 2, x + 1]),
        ["_foreach_mul_"],
    ),
    "a list whose result is wider": (lambda p, x: torch._foreach_add([(x * 2).bfloat16()], [x]), ["_foreach_add"]),
    "a list that is read as a view beside": (read_as_a_view, ["_foreach_mul_", "_foreach_add"]),
    "an expanded view": (lambda p, x: torch._foreach_mul([(x * 2)[:1].expand(2, 5)], 2.0), ["_foreach_mul"]),
    "one row of an expanded view": (
        lambda p, x: torch._foreach_mul([(x[0] * 2).expand(3, 5)[:1]], 2.0),
        ["_foreach_mul_"],
    ),
}


@pytest.mark.parametrize(("step", "expected"), OVERWRITTEN.values(), ids=OVERWRITTEN)
def test_lists_are_overwritten_that_die_and_have_memory_of_their_own(step: Any, expected: list[str]) -> None:
    program, _ = donated(on_params(step))
    assert [name for name in names(program) if "foreach" in name] == expected


def without(program: Program, path: str) -> Program:
    """The program without the results whose path contains `path`."""
    kept = [(result, node) for result, node in zip(program.results, program.output.args[0]) if path not in result.path]
    program = replace(program.copy(), results=tuple(result for result, _ in kept))
    program.output.args = ([next(n for n in program.graph.nodes if n.name == node.name) for _, node in kept],)
    return program


@pytest.mark.parametrize("dead_code", [True, False])
def test_results_that_nothing_uses_are_no_reason_to_fail(dead_code: bool) -> None:
    case = trained(optim.adamw(0.1), layers(1), MESH)
    for path in (".mu.", ".w"):
        program = without(apply(case.trace(), bucket, fuse), path)
        if not dead_code:
            program.graph.eliminate_dead_code()
        assert_same(case.run(apply(program, donate)), case.run(program))


def test_lists_that_nothing_uses_are_no_reason_to_fail() -> None:
    case = trained(optim.sgd(0.1, momentum=0.9), layers(1), MESH)
    program = without(case.trace(), ".w")
    assert_same(case.run(apply(program, donate)), case.run(program))


def test_an_item_of_a_list_that_nothing_uses_is_no_reason_to_fail() -> None:
    case = on_params(lambda p, x: torch._foreach_mul([x * 2, x * 3], 2.0))
    program = without(case.trace(), "1")
    after = apply(program, donate)
    assert "_foreach_mul_" in names(after)
    assert_same(case.run(after), case.run(program))


def test_what_is_on_its_way_is_not_overwritten() -> None:
    def step(params: tree.Tree, x: Tensor) -> tuple[tree.Tree, Tensor]:
        first, second = params["layers"]
        y = dense(first, x)
        new = optim.apply_updates(params, doubled(params))  # the gather of `second` has started
        return new, dense(second, y)

    case = on_params(step)
    assert_same(case.run(apply(case.trace(), *defaults(stage=3, in_place=True))), case.run(case.trace()))


def test_a_leaf_that_is_sent_again_with_its_bucket_is_not_overwritten_on_its_way() -> None:
    def step(params: tree.Tree, x: Tensor) -> tuple[tree.Tree, Tensor]:
        first, second = params["layers"]
        y = dense(first, x) @ second["w"]
        new = doubled(params)  # both leaves of `first` are on their way, of which only one is used again
        return new, y @ first["w"]

    case = on_params(step)
    chosen = (each for each in defaults(stage=3, in_place=True) if each is not relieve)  # which moves the doubling back
    program = apply(case.trace(), *chosen)
    assert_same(case.run(program), case.run(case.trace()))
    assert names(program).count("mul_") == 2 and names(program)[-1] == "_foreach_copy_"


def test_a_gathered_leaf_of_another_dtype_is_memory_of_its_own() -> None:
    def step(params: tree.Tree, x: Tensor) -> tuple[tree.Tree, Tensor]:
        narrow = params["layers"][0]["w"].to(torch.bfloat16)
        y = x.to(torch.bfloat16) @ narrow
        return doubled(params), y @ narrow.full_tensor().sin()

    program, _ = donated(on_params(step, ALONE))
    assert names(program).count("mul_") == 4


def test_both_of_two_results_of_one_argument_are_right() -> None:
    def step(params: tree.Tree, x: Tensor) -> tuple[tree.Tree, tree.Tree]:
        return optim.apply_updates(params, params), optim.apply_updates(params, doubled(params))

    donated(on_params(step))


def added_to(params: tree.Tree) -> tree.Tree:
    return optim.apply_updates(params, tree.map(torch.ones_like, params))


@pytest.mark.parametrize("update", [doubled, added_to])
def test_a_result_that_another_update_starts_from_is_kept(update: Callable[[tree.Tree], tree.Tree]) -> None:
    def step(params: tree.Tree, x: Tensor) -> tuple[tree.Tree, tree.Tree]:
        once = update(params)
        return once, update(once)

    donated(on_params(step))


def test_parameters_that_another_update_starts_from_are_kept() -> None:
    case = trained(optim.adamw(0.1), layers(), MESH)

    def step(*args: Any) -> tuple[Any, Any]:
        params, state, _ = case.step(*args)
        return (params, state), added_to(params)

    donated(case._replace(step=step))


def test_two_updates_in_a_row_are_copied_back() -> None:
    case = trained(optim.adamw(0.1), layers(1), MESH)

    def step(params: tree.Tree, state: Any, x: Tensor) -> Any:
        params, state, _ = case.step(params, state, x)
        return case.step(params, state, x)

    program, paths = donated(case._replace(step=step))
    assert paths == {"0", "1"} and names(program)[-1] == "_foreach_copy_"


def test_an_average_that_reads_the_new_parameters_is_right() -> None:
    def step(params: tree.Tree, average: tree.Tree, x: Tensor) -> tuple[tree.Tree, tree.Tree]:
        new = optim.apply_updates(params, doubled(params))
        leaves, treedef = tree.flatten(average)
        return new, tree.unflatten(treedef, torch._foreach_lerp(leaves, tree.leaves(new), 0.5))

    program, paths = donated(on_two_trees(step))
    assert paths == {"0", "1"} and "_foreach_copy_" not in names(program)


def test_a_layer_that_only_part_of_the_step_updates() -> None:
    def step(params: tree.Tree, x: Tensor) -> tuple[tree.Tree, Tensor]:
        first, second = params["layers"]
        return {"layers": [first, doubled(second)]}, dense(first, x)

    program, _ = donated(on_params(step, ALONE))
    assert [a.path for a in program.arguments if a.donated] == ["0.layers.1.b", "0.layers.1.w"]


def random_step(seed: int) -> Case:
    """Some list operations, per-leaf operations, gradients and gathers on two trees, some of which are returned."""
    draw = random.Random(seed)

    def tree_of(values: Any, like: tree.Tree) -> tree.Tree:
        return tree.unflatten(tree.flatten(like)[1], values)

    trees: dict[str, Callable[[tree.Tree, tree.Tree, Tensor], tree.Tree]] = {
        "list sum": lambda a, b, x: tree_of(torch._foreach_add(tree.leaves(a), tree.leaves(b), alpha=0.5), a),
        "list mean": lambda a, b, x: tree_of(torch._foreach_lerp(tree.leaves(a), tree.leaves(b), 0.3), a),
        "list scale": lambda a, b, x: tree_of(torch._foreach_mul(tree.leaves(a), 0.9), a),
        "sum": lambda a, b, x: tree.map(lambda p, q: p + 0.5 * q, a, b),
        "scale": lambda a, b, x: doubled(a),
        "view": lambda a, b, x: tree.map(lambda p: p.detach(), a),
        "clip": lambda a, b, x: optim.clip_by_global_norm(0.1, on_nonfinite="zero").update(a, optim.EmptyState())[0],
        "gradient": lambda a, b, x: fzero.grad(loss)(a, x),
    }
    plan = [(draw.choice(list(trees)), draw.random(), draw.random()) for _ in range(draw.randint(2, 6))]
    returned = [draw.random() for _ in range(draw.randint(1, 4))]

    def step(a: tree.Tree, b: tree.Tree, x: Tensor) -> tuple[list[tree.Tree], list[Tensor]]:
        made = [a, b]
        for name, first, second in plan:
            made.append(trees[name](made[int(first * len(made))], made[int(second * len(made))], x))
        views = [tree.leaves(made[int(at * len(made))])[1].full_tensor().t() for at in returned[:2]]
        return [made[int(at * len(made))] for at in returned], views

    return on_two_trees(step, VirtualMesh(fsdp=draw.choice([1, 2, 3])))


@pytest.mark.parametrize("seed", range(40))
def test_results_of_random_steps_are_the_same_bit_for_bit(seed: int) -> None:
    case = random_step(seed)
    program = case.trace()
    assert_same(case.run(apply(program, *defaults(stage=2 + seed % 2, in_place=True))), case.run(program))


CAPTURED = torch.arange(25.0).view(5, 5)


@pytest.mark.parametrize("mesh", [ALONE, MESH])
def test_a_slice_that_is_taken_is_a_view_and_not_written_to(mesh: VirtualMesh) -> None:
    def step(params: tree.Tree, x: Tensor) -> tuple[Any, ...]:
        w = params["layers"][0]["w"]
        product = w @ w
        moved = torch._foreach_add([w.slice_of(product), w.slice_of(CAPTURED)], 1.0)
        return *moved, product

    case = on_params(step, mesh)
    program, _ = donated(case)
    before = case.run(case.trace())
    assert_same(case.run(program), before)
    assert torch.equal(CAPTURED, torch.arange(25.0).view(5, 5))


def test_temporaries_of_inference_mode_are_overwritten() -> None:
    def step(params: tree.Tree, x: Tensor) -> Any:
        with torch.inference_mode():
            first, second = torch._foreach_mul(torch._foreach_add([x, x + 1], 1.0), 2.0)
        return first + second

    case = on_rows(step, layers(1))
    program = case.trace()
    assert_same(case.run(apply(program, *defaults(stage=3, in_place=True))), case.run(program))


@pytest.mark.parametrize("donate", [True, False])
def test_two_carries_that_begin_as_one_value_are_two(donate: bool) -> None:
    """In the backward pass too, where both cotangents begin as that of a sum."""
    plain = {"layers": [{"b": torch.full((4,), 0.1 * i, dtype=torch.float64)} for i in range(3)]}
    x = torch.linspace(-1, 1, 16, dtype=torch.float64).view(4, 4)

    def body(carry: Any, _: None, layer: Any) -> Any:
        u = carry[0] + layer["b"]
        return (u, carry[1] * 0.5 + u), None

    def train(params: tree.Tree, x: Tensor, scan: Callable[..., Any] = fzero.scan) -> tree.Tree:
        def loss_of(p: tree.Tree) -> Tensor:
            (u, v), _ = scan(body, (x, x), layers=p["layers"])
            return torch.tanh(u + v).mean()

        return tree.map(lambda p, g: p - 0.1 * g, params, fzero.grad(loss_of)(params))

    def turns(body: Any, carry: Any, layers: Any) -> Any:
        for layer in layers:
            carry, _ = body(carry, None, layer)
        return carry, None

    expected = train(plain, x, turns)
    for stage in (1, 2, 3):
        got = fzero.simulate(train, MESH, stage=stage, donate=donate)(fzero.partition(plain, MESH), x)
        for a, b in zip(tree.leaves(fzero.unpartition(got)), tree.leaves(expected)):
            torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13)
