"""Tracing: one program serves all ranks, and computes what the step computes."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from programs import EVERY_STEP, MESH, Case, calls, layers, loss, moved, names, on_rows, rows, tried, whole
from torch import Tensor
from torch.nn import functional as F

import fzero
from fzero import tree
from fzero.base.errors import FzeroError
from fzero.base.mesh import VirtualMesh
from fzero.program import ops
from fzero.program.signature import Argument
from fzero.tracing import trace


def on_layer(step: Callable[..., Any]) -> Case:
    """`step(params, x)` with parameters of one layer and this rank's rows."""
    return on_rows(step, layers(1))


def on_vectors(step: Callable[[Tensor], Any], *vectors: list[float]) -> list[list[float]]:
    """The list that `step(vector)` returns on each rank, for one vector a rank."""
    case = Case(step, VirtualMesh(fsdp=len(vectors)), (torch.tensor(vectors).flatten(),))
    return [result.tolist() for (result,) in case.run(case.trace())]


@pytest.mark.parametrize(("name", "world"), EVERY_STEP)
def test_a_step_on_parts_of_a_batch_is_the_step_on_all_of_it(name: str, world: int) -> None:
    case, program, outputs = tried(name, world)
    got, expected = whole(program, outputs), case.unsharded()
    assert list(got) == list(expected)
    for path, value in got.items():
        # float32 sums over 2 to 6 examples in another order, through 5 layers of tanh
        torch.testing.assert_close(value, expected[path], rtol=1e-5, atol=1e-6, msg=path)


def test_gradients_of_other_strides_go_through_activations_whose_strides_torch_mistakes() -> None:
    """torch says while it traces that these gradients are contiguous. A view of them fails then in the kernel's."""

    def step(w: Tensor, x: Tensor) -> Tensor:
        def loss(w: Tensor) -> Tensor:
            made = [f(F.linear(x, w)) for f in (F.softplus, F.hardswish, F.hardsigmoid, F.hardtanh, torch.logit)]
            return torch.stack([y.transpose(1, 2).contiguous().square().mean() for y in made]).sum()

        return fzero.grad(loss)(w)

    w, x = torch.rand(4, 3) / 4 + 0.01, torch.rand(4, 8, 3)
    made = fzero.simulate(step, MESH)(fzero.partition(w, MESH), x)
    torch.testing.assert_close(fzero.unpartition(made), step(w, x))


def test_code_that_fails_in_front_of_a_compiler_is_traced_as_it_runs() -> None:
    """LongT5 makes its default mask only where no compiler reads the code. What fails both ways is the code's own."""

    def step(w: Tensor, x: Tensor) -> Tensor:
        mask: Any = None if torch.compiler.is_compiling() else torch.ones(3)
        return w * x * mask.square()

    def wrong(w: Tensor, x: Tensor) -> Tensor:
        raise ValueError("compiling" if torch.compiler.is_compiling() else "running")

    w, x = torch.rand(3), torch.rand(3)
    assert torch.equal(fzero.simulate(step, VirtualMesh(fsdp=1))(w, x), w * x)
    with pytest.raises(ValueError, match="compiling"):
        fzero.simulate(wrong, VirtualMesh(fsdp=1))(w, x)


def test_losses_and_norms_of_transposed_values_have_the_strides_that_they_had() -> None:
    """torch says while it traces that these results lie in memory as their operands do."""

    def step(w: Tensor, x: Tensor) -> Tensor:
        def loss(w: Tensor) -> Tensor:
            y, of = F.linear(x, w).transpose(1, 2), x.transpose(1, 2)
            losses = [f(y, of) for f in (F.mse_loss, F.smooth_l1_loss, F.huber_loss)]
            norms = F.batch_norm(y, None, None, training=True), F.layer_norm(y, y.shape[-1:])
            for z in (*norms, F.logsigmoid(y), F.log_softmax(y, 1), 2**y):
                losses.append(F.linear(z.transpose(1, 2), w).square().mean())
            return torch.stack(losses).sum()

        return fzero.grad(loss)(w)

    w, x = torch.rand(3, 3, dtype=torch.float64), torch.rand(4, 8, 3, dtype=torch.float64)
    made = fzero.simulate(step, VirtualMesh(fsdp=1))(fzero.partition(w, VirtualMesh(fsdp=1)), x)
    torch.testing.assert_close(fzero.unpartition(made), step(w, x))


