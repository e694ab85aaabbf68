"""The cast_gradients pass: in which dtype gradients travel, and what comes of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from processes import run
from programs import Case, apply, layers, mlp, rows
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import fzero
from fzero import FzeroError, passes, tree
from fzero.base.mesh import VirtualMesh
from fzero.passes.cast_gradients import cast_gradients
from fzero.program import ops

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
MESHES = [VirtualMesh(fsdp=3), VirtualMesh(replica=2, fsdp=2)]


def bf16_loss(params: tree.Tree, x: Tensor) -> Tensor:
    """Computed in bfloat16, from float32 parameters."""
    narrow = tree.map(lambda p: p.to(torch.bfloat16), params)
    return mlp(narrow, x.to(torch.bfloat16)).float().square().mean()


def step(params: tree.Tree, x: Tensor) -> Any:
    """Loss, gradients, and a mean that is no gradient's."""
    loss, grads = fzero.value_and_grad(bf16_loss)(params, x)
    return loss, grads, fzero.pmean(x.sum(0), "fsdp")


def case(mesh: VirtualMesh) -> Case:
    """Weights are sharded, and biases are whole on every rank."""
    return Case(step, mesh, (fzero.partition(layers(2), mesh, persist=5), rows(mesh)))


def traffic(program: fzero.Program) -> dict[str, set[torch.dtype]]:
    """The dtypes that move: by gathers, by scatters, and by reductions of values, in the program's order."""
    found: dict[str, set[torch.dtype]] = {}
    for entry in program.comm():
        found.setdefault(entry.op if entry.bucket or entry.op != "all_reduce" else "values", set()).add(entry.dtype)
    return found


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("dtype", [None, *DTYPES])
def test_gradients_move_in_the_dtype_and_nothing_else_does(
    mesh: VirtualMesh, stage: int, dtype: torch.dtype | None
) -> None:
    """The loss and the pmean are float32, and move as such."""
    simulation = fzero.simulate(step, mesh, stage=stage, reduce_dtype=dtype)
    params, x = case(mesh).args
    program, moved = simulation.trace(params, x), dtype or torch.bfloat16
    found = traffic(program)
    assert found["all_gather"] == {torch.bfloat16} and found["reduce_scatter"] == {moved}
    assert found["values"] == {moved, torch.float32}
    assert {grad.dtype for grad in tree.leaves(simulation(params, x)[1])} == {torch.float32}


def moments(program: fzero.Program) -> list[str]:
    """Products of matrices, and the buckets whose gradients are sent, in the program's order."""
    names = {node.target: "product" for node in program.graph.nodes if str(node.target).startswith("aten.mm")}
    starts = (ops.reduce_scatter, ops.all_reduce)
    return [
        node.args[1] if node.target in starts else names[node.target]
        for node in program.graph.nodes
        if node.target in names or (node.target in starts and (node.target is starts[0] or node.meta["val"].ndim))
    ]


def linear_loss(params: tree.Tree, x: Tensor) -> Tensor:
    """A gradient of this is an argument itself."""
    return (params["w"] * x.mean(0)).sum() + sum(p.sum() for p in params["layers"])


@pytest.mark.parametrize("stage", [2, 3])
def test_gradients_are_sent_while_others_are_computed(stage: int) -> None:
    """In a dtype of their own as without: they used to wait for the end of the backward pass, all of them whole."""
    mesh = MESHES[1]
    params = fzero.partition({str(i): torch.ones(4, 4) for i in range(5)}, mesh)

    def loss(params: tree.Tree, x: Tensor) -> Tensor:
        for w in params.values():
            x = (x @ w).tanh()
        return x.square().mean()

    def program(loss: Any, **how: Any) -> fzero.Program:
        return fzero.simulate(fzero.value_and_grad(loss), mesh, stage=stage, **how).trace(params, torch.ones(4, 4))

    plain = moments(program(loss))
    assert plain.index("4") < len(plain) - plain[::-1].index("product")  # one is sent before the last product
    narrow = fzero.precision(torch.bfloat16, reduce=torch.float32)
    for other in (program(narrow(loss)), program(loss, reduce_dtype=torch.bfloat16)):
        assert moments(other) == plain


