"""The bucket pass: one all-gather and one reduce-scatter a bucket, in the right places, with the same results."""

from __future__ import annotations

from collections.abc import Callable
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
    check,
    dense,
    differentiated,
    layers,
    loss,
    mlp,
    moved,
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
from fzero.layout.wires import wire
from fzero.passes import bucket, release
from fzero.program import ops
from fzero.program.program import Program
from fzero.program.records import name_of, record


def on_layer(step: Callable[..., Any]) -> Case:
    """`step(params, x)` with params of one layer."""
    return on_rows(step, layers(1))


def bucketed(case: Case) -> Program:
    """The program after `bucket`. Asserts that results stay the same."""
    return check(case, bucket)


def gathered_first(params: tree.Tree, x: Tensor) -> Tensor:
    return loss(tree.map(lambda leaf: leaf.full_tensor(), params), x)


def used_thrice(params: tree.Tree, x: Tensor) -> Tensor:
    (layer,) = params["layers"]
    return dense(layer, dense(layer, dense(layer, x))).square().mean()


def tied(params: tree.Tree, x: Tensor) -> Tensor:
    first, second = params["layers"]
    return (dense(second, dense(first, x)) @ first["w"].T).square().mean()


@pytest.mark.parametrize(("name", "world"), EVERY_STEP)
def test_results_are_the_same_bit_for_bit(name: str, world: int) -> None:
    case, program, outputs = tried(name, world)
    assert_same(case.run(apply(program, bucket)), outputs)


def test_the_given_program_is_left_as_it_was() -> None:
    program = differentiated(loss, layers(), MESH).trace()
    before = str(program.graph)
    bucket(program)
    assert str(program.graph) == before


def test_each_bucket_is_gathered_once_and_scattered_once() -> None:
    program = bucketed(differentiated(loss, layers(4), MESH))
    assert moved(program) == [
        "all_gather layers.0", "all_gather layers.1", "all_gather layers.2", "all_gather layers.3",
        "reduce_scatter layers.3", "reduce_scatter layers.2", "reduce_scatter layers.1", "reduce_scatter layers.0",
        "all_reduce fsdp",
    ]  # fmt: skip


def test_what_is_moved_is_the_padded_bucket() -> None:
    entries = bucketed(differentiated(loss, layers(1), VirtualMesh(fsdp=3))).comm()
    assert [entry.nbytes for entry in entries] == [48 * 4, 48 * 4, 4]  # 30 elements, padded to 3 * 16; the loss


def test_a_gather_stands_at_its_first_use() -> None:
    program = bucketed(differentiated(loss, layers(), MESH))
    for start in calls(program, ops.all_gather):
        (wait,) = start.users
        behind, family = wait, {wait}
        while behind in family or record(behind).is_derived:
            family |= {behind}
            behind = behind.next
        assert family & set(behind.all_input_nodes)


def test_a_scatter_stands_right_behind_the_last_of_its_gradients() -> None:
    program = bucketed(differentiated(loss, layers(), MESH))
    for start in calls(program, ops.reduce_scatter):
        assert start.prev in start.args[0]
        (wait,) = start.users
        assert start.next is wait and list(wait.users) == [wait.next, wait.next.next]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gathering_at_each_use_is_the_same_as_gathering_everything_first(stage: int) -> None:
    at_each_use, first = (
        release(bucketed(differentiated(fn, layers(4), MESH)), stage=stage) for fn in (loss, gathered_first)
    )
    assert at_each_use.comm() == first.comm()
    assert names(at_each_use) == names(first)


def test_a_layer_used_three_times_is_gathered_once() -> None:
    program = bucketed(differentiated(used_thrice, layers(1), MESH))
    assert moved(program).count("all_gather layers.0") == 1


def test_a_layer_used_three_times_is_scattered_once_as_if_it_were_gathered_first() -> None:
    def first(params: tree.Tree, x: Tensor) -> Tensor:
        return used_thrice(tree.map(lambda leaf: leaf.full_tensor(), params), x)

    assert moved(bucketed(differentiated(used_thrice, layers(1), MESH))) == moved(
        bucketed(differentiated(first, layers(1), MESH))
    )