def test_views_have_the_strides_that_torch_mistakes_along_dimensions_of_size_1() -> None:
    """torch says while it traces that padding gives channels last, and that the reshape is a view."""

    def step(x: Tensor) -> Tensor:
        y = x[:, :, :1].transpose(1, 2).view(3, 1, 8, 8)
        return F.pad(y, (0, 0, 0, 0, 0, 3)).permute(0, 2, 3, 1).reshape(192, 4)

    x = torch.rand(3, 64, 4)
    assert torch.equal(fzero.simulate(step, VirtualMesh(fsdp=1))(x), step(x))


def test_one_image_behind_a_view_has_its_group_norm_and_the_gradient_of_it() -> None:
    """torch says while it traces that twice the view has its channels last, and its kernel refuses what it gets."""

    def norm(x: Tensor) -> Tensor:
        return F.group_norm(2 * x.mT.view(len(x), 8, 4, 4), 4)

    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        return norm(x), torch.func.grad(lambda x: norm(x).pow(3).sum())(x)

    simulated = fzero.simulate(step, VirtualMesh(fsdp=1))
    for images in (1, 2):
        x = torch.rand(images, 16, 8, dtype=torch.float64)
        torch.testing.assert_close(simulated(x), step(x))


def test_arguments_are_state_by_bucket_and_leaf_or_batch() -> None:
    program = on_layer(lambda p, x: x).trace()
    assert program.arguments == (
        Argument("0.layers.0.b", "layers.0", 0),
        Argument("0.layers.0.w", "layers.0", 1),
        Argument("1"),
    )


def test_numbers_among_the_arguments_are_constants_of_the_program() -> None:
    case = Case(lambda p, scale, x: x * scale, MESH, (fzero.partition(layers(1), MESH), 3.0, rows(MESH)))
    program = case.trace()
    assert [argument.path for argument in program.arguments] == ["0.layers.0.b", "0.layers.0.w", "2"]
    assert calls(program, torch.ops.aten.mul.Tensor)[0].args[1] == 3.0


class Out(NamedTuple):
    state: Any
    value: Tensor
    note: str


def test_results_keep_their_containers_and_what_is_no_tensor() -> None:
    program = on_layer(lambda p, x: Out({"p": p["layers"][0]["b"] * 2}, x, "fine")).trace()
    state, value, note = program.results
    assert (state.path, state.bucket, state.leaf) == ("state.p", "layers.0", 0)
    assert (value.path, value.bucket) == ("value", None)
    assert (note.is_constant, note.constant) == (True, "fine")
    assert tree.unflatten(program.out_tree, [1, 2, 3]) == Out({"p": 1}, 2, 3)


def test_layouts_that_share_a_buckets_name_are_numbered() -> None:
    trees = [fzero.partition({"w": torch.ones(size)}, MESH) for size in (3, 4)]
    case = Case(lambda a, b: (a["w"].full_tensor(), b["w"].full_tensor()), MESH, tuple(trees))
    program = case.trace()
    assert list(program.layouts) == ["w", "w#2"] and moved(program) == ["all_gather w", "all_gather w#2"]


def test_tensors_captured_by_closure_are_constants() -> None:
    captured = torch.arange(5.0)
    case = on_layer(lambda p, x: (x * captured, p["layers"][0]["b"] * captured))
    program = case.trace()
    first, second = case.run(program)
    assert torch.equal(first[0], rows(MESH)[:2] * captured)
    assert torch.equal(whole(program, [first, second])["1"], layers(1)["layers"][0]["b"] * captured)


def test_the_arguments_are_left_as_they_are() -> None:
    args = on_rows(lambda p, x: x, layers(1)).args
    before = [leaf.local.clone() for leaf in tree.leaves(args[0])]
    trace.trace(fzero.grad(loss), args, MESH)
    assert all(torch.equal(leaf.local, old) for leaf, old in zip(tree.leaves(args[0]), before))


@pytest.mark.parametrize(
    "transformed",
    [
        lambda p, x: torch.func.grad(loss)(p, x),
        lambda p, x: torch.func.grad_and_value(loss)(p, x)[0],
        lambda p, x: torch.func.vjp(lambda p: loss(p, x), p)[1](torch.ones(()))[0],
    ],
    ids=["grad", "grad_and_value", "vjp"],
)
def test_torch_func_gives_the_gradients_of_fzero(transformed: Callable[..., Any]) -> None:
    case, theirs = on_layer(fzero.grad(loss)), on_layer(transformed)
    got, expected = theirs.run(theirs.trace()), case.run(case.trace())
    for mine, others in zip(got, expected):
        torch.testing.assert_close(mine, others, rtol=1e-6, atol=1e-8)  # one rounding, where 1 is multiplied in
    assert sorted(moved(theirs.trace())) == sorted(moved(case.trace()))