def test_a_gradient_that_is_an_argument_is_cast() -> None:
    mesh = MESHES[0]
    plain = {"w": torch.ones(4), "layers": [torch.ones(3)]}
    params, x = fzero.partition(plain, mesh), torch.arange(24.0).view(6, 4)
    grads = fzero.simulate(fzero.grad(linear_loss), mesh, reduce_dtype=torch.float64)(params, x)
    assert torch.equal(grads["w"].full_tensor(), x.mean(0))


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_mean_is_taken_in_the_dtype(mesh: VirtualMesh, dtype: torch.dtype) -> None:
    """By hand: each rank's gradient with respect to bfloat16 parameters, cast, averaged, and cast to float32."""
    params, x = case(mesh).args
    narrow = tree.map(lambda p: p.to(torch.bfloat16), layers(2))
    each = [fzero.grad(bf16_loss)(narrow, part) for part in x.chunk(mesh.size())]
    got = fzero.unpartition(fzero.simulate(step, mesh, reduce_dtype=dtype)(params, x)[1])
    for ours, *grads in zip(tree.leaves(got), *map(tree.leaves, each)):
        exact = torch.stack([grad.to(dtype) for grad in grads]).double().mean(0)
        largest = max(grad.abs().max().item() for grad in grads)  # of those that the mean may cancel
        eps = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)  # rounded behind each of two axes, by eps / 2
        torch.testing.assert_close(ours.double(), exact, rtol=0, atol=eps * largest)


def test_a_float32_mean_of_bfloat16_gradients_keeps_its_digits() -> None:
    params, x = case(MESHES[0]).args
    for dtype, is_rounded in ((None, True), (torch.bfloat16, True), (torch.float32, False)):
        grads = fzero.simulate(step, MESHES[0], reduce_dtype=dtype)(params, x)[1]
        flat = torch.cat([grad.reshape(-1) for grad in tree.leaves(fzero.unpartition(grads))])
        assert torch.equal(flat, flat.bfloat16().float()) == is_rounded


def test_the_dtype_of_the_gradient_changes_nothing() -> None:
    before = case(MESHES[0]).trace()
    assert apply(before, lambda program: cast_gradients(program, dtype=torch.bfloat16)).lines() == before.lines()


def test_integers_and_complex_gradients_stay_as_they_are() -> None:
    weight = torch.randn(5, 3, dtype=torch.complex64)
    params = fzero.partition({"w": weight}, MESHES[0])
    gradient = fzero.grad(lambda params, x: (params["w"].T @ x.sum(0).to(torch.complex64)).abs().sum())
    simulations = [fzero.simulate(gradient, MESHES[0], reduce_dtype=dtype) for dtype in (None, torch.float16)]
    first, second = (fzero.unpartition(each(params, rows(MESHES[0]))) for each in simulations)
    assert torch.equal(first["w"], second["w"])


@pytest.mark.parametrize("dtype", [torch.int32, torch.complex64, torch.float8_e4m3fn, "float32", 32])
def test_other_values_are_refused(dtype: Any) -> None:
    with pytest.raises(FzeroError, match=r"^reduce_dtype: is .*; give .*torch\.float.* or None"):
        fzero.simulate(step, 2, reduce_dtype=dtype)
    with pytest.raises(FzeroError, match=r"^reduce_dtype: is "):
        passes.defaults(stage=3, reduce_dtype=dtype)


def test_beside_passes_there_is_no_place_for_it() -> None:
    with pytest.raises(FzeroError, match=r"^reduce_dtype: is torch\.float32, and passes are given; give it to the pas"):
        fzero.simulate(step, 2, reduce_dtype=torch.float32, passes=passes.defaults(stage=3))


def test_check_equivalence_takes_it() -> None:
    def train(params: tree.Tree, x: Tensor) -> tuple[tree.Tree, Tensor]:
        loss, grads = fzero.value_and_grad(lambda params: mlp(params, x).square().mean())(params)
        return tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    def largest(dtype: torch.dtype | None) -> float:
        batch = (rows(MESHES[0]),)
        found = fzero.check_equivalence(train, (layers(2),), batch, ranks=3, reduce_dtype=dtype, atol=1e-2)
        return max(difference.absolute for difference in found.values())

    assert largest(None) < 1e-6 < largest(torch.bfloat16)  # gradients of about 0.1 have 2e-4 less digits


def live(mesh: DeviceMesh) -> tuple[list[torch.dtype], list[Tensor]]:
    """On a rank of a live mesh: the dtypes of the scatters, and the gradients in full."""
    params = fzero.partition(layers(2), mesh)
    sharded = fzero.shard(step, mesh, reduce_dtype=torch.float16)
    mine = rows(VirtualMesh(fsdp=mesh.size())).chunk(mesh.size())[mesh.get_rank()]
    moved = [entry.dtype for entry in sharded.trace(params, mine).comm() if entry.op == "reduce_scatter"]
    return moved, tree.leaves(fzero.unpartition(sharded(params, mine)[1]))


def test_live_ranks_do_as_virtual_ones() -> None:
    mesh = VirtualMesh(fsdp=2)
    simulation = fzero.simulate(step, mesh, reduce_dtype=torch.float16)
    expected = tree.leaves(fzero.unpartition(simulation(fzero.partition(layers(2), mesh), rows(mesh))[1]))
    for moved, grads in run(2, live):
        assert set(moved) == {torch.float16}
        assert all(map(torch.equal, grads, expected))
