"""`fzero.precision`: what is computed, moved and returned in which dtype."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from programs import layers, mlp, rows
from torch import Tensor

import fzero
from fzero import FzeroError, tree
from fzero.base.mesh import VirtualMesh

MESHES = [VirtualMesh(fsdp=3), VirtualMesh(replica=2, fsdp=2)]
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


def squares(params: tree.Tree, x: Tensor) -> Tensor:
    return mlp(params, x).square().mean()


def given() -> tree.Tree:
    return tree.map(Tensor.float, layers(2))


def traffic(program: fzero.Program) -> dict[str, set[torch.dtype]]:
    found: dict[str, set[torch.dtype]] = {}
    for entry in program.comm():
        found.setdefault(entry.op if entry.bucket or entry.op != "all_reduce" else "values", set()).add(entry.dtype)
    return found


def test_plain_tensors_are_cast_and_gradients_have_their_leafs_dtype() -> None:
    seen = []

    def loss(params: Any, x: Tensor, ids: Tensor) -> Any:
        seen.extend([params["layers"][0]["w"].dtype, x.dtype, ids.dtype])
        return squares(params, x), ids

    params, x = given(), rows(VirtualMesh(fsdp=2)).float()
    run = fzero.precision(BF16, output=F32)(loss)
    (value, ids), grads = fzero.value_and_grad(run, has_aux=True)(params, x, torch.arange(3))
    assert seen == [BF16, BF16, torch.int64] and value.dtype == F32 and ids.dtype == torch.int64
    narrow = tree.map(lambda p: p.to(BF16), params)
    expected, theirs = fzero.value_and_grad(squares)(narrow, x.to(BF16))
    assert torch.equal(value, expected.float())
    for grad, like in zip(tree.leaves(grads), tree.leaves(theirs)):
        assert grad.dtype == F32 and torch.equal(grad, like.float())


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("reduce", [None, BF16, F32, torch.float64])
def test_gathers_move_the_compute_dtype_and_gradients_the_reduce_dtype(mesh: Any, stage: int, reduce: Any) -> None:
    step = fzero.simulate(
        fzero.value_and_grad(fzero.precision(BF16, reduce=reduce, output=F32)(squares)), mesh, stage=stage
    )
    params, x = fzero.partition(given(), mesh, persist=5), rows(mesh).float()
    found = traffic(step.trace(params, x))
    assert found["all_gather"] == {BF16} and found["reduce_scatter"] == {reduce or BF16}
    assert found["values"] == {F32, reduce or BF16}  # the mean of the loss, and biases, which ranks hold whole
    value, grads = step(params, x)
    plain = fzero.value_and_grad(squares)(given(), x)
    torch.testing.assert_close((value.mean(), fzero.unpartition(grads)), plain, rtol=0.1, atol=0.02)  # bfloat16


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("sync", ["once", "each"])
@pytest.mark.parametrize("reduce", [BF16, F32])
def test_microbatches(reduce: torch.dtype, stage: int, sync: str) -> None:
    mesh = VirtualMesh(fsdp=2)

    def sums(params: Any, x: Tensor) -> Any:
        return mlp(params, x).square().sum(), x.numel()

    def step(params: Any, x: Tensor) -> Any:
        return fzero.accumulate(fzero.precision(BF16, reduce=reduce, output=F32)(sums), 2, sync=sync)(params, x)

    params, x = fzero.partition(given(), mesh), rows(mesh).float()
    x = torch.cat([x, x])
    simulation = fzero.simulate(step, mesh, stage=stage)
    found = traffic(simulation.trace(params, x))
    assert found["all_gather"] == {BF16} and found["reduce_scatter"] == {reduce}
    _, grads = simulation(params, x)
    expected = fzero.grad(lambda p: mlp(p, x).square().mean())(given())
    torch.testing.assert_close(fzero.unpartition(grads), expected, rtol=0.1, atol=0.02)


def test_the_mean_is_taken_in_the_reduce_dtype() -> None:
    """Four float16 gradients of 20000 have a sum beyond float16."""
    mesh, params = VirtualMesh(fsdp=4), {"w": torch.ones(4)}
    x = torch.full((4, 4), 20000.0)
    for reduce in (F32, F16):
        loss = fzero.precision(F16, reduce=reduce)(lambda p, x: (p["w"] * x).sum())
        grads = fzero.simulate(fzero.grad(loss), mesh)(fzero.partition(params, mesh), x)
        assert torch.equal(fzero.unpartition(grads)["w"], torch.full((4,), 20000.0))


@pytest.mark.parametrize(
    ("how", "dtype", "message"),
    [
        ({"compute": torch.int32}, F32, "precision: compute: is torch.int32"),
        ({"compute": BF16, "reduce": torch.complex64}, F32, "precision: reduce: is torch.complex64"),
        ({"compute": BF16, "reduce": F16}, F32, "precision: reduce: is torch.float16 beside .* torch.bfloat16"),
        ({"compute": F16}, BF16, r"layers.0.b: is torch.bfloat16 beside a compute dtype of torch.float16"),
    ],
)
def test_bad_input_is_named(how: Any, dtype: torch.dtype, message: str) -> None:
    with pytest.raises(FzeroError, match=message):
        fzero.precision(**how)(squares)(tree.map(lambda p: p.to(dtype), layers(1)), torch.ones(2, 5))


def test_a_leaf_has_one_reduce_dtype() -> None:
    mesh = VirtualMesh(fsdp=2)

    def loss(p: Any, x: Tensor) -> Tensor:
        return fzero.precision(BF16, reduce=F32)(squares)(p, x) + fzero.precision(BF16, reduce=BF16)(squares)(p, x)

    with pytest.raises(FzeroError, match="reduce=torch.float32 and reduce=torch.bfloat16"):
        fzero.simulate(fzero.grad(loss), mesh).trace(fzero.partition(given(), mesh), rows(mesh).float())