def test_a_tied_leaf_is_gathered_with_its_bucket() -> None:
    program = bucketed(differentiated(tied, layers(2), MESH))
    assert moved(program)[:2] == ["all_gather layers.0", "all_gather layers.1"]
    assert moved(program).count("all_gather layers.0") == 1


def test_an_unused_leaf_is_never_gathered() -> None:
    params = {"used": {"w": torch.ones(5, 5), "spare": torch.ones(9)}, "unused": torch.ones(7)}
    program = bucketed(on_rows(lambda p, x: x @ p["used"]["w"], params))
    (start,) = calls(program, ops.all_gather)
    assert start.args[1:3] == ("used", [1])  # spare, w


def test_only_some_leaves_of_a_bucket_may_travel() -> None:
    def of_biases(biases: tree.Tree, weights: tree.Tree, x: Tensor) -> Tensor:
        return loss(tree.merge(biases, weights), x)

    def step(params: tree.Tree, x: Tensor) -> tuple[Tensor, tree.Tree]:
        biases, weights = tree.split(params, lambda path, leaf: path.endswith("b"))
        return fzero.value_and_grad(of_biases)(biases, weights, x)

    program = bucketed(on_rows(step, layers(1), mesh=VirtualMesh(fsdp=3)))
    (gather,), (scatter,) = calls(program, ops.all_gather), calls(program, ops.reduce_scatter)
    assert gather.args[2] == [0, 1] and scatter.args[2] == [0]
    assert wire(program.layouts["layers.0"], (0,)).numel == 48  # 5 elements of rank 0, padded to 16, three times
    assert [entry.nbytes for entry in program.comm()] == [48 * 4, 5 * 4, 4]  # a scatter sends no padding


def test_parameters_and_their_moving_average_keep_gathers_of_their_own() -> None:
    program = bucketed(on_rows(lambda p, average, x: mlp(p, x) - mlp(average, x), layers(2), layers(2, seed=1)))
    trees = [{program.arguments[program.placeholders.index(x)].path[0] for x in start.args[0]} for start in calls(
        program, ops.all_gather)]  # fmt: skip
    assert moved(program) == ["all_gather layers.0", "all_gather layers.1"] * 2
    assert trees == [{"0"}, {"0"}, {"1"}, {"1"}]


def test_gathers_of_two_trees_are_not_mixed() -> None:
    def step(params: tree.Tree, average: tree.Tree, x: Tensor) -> Tensor:
        (ours,), (theirs,) = params["layers"], average["layers"]
        return (x + theirs["b"]) @ ours["w"] + (x + ours["b"]) @ theirs["w"]

    program = bucketed(on_rows(step, layers(1), layers(1, seed=1)))
    arguments = dict(zip(program.placeholders, program.arguments))
    assert sorted([arguments[x].path for x in start.args[0]] for start in calls(program, ops.all_gather)) == [
        ["0.layers.0.b", "0.layers.0.w"], ["1.layers.0.b", "1.layers.0.w"]
    ]  # fmt: skip


def test_a_leaf_that_three_gradients_need_is_gathered_once() -> None:
    def step(params: tree.Tree, x: Tensor) -> tuple[tree.Tree, ...]:
        return fzero.grad(loss)(params, x), fzero.grad(loss)(params, x * 2), fzero.grad(loss)(params, x * 3)

    program = bucketed(on_layer(step))
    assert moved(program) == ["all_gather layers.0", *["reduce_scatter layers.0"] * 3]


def test_a_use_stays_in_front_of_what_overwrites_its_operand() -> None:
    def step(params: tree.Tree, x: Tensor) -> Tensor:
        (layer,) = params["layers"]
        y = x * 2
        z = y @ layer["w"]  # waits for the gather of both leaves, of which one is asked for below
        y.add_(1.0)
        return z + y * layer["b"]

    bucketed(on_layer(step))


