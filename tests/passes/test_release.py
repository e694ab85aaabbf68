"""The release pass: each stage of ZeRO keeps the right buckets, gathers the others again and scatters in time."""

from __future__ import annotations

import functools
from collections import Counter
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
    most_gathered,
    moved,
    names,
    on_rows,
    tried,
)
from torch import Tensor

from fzero import grad, tree
from fzero.base.errors import FzeroError
from fzero.base.mesh import VirtualMesh
from fzero.passes import accumulate, bucket, release
from fzero.program import ops
from fzero.program.program import Program
from fzero.program.records import is_call


def released(case: Case, stage: int) -> Program:
    return check(case, bucket, functools.partial(release, stage=stage))


def forward(fn: Callable[..., Any], count: int, mesh: VirtualMesh = MESH) -> Case:
    return on_rows(fn, layers(count), mesh=mesh)


def gathered_sizes(program: Program) -> dict[str | None, int]:
    """Bucket -> bytes of all its all-gathers together."""
    total = Counter[str | None]()
    for entry in program.comm():
        if entry.op == "all_gather":
            total[entry.bucket] += entry.nbytes
    return dict(total)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(("name", "world"), EVERY_STEP)
def test_results_are_the_same_bit_for_bit(name: str, world: int, stage: int) -> None:
    case, program, outputs = tried(name, world)
    program = bucket(program)
    assert_same(case.run(apply(program, functools.partial(release, stage=stage))), outputs)


@pytest.mark.parametrize("stage", [-1, 4, "3"])
def test_other_stages_are_refused(stage: Any) -> None:
    with pytest.raises(FzeroError, match=f"stage: is {stage!r}; stages are 0, 1, 2 and 3"):
        release(differentiated(loss, layers(1), MESH).trace(), stage=stage)


def test_the_name_of_an_axis_is_no_set_of_buckets() -> None:
    """Its letters are names of no buckets, so that every bucket was gathered again over all ranks."""
    with pytest.raises(FzeroError, match=r"keep: is 'local'; give a set .* insert the pass fzero\.variants\.hpz"):
        release(differentiated(loss, layers(1), MESH).trace(), stage=3, keep="local")


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("stage", [1, 2])
def test_stages_1_and_2_gather_p_and_scatter_p(stage: int, world: int) -> None:
    program = released(differentiated(loss, layers(4), VirtualMesh(fsdp=world)), stage)
    total = sum(layout.padded * 4 for layout in program.layouts.values())
    moved_bytes = Counter[str]()
    for entry in program.comm():
        moved_bytes[entry.op] += entry.nbytes
    assert total == 4 * 4 * {1: 32, 2: 32, 3: 48}[world]
    assert moved_bytes == {"all_gather": total, "reduce_scatter": total, "all_reduce": 4}


@pytest.mark.parametrize("world", [1, 2, 3])
def test_stage_3_gathers_2p_less_what_is_needless_and_scatters_p(world: int) -> None:
    program = released(differentiated(loss, layers(4), VirtualMesh(fsdp=world)), 3)
    layer = {1: 32, 2: 32, 3: 48}[world] * 4
    # The last layer is used forward and backward without another in between. The backward of `x @ w` needs w for the
    # gradient of x, and the first layer's x is the batch.
    twice = {"layers.1": 2 * layer, "layers.2": 2 * layer}
    assert {e.bucket: e.nbytes for e in program.comm() if e.op == "reduce_scatter"} == dict.fromkeys(
        ("layers.3", "layers.2", "layers.1", "layers.0"), layer
    )
    assert gathered_sizes(program) == {"layers.0": layer, "layers.3": layer, **twice}


def test_stage_3_gathers_backward_in_the_order_of_the_backward_pass() -> None:
    # torch computes a layer's weight gradient first, and with the weight, gathered again, that of its input
    assert moved(released(differentiated(loss, layers(4), MESH), 3)) == [
        "all_gather layers.0", "all_gather layers.1", "all_gather layers.2", "all_gather layers.3",
        "reduce_scatter layers.3",
        "reduce_scatter layers.2", "all_gather layers.2",
        "reduce_scatter layers.1", "all_gather layers.1",
        "reduce_scatter layers.0", "all_reduce fsdp",
    ]  # fmt: skip


def test_stage_3_keeps_one_layer_and_stage_2_all_that_are_used_again() -> None:
    case = differentiated(loss, layers(5), MESH)
    assert most_gathered(released(case, 3)) == 1
    assert most_gathered(released(case, 2)) == 4  # nothing in the backward pass needs the first one


