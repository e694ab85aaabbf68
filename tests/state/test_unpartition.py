"""Unpartition: whole leaves on all ranks, on one rank, one by one or by chunks; and edits of leaves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from processes import run
from programs import training
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fzero
from fzero import optim, tree
from fzero.base.errors import FzeroError

PARAMS = {
    "layers": [{"w": torch.arange(35.0).view(5, 7), "b": -torch.arange(7.0)} for _ in range(2)],
    "half": torch.arange(19.0).to(torch.bfloat16),
    "one": torch.tensor(2.0),
    "none": torch.zeros(0, 2),
}
MESH = fzero.VirtualMesh(fsdp=3)


def assert_same(a: tree.Tree, b: tree.Tree) -> None:
    def same(x: Tensor, y: Tensor) -> None:
        assert x.dtype == y.dtype and torch.equal(x, y)

    tree.map(same, a, b)


def of_rank_one(mesh: DeviceMesh) -> Any:
    return fzero.unpartition(fzero.partition(PARAMS, mesh, persist=1), rank=1)


def test_one_rank_alone_has_the_whole_tree() -> None:
    first, second, third = run(3, of_rank_one)
    assert_same(second, PARAMS)
    assert tree.leaves(first) == tree.leaves(third) == []


def of_rank_two(mesh: DeviceMesh) -> Any:
    """On two rows of two ranks: only the row of rank 2 takes part."""
    rows = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "fsdp"))
    return fzero.unpartition(fzero.partition(PARAMS, rows), rank=2)


def test_ranks_of_other_rows_are_left_alone() -> None:
    results = run(4, of_rank_two)
    assert_same(results.pop(2), PARAMS)
    assert [tree.leaves(result) for result in results] == [[], [], []]


def no_such_rank(mesh: DeviceMesh) -> None:
    with pytest.raises(FzeroError, match=r"rank: is 7, the mesh has ranks \[0\]"):
        fzero.unpartition(fzero.partition(PARAMS, mesh), rank=7)


def test_a_rank_that_is_not_there_is_refused() -> None:
    run(1, no_such_rank)


def by_leaf_and_by_chunk(mesh: Any) -> tuple[dict[str, Tensor], dict[str, list[Any]]]:
    params = fzero.partition(PARAMS, mesh, persist=1)
    by_chunk: dict[str, list[Any]] = {}
    for path, piece in fzero.iter_full(params, chunk=16):
        by_chunk.setdefault(path, []).append(piece)
    return dict(fzero.iter_full(params)), by_chunk


@pytest.mark.parametrize("ranks", [0, 1, 3])
def test_leaves_come_one_by_one_and_chunk_by_chunk(ranks: int) -> None:
    """On virtual ranks (0), on one rank, and on three ranks."""
    for leaves, pieces in run(ranks, by_leaf_and_by_chunk) if ranks else [by_leaf_and_by_chunk(MESH)]:
        assert_same(leaves, dict(zip(tree.paths(PARAMS), tree.leaves(PARAMS))))
        for path, leaf in leaves.items():
            taken = pieces.get(path, [])
            assert [i for piece, _ in taken for i in piece] == list(range(leaf.numel()))
            assert all(values.numel() * leaf.itemsize <= 16 for _, values in taken)
            flat = torch.cat([values for _, values in taken]) if taken else leaf.new_empty(0)
            assert torch.equal(flat, leaf.reshape(-1))


def test_a_chunk_without_an_element_is_refused() -> None:
    with pytest.raises(FzeroError, match="chunk: is 3 bytes, an element 4"):
        list(fzero.iter_full(fzero.partition({"w": torch.ones(3)}, MESH), chunk=3))


# edits


def grown(mesh: Any) -> tree.Tree:
    params = fzero.partition(PARAMS, mesh)
    return fzero.unpartition(fzero.update_leaf(params, "layers.1.w", lambda w: torch.cat([w, w[:2] * 10])))


@pytest.mark.parametrize("ranks", [0, 2])
def test_a_leaf_may_grow(ranks: int) -> None:
    w = PARAMS["layers"][1]["w"]  # type: ignore[index]
    expected = {
        **PARAMS,
        "layers": [PARAMS["layers"][0], {**PARAMS["layers"][1], "w": torch.cat([w, w[:2] * 10])}],  # type: ignore[index]
    }
    for params in run(ranks, grown) if ranks else [grown(MESH)]:
        assert_same(params, expected)


def test_a_grown_leaf_trains_on_with_state_that_grows_beside_it() -> None:
    adam = optim.adamw(0.1)
    train_step = training(adam, lambda p, x: (x @ p["block"]["w"] + p["block"]["b"]).square().mean())

    def trained(params: Any, step: Any, edit: Any) -> Any:
        opt_state, x = adam.init(params), torch.linspace(-1, 1, 30).view(6, 5)
        params, opt_state, _ = step(params, opt_state, x)
        params = edit(params, "block.w", more)
        for path in [path for path in tree.paths(opt_state) if path.endswith("block.w")]:
            opt_state = edit(opt_state, path, more)
        wide = torch.cat([x, x], dim=1)
        return step(params, opt_state, wide)[0]

    def more(x: Tensor) -> Tensor:
        return torch.cat([x, x * 0.5])

    def edit_plain(given: Any, path: str, fn: Any) -> Any:
        return tree.map_with_path(lambda at, leaf: fn(leaf) if at == path else leaf, given)

    plain = {"block": {"w": torch.linspace(0, 1, 35).view(5, 7), "b": torch.zeros(7)}}
    mesh = fzero.VirtualMesh(fsdp=2)
    sharded = trained(fzero.partition(plain, mesh), fzero.simulate(train_step, mesh), fzero.update_leaf)
    tree.map(torch.testing.assert_close, fzero.unpartition(sharded), trained(plain, train_step, edit_plain))


def test_other_leaves_keep_their_layout() -> None:
    params = fzero.partition(PARAMS, MESH)
    edited = fzero.update_leaf(params, "half", lambda x: x[:3])
    assert edited["layers"] == params["layers"] and edited["half"].shape == (3,)
    assert params["half"].shape == (19,)


def test_a_path_that_is_not_there_is_refused() -> None:
    with pytest.raises(
        FzeroError, match=r"layers\.9: is no Sharded leaf of the 7 in the tree; it has half, layers\.0\.b"
    ):
        fzero.update_leaf(fzero.partition(PARAMS, MESH), "layers.9", lambda x: x)


def test_another_dtype_is_refused() -> None:
    with pytest.raises(FzeroError, match=r"half: is torch.bfloat16, the new value torch.float32; return value\.to"):
        fzero.update_leaf(fzero.partition(PARAMS, MESH), "half", lambda x: x.float())


def inside_of_a_gradient(mesh: DeviceMesh) -> list[float]:
    params = fzero.partition({"w": torch.arange(4.0)}, mesh)

    def loss(params: Any) -> Tensor:
        return (params["w"] * fzero.unpartition(params)["w"]).sum()

    value, grads = fzero.value_and_grad(loss)(params)
    return [float(value), *fzero.unpartition(grads)["w"].tolist()]


def test_inside_of_a_gradient_a_whole_leaf_is_a_constant() -> None:
    assert run(2, inside_of_a_gradient) == [[14.0, 0.0, 1.0, 2.0, 3.0]] * 2