def test_a_layer_passed_alone_is_one_bucket_still() -> None:
    _, layer = fzero.partition(layers(2), MESH)["layers"]
    program = bucketed(Case(dense, MESH, (layer, rows(MESH))))
    assert moved(program) == ["all_gather layers.1"]


def test_a_gather_that_depends_on_another_is_not_merged_with_it() -> None:
    def step(params: tree.Tree, x: Tensor) -> Tensor:
        grads = fzero.grad(loss)(params, x)
        return mlp(tree.map(lambda p, g: p - g, params, grads), x)

    program = bucketed(on_layer(step))
    assert moved(program) == ["all_gather layers.0", "reduce_scatter layers.0", "all_gather layers.0"]


def test_a_gather_that_depends_on_that_of_another_leaf_is_not_merged_with_it() -> None:
    def step(params: tree.Tree, x: Tensor) -> Tensor:
        (layer,) = params["layers"]
        return x @ (layer["w"] * fzero.pmean((x + layer["b"]).mean(), "fsdp"))

    program = bucketed(on_layer(step))
    assert moved(program) == ["all_gather layers.0", "all_reduce fsdp", "all_gather layers.0"]


def test_scatters_that_depend_on_each_other_are_not_merged() -> None:
    def step(params: tree.Tree, x: Tensor) -> tuple[tree.Tree, tree.Tree]:
        (layer,) = params["layers"]
        b = fzero.grad(lambda b: (x + b).square().mean())(layer["b"])
        return b, fzero.grad(lambda w: (x @ w * fzero.pmean((x + b).mean(), "fsdp")).mean())(layer["w"])

    case = on_layer(step)
    program = bucketed(case)
    assert [line for line in moved(program) if "scatter" in line] == ["reduce_scatter layers.0"] * 2


def test_leaves_and_slices_keep_their_shapes() -> None:
    case = differentiated(loss, layers(1), VirtualMesh(fsdp=3))
    before, after = case.trace(), bucketed(case)
    for old, new in ((ops.gather, ops.whole), (ops.scatter, ops.part)):
        shapes = [sorted(node.meta["val"].shape for node in calls(p, op)) for p, op in ((before, old), (after, new))]
        assert shapes[0] == shapes[1]


def test_a_sum_over_ranks_behind_one_leaf_does_not_split_its_bucket() -> None:
    def centred(params: tree.Tree, x: Tensor) -> Tensor:
        (layer,) = params["layers"]
        y = x @ layer["w"]
        return (torch.tanh(y - fzero.pmean(y, "fsdp")) + layer["b"]).square().mean()

    program = bucketed(differentiated(centred, layers(1), MESH))
    assert [line for line in moved(program) if "layers" in line] == ["all_gather layers.0", "reduce_scatter layers.0"]


def test_a_gradient_that_needs_no_gather_is_scattered_with_its_bucket() -> None:
    def linear(params: tree.Tree, x: Tensor) -> Tensor:
        first, second = params["layers"]
        return ((x @ first["w"]) @ second["w"] + second["b"]).sum()  # of second.b the gradient is a constant

    def step(params: tree.Tree, x: Tensor) -> tree.Tree:
        return torch.func.vjp(lambda p: linear(p, x), params)[1](torch.ones(()))[0]

    program = bucketed(on_rows(step, layers(2)))
    assert moved(program).count("reduce_scatter layers.1") == 1


def test_a_cast_before_the_gather_halves_what_is_moved() -> None:
    def narrow(params: tree.Tree, x: Tensor) -> Tensor:
        return loss(tree.map(lambda p: p.to(torch.bfloat16), params), x.to(torch.bfloat16))

    program = bucketed(differentiated(narrow, layers(1), MESH))
    gather, scatter, _ = program.comm()
    assert (gather.dtype, gather.nbytes) == (scatter.dtype, scatter.nbytes) == (torch.bfloat16, 32 * 2)