# Python that depends on state


def branch_on_state(p: Any, x: Tensor) -> Tensor:
    return x if (p["layers"][0]["w"] > 0).all() else -x  # here


def inside_a_gradient(p: Any, x: Tensor) -> Any:
    def inner(p: Any) -> Tensor:
        y = loss(p, x)
        return y * 2 if y > 1 else y  # here

    return fzero.grad(inner)(p)


@pytest.mark.parametrize("step", [branch_on_state, inside_a_gradient])
def test_python_that_depends_on_state_is_refused_by_its_line(step: Callable[..., Any]) -> None:
    with pytest.raises(FzeroError) as error:
        on_layer(step).trace()
    assert re.match(rf"{re.escape(__file__)}:\d+ in \w+: .*# here$", error.value.where)
    assert "torch.where" in error.value.way_out


def test_other_errors_of_the_step_pass_through() -> None:
    def step(p: Any, x: Tensor) -> Tensor:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        on_layer(step).trace()


def test_nodes_know_the_users_line() -> None:
    program = on_layer(lambda p, x: x.cos() * 2).trace()
    assert {__file__ in node.stack_trace and "x.cos() * 2" in node.stack_trace for node in program.graph.nodes if (
        node.op == "call_function")} == {True}  # fmt: skip


# collectives by axis name, by the numbers in their docstrings


def test_psum() -> None:
    assert on_vectors(lambda x: fzero.psum(x, "fsdp"), [1.0, 2.0], [10.0, 20.0]) == [[11.0, 22.0]] * 2


def test_pmean() -> None:
    assert on_vectors(lambda x: fzero.pmean(x, "fsdp"), [1.0, 2.0], [3.0, 6.0]) == [[2.0, 4.0]] * 2


def test_pmax() -> None:
    assert on_vectors(lambda x: fzero.pmax(x, "fsdp"), [1.0, 9.0], [3.0, 6.0]) == [[3.0, 9.0]] * 2


def test_axis_index() -> None:
    case = Case(lambda x: fzero.axis_index("fsdp") + x, VirtualMesh(replica=2, fsdp=3), (torch.zeros(6),))
    assert [result.item() for (result,) in case.run(case.trace())] == [0, 1, 2, 0, 1, 2]


def test_an_unknown_axis_is_refused() -> None:
    with pytest.raises(FzeroError, match=r"mesh axis 'tp': this mesh has \('fsdp',\)"):
        on_layer(lambda p, x: fzero.psum(x, "tp")).trace()


def test_each_use_is_written_down_as_gather_and_each_gradient_as_scatter() -> None:
    program = on_layer(fzero.grad(loss)).trace_as_written()
    assert [names(program).count(name) for name in ("gather", "scatter")] == [2, 2]
    assert {node.args[1] for node in calls(program, ops.gather, ops.scatter)} == {"layers.0"}


def test_a_number_made_in_the_step_may_meet_a_slice_and_a_collective() -> None:
    """torch knows the value of `torch.tensor(2.0)` at trace time, and would compute with it."""

    def step(w: Any) -> Any:
        return w * torch.tensor(2.0), fzero.psum(torch.tensor(3.0), "fsdp")

    mesh = fzero.VirtualMesh(fsdp=2)
    doubled, total = fzero.simulate(step, mesh)(fzero.partition(torch.ones(40), mesh))
    assert fzero.unpartition(doubled).tolist() == [2.0] * 40 and total == 6


def test_lines_do_not_say_which_gpu_a_rank_uses() -> None:
    program = fzero.simulate(lambda x: x + torch.zeros(2), 2).trace(torch.ones(4))
    (made,) = calls(program, torch.ops.aten.zeros.default)
    lines = []
    for index in range(2):
        made.kwargs = {**made.kwargs, "device": torch.device("cuda", index)}
        lines.append(program.lines())
    assert lines[0] == lines[1] and any("cuda" in line for line in lines[0])