def test_a_transposed_or_cast_leaf_does_not_keep_its_bucket_alive() -> None:
    def step(params: tree.Tree, x: Tensor) -> Tensor:
        weights = [layer["w"].full_tensor().double().t() for layer in params["layers"]]
        for weight in [*weights, *reversed(weights)]:
            x = torch.tanh(x.double() @ weight)
        return x

    case = forward(step, 3)
    program = released(case, 3)
    assert [line[-1] for line in moved(program)] == list("01210")
    assert most_gathered(program) == 1


def test_uses_in_a_row_share_a_gather() -> None:
    program = released(forward(lambda p, x: dense(p["layers"][0], dense(p["layers"][0], x)), 1), 3)
    assert moved(program) == ["all_gather layers.0"]


def test_a_layer_used_again_behind_another_is_gathered_again() -> None:
    def step(params: tree.Tree, x: Tensor) -> Tensor:
        first, second = params["layers"]
        return dense(first, dense(second, dense(first, x)))

    assert [line[-1] for line in moved(released(forward(step, 2), 3))] == list("010")
    assert [line[-1] for line in moved(released(forward(step, 2), 2))] == list("01")


def test_one_use_of_another_bucket_parts_two_uses_and_moves_nothing_else() -> None:
    def step(params: tree.Tree, x: Tensor) -> tuple[Tensor, ...]:
        first, second = (layer["w"] for layer in params["layers"])
        return x @ first @ second @ first @ first, x.exp(), x.sin()

    program = released(forward(step, 2), 3)
    chain = ["all_gather", "wait", "whole", "mm"]
    assert [line[-1] for line in moved(program)] == list("010")
    assert names(program) == [*chain * 3, "mm", "exp", "sin"]


def test_a_use_of_two_buckets_at_once_parts_neither_from_its_next_use() -> None:
    def step(params: tree.Tree, x: Tensor) -> Tensor:
        first, second = (layer["w"].full_tensor() for layer in params["layers"])
        return (x @ first) @ (first @ second) @ second

    assert [line[-1] for line in moved(released(forward(step, 2), 3))] == list("01")


def test_a_copy_of_a_leaf_that_is_written_to_is_kept() -> None:
    def step(params: tree.Tree, x: Tensor) -> Tensor:
        first, second = params["layers"]
        copy = first["w"].full_tensor().clone()
        copy[0].mul_(2.0)
        return dense(second, x @ copy) @ copy

    case = forward(step, 2)
    program = released(case, 3)
    assert [line[-1] for line in moved(program)] == list("01")


def test_a_returned_leaf_is_held_to_the_end() -> None:
    def step(params: tree.Tree, x: Tensor) -> tuple[Tensor, Tensor]:
        kept = params["layers"][0]["w"].full_tensor()
        return kept, dense(params["layers"][1], x @ kept)

    case = forward(step, 2)
    program = released(case, 2)
    assert moved(program) == ["all_gather layers.0", "all_gather layers.1"]


def test_stage_1_scatters_behind_everything_that_needs_no_gradient_slice() -> None:
    program = released(differentiated(loss, layers(4), MESH), 1)
    assert moved(program)[:4] == [f"all_gather layers.{i}" for i in range(4)]
    assert sorted(moved(program)[-4:]) == [f"reduce_scatter layers.{i}" for i in range(4)]
    first, *_ = calls(program, ops.reduce_scatter)
    needs_a_slice = {first}
    for node in list(program.graph.nodes)[list(program.graph.nodes).index(first) :]:
        if is_call(node, ops.reduce_scatter) or needs_a_slice & set(node.all_input_nodes):
            needs_a_slice.add(node)
        assert node in needs_a_slice


def test_stage_3_needs_less_memory() -> None:
    case = differentiated(loss, layers(8, width=32), VirtualMesh(fsdp=8), width=32)
    peaks = [released(case, stage).memory().peak for stage in (1, 2, 3)]
    layer = (32 * 32 + 32 + 96) * 4  # 1056 elements, padded to 8 * 16 * 9
    assert peaks[1] - peaks[2] == 6 * layer  # of layers 1 to 7 stage 2 keeps all, stage 3 the last one


# what stage 1 has before it: gradients of microbatches are summed whole


def microbatches(params: tree.Tree, x: Tensor) -> tree.Tree:
    """The mean gradient of three parts of a batch, one after the other."""
    grads = [grad(loss)(params, part) for part in (x, x.flip(0), x * 2)]
    return tree.map(lambda a, b, c: (a + b + c) / 3, *grads)


@pytest.mark.parametrize(("passes", "times"), [((bucket,), 3), ((accumulate, bucket), 1)])
def test_accumulated_microbatches_scatter_once(passes: tuple[Any, ...], times: int) -> None:
    program = apply(forward(microbatches, 2).trace(), *passes)
    assert Counter(moved(program))["reduce_scatter layers.0"] == times