def narrowed(params: tree.Tree, x: Tensor) -> Tensor:
    return loss(tree.map(lambda p: p.to(torch.bfloat16), params), x.to(torch.bfloat16)).float()


@pytest.mark.parametrize("world", [1, 2, 3])
def test_slices_are_cast_by_the_gather_itself(world: int) -> None:
    program = bucketed(differentiated(narrowed, layers(2), VirtualMesh(fsdp=world)))
    gathers = calls(program, ops.all_gather)
    assert all(source.op == "placeholder" for gather in gathers for source in gather.args[0])
    assert [gather.kwargs for gather in gathers] == [{"dtype": torch.bfloat16}] * 2


def test_slices_that_are_not_cast_are_sent_as_they_are() -> None:
    (gather,) = calls(bucketed(differentiated(loss, layers(1), MESH)), ops.all_gather)
    assert not gather.kwargs


def test_a_cast_that_is_used_elsewhere_stays_there() -> None:
    def step(params: tree.Tree, x: Tensor) -> tuple[Tensor, Tensor]:
        narrow = params["layers"][0]["w"].to(torch.bfloat16)
        return x.to(torch.bfloat16) @ narrow, narrow * 2

    program = bucketed(on_rows(step, layers(1)))
    assert names(program).count("_to_copy") == 2 and calls(program, ops.all_gather)[0].kwargs


def test_only_casts_of_state_as_it_is_given_are_the_gathers() -> None:
    def step(params: tree.Tree, x: Tensor) -> Tensor:
        layer = params["layers"][0]
        wide = layer["w"].to(torch.float64, copy=True), (layer["b"] * 2).to(torch.float64)
        return x.double() @ wide[0] + wide[1]

    program = bucketed(on_rows(step, layers(1)))
    (gather,) = calls(program, ops.all_gather)
    assert sorted(map(name_of, gather.args[0])) == ["_to_copy", "arg1_1"]


# gradients on one rank


def test_a_rank_alone_keeps_its_gradients_where_they_lie() -> None:
    case = trained(optim.adamw(0.1), layers(2), VirtualMesh(fsdp=1))
    program, memory = apply(case.trace(), bucket), set[int]()

    def watch(node: Any, values: list[dict[Any, Any]]) -> None:
        if ops.is_call(node, ops.reduce_scatter):
            memory.update(values[0][full].data_ptr() for full in node.args[0])
        elif ops.is_call(node, ops.part):
            memory.remove(values[0][node].data_ptr())

    case.run(program, watch)
    assert calls(program, ops.part) and not memory


# casts of gradients


def narrow(params: tree.Tree, x: Tensor) -> Tensor:
    """The loss with weights of bfloat16."""
    return loss(tree.map(lambda leaf: leaf.to(torch.bfloat16), params), x.to(torch.bfloat16)).float()


def count_casts_of_gradients(program: Program) -> tuple[int, int]:
    """The casts of blocks, and of slices."""
    slices = [user for part in calls(program, ops.part) for user in part.users]
    blocks = sum(bool(node.kwargs) for node in calls(program, ops.wait))
    return blocks, sum(name_of(user) == "_to_copy" for user in slices)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_are_cast_as_the_block_that_they_arrive_in(stage: int, world: int) -> None:
    case = trained(optim.adamw(0.1), layers(3), VirtualMesh(fsdp=world), narrow)
    program = check(case, *(each for each in fzero.passes.defaults(stage=stage) if each is not fzero.passes.fuse))
    assert count_casts_of_gradients(program) == (3, 0)
    before = case.trace()
    assert_same(case.run(apply(before, bucket)), case.run(before))


def overwritten(grads: tree.Tree) -> tree.Tree:
    def overwrite(grad: Any) -> Any:
        wide = grad.float()
        wide.local.mul_(2.0)
        return wide

    return tree.map(overwrite, grads)


