"""Laws of `partition`: `unpartition` restores the tree, and leaves of one bucket have one dtype."""

from __future__ import annotations

import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st
from torch import Tensor

import fzero
from fzero import tree
from fzero.base.mesh import VirtualMesh
from fzero.state.fill import copy_slices
from fzero.state.grouping import Granularity
from fzero.testing.steps import OPTIMIZERS, Of, Optimizer, fill
from fzero.testing.strategies import meshes, param_trees
from fzero.values.sharded import Sharded
from property_tests.running import bits

DTYPES = ("float64", "float32", "bfloat16", "int64", "bool")
TWO = VirtualMesh(fsdp=2)


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and bool((bits(a) == bits(b)).all())


def by_rows(path: str, shape: tuple[int, ...]) -> int | None:
    return max(shape[-1], 1) if shape else None


@given(param_trees(dtypes=DTYPES), meshes(max_world=16), st.sampled_from([0, 5]), st.sampled_from([None, by_rows]))
@example(Of((3,)), TWO, 0, None)
def test_unpartition_undoes_partition(
    shape: tree.Tree, mesh: VirtualMesh, persist: int, granularity: Granularity | None
) -> None:
    params = fill(shape)
    placed = fzero.partition(params, mesh, persist=persist, granularity=granularity)
    leaves, treedef = tree.flatten(fzero.unpartition(placed))
    assert treedef == tree.flatten(params)[1] and all(map(same, leaves, tree.leaves(params)))


@given(param_trees(dtypes=DTYPES), meshes(max_world=16))
def test_partition_keeps_paths_shapes_and_dtypes(shape: tree.Tree, mesh: VirtualMesh) -> None:
    params = fill(shape)
    placed = tree.leaves(fzero.partition(params, mesh))
    assert [leaf.path for leaf in placed] == tree.paths(params)
    assert [(leaf.shape, leaf.dtype) for leaf in placed] == [(leaf.shape, leaf.dtype) for leaf in tree.leaves(params)]


def cut(placed: tree.Tree) -> list[Sharded]:
    """The leaves that are cut over ranks: not the replicated ones, such as leaves without elements."""
    return [leaf for leaf in tree.leaves(placed) if not leaf.form.layout.replicated]


@given(param_trees(dtypes=DTYPES), meshes(max_world=16), st.sampled_from([None, by_rows]))
def test_slices_of_all_ranks_are_the_leaf(shape: tree.Tree, mesh: VirtualMesh, granularity: Granularity | None) -> None:
    for leaf in cut(fzero.partition(fill(shape), mesh, granularity=granularity)):
        slices = [
            copy_slices({leaf.index: leaf.local}, leaf.form.layout, rank)[leaf.index]
            for rank in range(leaf.form.layout.world)
        ]
        assert all(len(x) == len(leaf.form.layout.part(leaf.index, rank)) for rank, x in enumerate(slices))
        assert torch.equal(torch.cat(slices), leaf.local)


@given(param_trees(dtypes=DTYPES), meshes(max_world=16))
def test_a_leaf_is_in_one_bucket_with_leaves_of_its_dtype(shape: tree.Tree, mesh: VirtualMesh) -> None:
    placed = cut(fzero.partition(fill(shape), mesh))
    assert len({(leaf.form.layout, leaf.index) for leaf in placed}) == len(placed)
    dtypes: dict[str, object] = {}
    assert all(dtypes.setdefault(leaf.form.layout.bucket, leaf.dtype) == leaf.dtype for leaf in placed)


@given(param_trees(), meshes(max_world=16), st.sampled_from(sorted(OPTIMIZERS)))
def test_state_lies_as_its_parameters(shape: tree.Tree, mesh: VirtualMesh, name: str) -> None:
    """State of whole parameters, partitioned `like` them, has the layouts of the state of partitioned parameters."""
    params, optimizer = fill(shape), Optimizer(name).make()
    assume(has_paths(params))
    placed = fzero.partition(params, mesh)
    ours = tree.leaves(fzero.partition(optimizer.init(params), mesh, like=placed))
    theirs = tree.leaves(optimizer.init(placed))
    assert [(x.form.layout, x.index, x.dtype) for x in ours] == [(x.form.layout, x.index, x.dtype) for x in theirs]
    assert all(same(a.local, b.local) for a, b in zip(ours, theirs))


def has_paths(params: tree.Tree) -> bool:
    """Whether there are leaves, and all have a path. The path of a tree that is one leaf is empty, and every path ends
    with it."""
    return bool(tree.leaves(params)) and all(tree.paths(params))


@given(param_trees(), meshes(max_world=16))
def test_a_leaf_that_has_no_parameter_of_its_path_and_shape_lies_elsewhere(shape: tree.Tree, mesh: VirtualMesh) -> None:
    assume(has_paths(shape))
    placed = fzero.partition(fill(shape), mesh)
    others = {"count": fill(Of((), "int64")), "history": fill(Of((5, 7)))}
    rows = tree.map(lambda leaf: leaf.unsqueeze(0), fzero.unpartition(placed))
    found = fzero.partition({**others, "mu": fzero.unpartition(placed), "rows": rows}, mesh, like=placed)
    assert found["count"].form.layout.replicated and found["history"].form.layout.bucket == "history"
    assert [leaf.form.layout for leaf in tree.leaves(found["mu"])] == [leaf.form.layout for leaf in tree.leaves(placed)]
    assert all(leaf.form.layout.bucket.startswith("rows") for leaf in tree.leaves(found["rows"]))