@pytest.mark.parametrize("world", [1, 2, 3])
def test_accumulated_microbatches_give_the_same_up_to_rounding(world: int) -> None:
    case = forward(microbatches, 2, VirtualMesh(fsdp=world))
    program = case.trace()
    for got, expected in zip(case.run(apply(program, accumulate)), case.run(program)):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-7)  # sums of 3 parts and 3 ranks change places


SUMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "of multiples": lambda a, b: a * 0.5 + b / 3,
    "of a negative": lambda a, b: b + -a,
    "weighted": lambda a, b: torch.sub(a, b, alpha=0.5),
}


@pytest.mark.parametrize("name", SUMS)
def test_sums_of_multiples_of_gradients_are_scattered_once(name: str) -> None:
    def step(params: tree.Tree, x: Tensor) -> tree.Tree:
        return tree.map(SUMS[name], grad(loss)(params, x), grad(loss)(params, x * 2))

    case = forward(step, 1)
    program = apply(case.trace(), accumulate)
    assert names(program).count("scatter") == 2  # once a leaf
    for got, expected in zip(case.run(program), case.run(case.trace())):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-7)


def test_gradients_of_two_dtypes_are_scattered_first() -> None:
    def gradient(params: tree.Tree, x: Tensor, dtype: torch.dtype) -> tree.Tree:
        return grad(loss)(tree.map(lambda p: p.to(dtype), params), x.to(dtype))

    def step(params: tree.Tree, x: Tensor) -> tree.Tree:
        return tree.map(torch.add, gradient(params, x, torch.bfloat16), gradient(params, x, torch.float32))

    program = forward(step, 1).trace()
    assert names(apply(program, accumulate)) == names(program)


def test_a_gradient_that_is_used_twice_is_scattered_first() -> None:
    def step(params: tree.Tree, x: Tensor) -> tuple[tree.Tree, tree.Tree]:
        grads = grad(loss)(params, x)
        return grads, tree.map(lambda g: g * 2, grads)

    program = forward(step, 1).trace()
    assert names(apply(program, accumulate)) == names(program)


def test_slices_that_are_no_gradients_are_added_behind_the_scatter() -> None:
    def step(params: tree.Tree, x: Tensor) -> tree.Tree:
        return tree.map(lambda p, g: p - g, params, grad(loss)(params, x))

    program = forward(step, 1).trace()
    assert names(apply(program, accumulate)) == names(program)


def test_gradients_may_be_all_that_a_step_returns() -> None:
    program = forward(grad(loss), 1).trace()
    assert names(apply(program, accumulate)) == names(program)


def test_a_gradient_times_itself_is_the_square_of_the_mean() -> None:
    case = forward(lambda params, x: tree.map(lambda g: g * g, grad(loss)(params, x)), 1)
    program = case.trace()
    assert_same(case.run(apply(program, accumulate)), case.run(program))


# memory that the step writes into


def norms_in_a_loop(grads: tree.Tree) -> Tensor:
    norms = torch.zeros(len(tree.leaves(grads)))
    for i, leaf in enumerate(tree.leaves(grads)):
        norms[i] = leaf.norm()
    return norms


def one_buffer_for_all(grads: tree.Tree) -> Tensor:
    total, buffer = torch.zeros(()), torch.zeros(())
    for leaf in tree.leaves(grads):
        buffer.zero_()
        buffer.add_(leaf.square().sum())
        total = total + buffer
    return total


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("fill", [norms_in_a_loop, one_buffer_for_all])
def test_what_gradients_are_written_into_is_read_behind_the_write(fill: Callable[..., Tensor], stage: int) -> None:
    def step(params: tree.Tree, x: Tensor) -> tuple[Tensor, tree.Tree]:
        grads = grad(loss)(params, x)
        filled = fill(grads)
        return filled, tree.map(lambda p, g: p - g / (1 + filled.sum()), params, grads)

    released(forward(step, 3), stage)


def test_a_layer_of_several_dtypes_is_gathered_as_one() -> None:
    """Uses of its buckets alternate. Each bucket is gathered once in the forward and once in the backward pass."""
    params = [{"w": torch.randn(5, 5), "n": torch.randn(5, dtype=torch.float64)} for _ in range(3)]

    def loss(p: Any, x: Tensor) -> Tensor:
        for layer in p:
            x = torch.tanh((x * layer["n"]).float() @ layer["w"])
            x = (x * layer["n"]).float() @ layer["w"]
        return x.square().mean()

    case = differentiated(loss, params, MESH)
    counted = Counter(entry.bucket for entry in released(case, 3).comm() if entry.op == "all_gather")
    assert counted == {f"{i}:{dtype}": 1 if i == 2 else 2 for i in range(3) for dtype in ("float32", "float64")}