@pytest.mark.parametrize("persist", [0, 100])
@pytest.mark.parametrize("world", [1, 2])
def test_a_storage_offset_counts_from_the_beginning_of_a_leaf(world: int, persist: int) -> None:
    """A gathered leaf lies somewhere in its bucket's buffer."""
    mesh = fzero.VirtualMesh(fsdp=world)
    given = {"layers": [{"a": torch.arange(16.0).view(4, 4), "b": -torch.arange(16.0).view(4, 4)}]}

    def step(params: Any, x: Any) -> Any:
        layer = params["layers"][0]
        return (
            layer["b"].as_strided((2, 2), (4, 1), 1)
            + torch.as_strided_copy(layer["b"], (2,), (1,), 3)
            + layer["a"].sum()
        )

    got = fzero.simulate(step, mesh)(fzero.partition(given, mesh, persist=persist), torch.ones(2, 3))
    assert torch.equal(got, step(given, None))


def test_a_storage_offset_into_a_batch_is_refused() -> None:
    x = torch.arange(24.0).view(12, 2)
    with pytest.raises(FzeroError, match=r"test_trace.py.*as_strided with storage_offset 2 reads a fixed place .* arg"):
        fzero.simulate(lambda x: x[1:].as_strided((2,), (1,), x.storage_offset() + 2), 2)(x)
    step = fzero.simulate(lambda x: (x * 1).as_strided((len(x),), (2,), 1), 2)  # new memory begins at 0
    assert step(x).tolist() == x[:, 1].tolist()


@pytest.mark.parametrize("read", [lambda x: x.numpy(), lambda x: np.asarray(x), lambda x: captured.numpy()])
def test_a_tensor_is_not_converted_to_numpy(read: Any) -> None:
    with pytest.raises(FzeroError, match=r"test_trace.py.*numpy reads the elements of a tensor"):
        fzero.simulate(lambda x: x * float(read(x)[0]), 1)(torch.ones(2))


captured = torch.arange(3.0)


CAPTURED = torch.zeros(3)
WRITES = {
    "of nothing traced": lambda w: CAPTURED.add_(1),
    "of a leaf": lambda w: CAPTURED.add_(w),
    "of a list": lambda w: torch._foreach_add_([w.clone(), CAPTURED], 1.0),
    "of out=": lambda w: torch.exp(torch.ones(3), out=CAPTURED),
    "of random numbers": lambda w: CAPTURED.uniform_(),
    "of statistics": lambda w: F.batch_norm(torch.rand(4, 3), CAPTURED, torch.ones(3), training=True),
    "of a view": lambda w: CAPTURED[:1].fill_(2),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_refused_write_leaves_a_captured_tensor_as_it_was(name: str) -> None:
    def step(params: dict[str, Tensor]) -> Tensor:
        WRITES[name](params["w"])
        return params["w"].sum()

    with pytest.raises(FzeroError, match="a tensor that the step captured: .* writes into it"):
        fzero.simulate(step, fzero.VirtualMesh(fsdp=2))(
            fzero.partition({"w": torch.ones(3)}, fzero.VirtualMesh(fsdp=2))
        )
    assert CAPTURED.tolist() == [0, 0, 0]


def test_threads_that_trace_at_once_take_turns() -> None:
    step, sums = fzero.simulate(lambda x: (x * 2).sum(), MESH), dict[int, float]()

    def run(count: int) -> None:
        sums[count] = step(torch.ones(count)).mean().item()

    counts = [MESH.size() * i for i in range(1, 5)]
    threads = [threading.Thread(target=run, args=(count,)) for count in counts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sums == {count: count for count in counts}  # a mean over two ranks
    assert not torch.compiler.is_compiling()  # as a trace has it for all threads


def test_a_tensor_of_numbers_that_a_step_makes_may_be_written_to() -> None:
    """It is new in each call, unlike one that the step captures."""

    def step(x: Tensor) -> Tensor:
        table, sums = torch.tensor([1.0, 2.0]), torch.tensor([[0.0, 1.0]])
        table += 1
        sums[:, 0] = x.sum()
        return table * x + sums

    sharded, x = fzero.simulate(step, 1), torch.ones(3, 2)
    for _ in range(2):
        assert torch.equal(sharded(x), step(x))

    captured = torch.tensor([1.0, 2.0])
    with pytest.raises(FzeroError, match="a tensor that the step captured: add_ writes into it"):
        fzero.simulate(lambda x: x * captured.add_(1), 1)(x)