@pytest.mark.parametrize(
    ("use", "expected"),
    [
        (lambda grads: tree.map(lambda grad: grad.float(), grads), (1, 0)),
        (lambda grads: tree.map(lambda grad: (grad.float(), grad.float() * 2), grads), (1, 0)),
        (lambda grads: tree.map(lambda grad: (grad.float(), grad * 2), grads), (0, 2)),
        (lambda grads: tree.map(lambda grad: (grad.float(), grad), grads), (0, 2)),
        (lambda grads: tree.map(lambda grad: (grad.float(), grad.double()), grads), (0, 4)),
        (lambda grads: {"b": grads["layers"][0]["b"].float(), "w": grads["layers"][0]["w"].double()}, (0, 2)),
        (overwritten, (0, 2)),
    ],
    ids=["cast", "cast twice", "used as well", "returned as well", "two dtypes", "a dtype each", "overwritten"],
)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_blocks_are_cast_where_nothing_else_wants_them(
    world: int, use: Callable[[tree.Tree], Any], expected: tuple[int, int]
) -> None:
    held = tree.map(lambda leaf: leaf.to(torch.bfloat16), layers(1))
    case = on_rows(lambda p, x: use(fzero.grad(loss)(p, x.to(torch.bfloat16))), held, mesh=VirtualMesh(fsdp=world))
    assert count_casts_of_gradients(bucketed(case)) == expected


# memory that the step writes into


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_gradient_is_sent_behind_what_is_written_into_it(stage: int, world: int) -> None:
    """torch makes the gradient of `as_strided_scatter` by a copy into a view of new zeros."""

    def scattered(params: tree.Tree, x: Tensor) -> Tensor:
        (layer,) = params["layers"]
        return (x @ torch.as_strided_scatter(layer["w"], layer["b"], (5,), (6,), 0)).square().mean()

    case = differentiated(scattered, layers(1), VirtualMesh(fsdp=world))
    before = case.trace()
    assert_same(case.run(apply(before, *fzero.passes.defaults(stage=stage))), case.run(before))


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_slices_that_are_overwritten_later_are_gathered_as_they_were(stage: int, world: int) -> None:
    def step(params: tree.Tree, x: Tensor) -> tuple[Tensor, ...]:
        (layer,) = params["layers"]
        w = layer["w"].with_local(layer["w"].local * 1)
        before, others = x @ w.full_tensor(), x @ layer["w"]
        w.local.mul_(2.0)
        return before, others, x @ w.with_local(w.local).full_tensor()

    case = on_rows(step, layers(1), mesh=VirtualMesh(fsdp=world))
    before, others, after = zip(*case.run(apply(case.trace(), *fzero.passes.defaults(stage=stage))))
    for a, b, c in zip(before, others, after):
        assert torch.equal(a, b) and torch.allclose(c, 2 * a)


@pytest.mark.parametrize("replicated", [True, False])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_leaf_is_strided_from_its_own_first_element(stage: int, replicated: bool) -> None:
    """In a buffer another leaf comes first."""

    def step(params: tree.Tree) -> tuple[Tensor, ...]:
        (layer,) = params["layers"]
        w, mean = layer["w"], fzero.pmean(layer["w"] @ layer["w"], "fsdp")
        product = fzero.psum(mean.sum(0) * 1, "fsdp") / (2 if isinstance(w, fzero.Sharded) else 1)
        strided = torch.as_strided(product, (2,), (1,), 1)
        return w.T.as_strided((2, 2), (1, 2), 3), torch.as_strided_copy(w, (3,), (2,), 1), strided, mean

    plain = layers(1)
    params = fzero.partition(plain, MESH)
    if replicated:
        (layer,) = params["layers"]
        copy = layer["w"].new_zeros(5, 5)
        params["layers"][0]["w"] = copy.with_local(copy.local + plain["layers"][0]["w"])
    got = fzero.simulate(step, MESH, passes=fzero.passes.defaults(stage=stage))(params)
    for mine, theirs in zip(got, step(plain), strict=True):
        torch.testing.assert_close(mine, theirs)
