"""Partition: which leaves share a bucket, where a rank's slices lie, and values that come from one rank."""

from __future__ import annotations

import math

import pytest
import torch
from processes import run
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import fzero
from fzero import tree
from fzero.base.errors import FzeroError
from fzero.base.mesh import VirtualMesh
from fzero.layout.layout import ALIGN, Layout, Leaf
from fzero.state.fill import copy_slices
from fzero.state.grouping import Layers, bucket_of, plan_buckets
from fzero.state.partition import partition
from fzero.state.unpartition import unpartition

MESH = VirtualMesh(fsdp=2)


def buckets(params: tree.Tree, layers: Layers | None = None) -> dict[str, list[str]]:
    """Bucket name -> paths of its leaves."""
    leaves, treedef = tree.flatten(params)
    found = plan_buckets(tree.keys(treedef), leaves, MESH, layers)
    for layout, members in found:
        assert [leaf.path for leaf in layout.leaves] == [tree.paths(params)[i] for i in members]
    return {layout.bucket: [leaf.path for leaf in layout.leaves] for layout, _ in found}


def leaf(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(3, dtype=dtype)


def test_an_element_of_a_list_is_a_bucket_and_so_is_any_other_top_level_entry() -> None:
    params = {"blocks": [{"w": leaf(), "b": leaf()}, {"w": leaf()}], "head": {"w": leaf(), "b": leaf()}}
    assert buckets(params) == {
        "blocks.0": ["blocks.0.b", "blocks.0.w"],
        "blocks.1": ["blocks.1.w"],
        "head": ["head.b", "head.w"],
    }


def test_of_nested_lists_the_outermost_counts() -> None:
    params = {"stack": {"blocks": [{"experts": [leaf(), leaf()], "gate": leaf()}]}}
    assert list(buckets(params)) == ["stack.blocks.0"]


def test_a_tree_may_begin_with_a_list() -> None:
    assert buckets([{"w": leaf()}, leaf()]) == {"0": ["0.w"], "1": ["1"]}


def test_a_tree_may_be_one_leaf() -> None:
    assert buckets(leaf()) == {"": [""]}


@pytest.mark.parametrize(
    ("key", "bucket"), [(("a", 0, "b", 1), "a.0"), (("a", "b"), "a"), ((3,), "3"), (("a",), "a"), ((), "")]
)
def test_bucket_of(key: tuple[str | int, ...], bucket: str) -> None:
    assert bucket_of(key) == bucket


def test_layers_may_name_another_bucket_or_keep_the_rule() -> None:
    params = {"blocks": [leaf(), leaf()], "embed": leaf(), "head": leaf()}
    assert buckets(params, lambda path: None if path.startswith("blocks") else "ends") == {
        "blocks.0": ["blocks.0"], "blocks.1": ["blocks.1"], "ends": ["embed", "head"]
    }  # fmt: skip


def test_each_dtype_of_a_layer_has_a_bucket_of_its_own() -> None:
    params = {"block": {"a": leaf(), "b": leaf(torch.bfloat16), "c": leaf()}, "head": leaf(torch.bfloat16)}
    assert buckets(params) == {
        "block:float32": ["block.a", "block.c"],
        "block:bfloat16": ["block.b"],
        "head": ["head"],
    }


def test_layouts_know_global_shapes_and_the_mesh() -> None:
    ((layout, members),) = plan_buckets([("w",)], [torch.ones(2, 5)], MESH)
    assert layout == Layout("w", (Leaf("w", (2, 5)),), MESH) and members == [0]


def test_leaves_begin_at_multiples_of_the_power_of_two_in_their_sizes() -> None:
    sizes = [(3,), (5, 4), (8, 3), (), (16, 7), (7, 2), (0, 5), (1,)]
    params = {"layer": [{f"{i}": torch.ones(shape) for i, shape in enumerate(sizes)}]}
    leaves, treedef = tree.flatten(params)
    ((layout, members),) = plan_buckets(tree.keys(treedef), leaves, MESH)
    assert sorted(members) == list(range(len(sizes))) and members != sorted(members)
    assert [leaf.shape for leaf in layout.leaves] == [sizes[i] for i in members]
    for leaf, where in zip(layout.leaves, layout.leaf_ranges):
        assert where.start % math.gcd(leaf.numel, ALIGN) == 0
    held = partition(params, MESH)
    assert all(map(torch.equal, tree.leaves(unpartition(held)), leaves))


def test_layouts_read_no_data() -> None:
    ((layout, _),) = plan_buckets([("w",)], [torch.empty(10**6, 10**6, device="meta")], VirtualMesh(fsdp=4096))
    assert layout.part(0, 4095).stop == 10**12


def test_placed_slices_are_neighbours_in_zeros() -> None:
    layout = Layout("layer", (Leaf("w", (2, 2)), Leaf("b", (3,))), MESH, align=5)  # 7 elements, padded to 10
    leaves = {0: torch.tensor([[1, 2], [3, 4]]), 1: torch.tensor([5, 6, 7])}
    first, last = (copy_slices(leaves, layout, rank) for rank in range(2))
    assert [x.tolist() for x in first.values()] == [[1, 2, 3, 4], [5]]
    assert [x.tolist() for x in last.values()] == [[], [6, 7]]
    assert last[1].as_strided((5,), (1,)).tolist() == [6, 7, 0, 0, 0]


def test_placed_slices_are_copies() -> None:
    layout = Layout("layer", (Leaf("w", (4,)),), VirtualMesh(fsdp=1), align=1)
    source = torch.ones(4, requires_grad=True)
    held = copy_slices({0: source}, layout, 0)[0]
    held.zero_()
    assert source.tolist() == [1, 1, 1, 1] and not held.requires_grad


def test_a_leaf_that_is_no_tensor_is_refused_before_anything_communicates() -> None:
    with pytest.raises(FzeroError, match=r"blocks\.0\.p: is a float, not a tensor; give a tensor"):
        partition({"blocks": [{"p": 0.5}]}, MESH)


# streaming, casting, and what stays whole

STRIDED = {
    "layers": [{"w": torch.arange(60.0).view(6, 10).t(), "b": torch.arange(7.0)[::2]} for _ in range(2)],
    "table": torch.randn(3, 1, 5).expand(3, 4, 5),
    "one": torch.tensor(3.5),
    "none": torch.zeros(0, 2),
    "ids": torch.arange(9),
}


def assert_same(a: tree.Tree, b: tree.Tree) -> None:
    def same(x: Tensor, y: Tensor) -> None:
        assert x.dtype == y.dtype and torch.equal(x, y)

    tree.map(same, a, b)


@pytest.mark.parametrize("chunk", [8, 12, 64, 1 << 20])
def test_a_leaf_of_any_strides_arrives_chunk_by_chunk(chunk: int) -> None:
    assert_same(unpartition(partition(STRIDED, VirtualMesh(fsdp=3), chunk=chunk)), STRIDED)


def test_a_chunk_without_an_element_is_refused() -> None:
    with pytest.raises(FzeroError, match=r"chunk: is 0 bytes, an element 4; give some megabytes"):
        partition({"w": torch.ones(3)}, MESH, chunk=0)


def test_floating_leaves_are_cast_on_the_way() -> None:
    params = partition(STRIDED, MESH, dtype=torch.bfloat16)
    assert params["ids"].dtype == torch.int64
    assert_same(unpartition(params)["table"], STRIDED["table"].to(torch.bfloat16))


def test_a_function_of_path_and_leaf_chooses_dtypes() -> None:
    def half_layers(path: str, leaf: object) -> torch.dtype | None:
        return torch.float16 if path.startswith("layers") else None

    params = partition(STRIDED, MESH, dtype=half_layers)
    assert {path: leaf.dtype for path, leaf in zip(tree.paths(params), tree.leaves(params))} == {
        "ids": torch.int64, "layers.0.b": torch.float16, "layers.0.w": torch.float16, "layers.1.b": torch.float16,
        "layers.1.w": torch.float16, "none": torch.float32, "one": torch.float32, "table": torch.float32,
    }  # fmt: skip


def test_small_leaves_persist_and_train_alike() -> None:
    params = {"w": torch.randn(20, 5), "b": torch.randn(5)}

    def step(params: tree.Tree, x: Tensor) -> tree.Tree:
        grads = fzero.grad(lambda p: (x @ p["w"] + p["b"]).square().mean())(params)
        return tree.map(lambda p, g: p - 0.1 * g, params, grads)

    mesh = VirtualMesh(fsdp=4)
    held = partition(params, mesh, persist=5)
    assert held["b"].form.layout.replicated and not held["w"].form.layout.replicated and held["b"].path == "b"
    x = torch.randn(8, 20)
    program = fzero.simulate(step, mesh, donate=False).trace(held, x)
    assert [entry.bucket for entry in program.comm() if entry.op != "all_reduce"] == ["w", "w"]
    tree.map(torch.testing.assert_close, unpartition(fzero.simulate(step, mesh)(held, x)), step(params, x))


def test_no_boundary_cuts_a_row_when_rows_are_the_granularity() -> None:
    params = {"layer": {"b": torch.arange(5.0), "w": torch.arange(70.0).view(10, 7)}}
    held = partition(params, VirtualMesh(fsdp=3), granularity=lambda path, shape: shape[-1] if len(shape) > 1 else None)
    layout, index = held["layer"]["w"].form.layout, held["layer"]["w"].index
    assert [len(layout.part(index, rank)) % 7 for rank in range(3)] == [0, 0, 0]
    assert_same(unpartition(held), params)


def test_a_leaf_without_values_is_refused_on_real_ranks_and_planned_on_virtual_ones() -> None:
    run(1, _meta_is_refused)
    params = partition({"w": torch.empty(3, 4, device="meta")}, MESH)
    assert params["w"].device.type == "meta" and params["w"].shape == (3, 4)


def _meta_is_refused(mesh: DeviceMesh) -> None:
    with pytest.raises(FzeroError, match=r"w: is on the meta device: .* source_rank=r where rank r has them"):
        partition({"w": torch.empty(3, 4, device="meta")}, mesh)


# one rank has the values


def _from_rank(mesh: DeviceMesh, source: int, chunk: int) -> tree.Tree:
    here = mesh.get_rank() == source
    given = tree.map(lambda x: x if here else x.to("meta"), seeded())
    return unpartition(partition(given, mesh, source_rank=source, chunk=chunk, persist=5, dtype=torch.float64))


def seeded() -> tree.Tree:
    torch.manual_seed(0)
    return tree.map(lambda x: torch.randn_like(x) if x.is_floating_point() else x, STRIDED)


@pytest.mark.parametrize(("source", "chunk"), [(0, 16), (2, 40), (1, 1 << 20)])
def test_one_rank_has_the_values_and_each_gets_its_part(source: int, chunk: int) -> None:
    expected = tree.map(lambda x: x.double() if x.is_floating_point() else x, seeded())
    for values in run(3, _from_rank, source, chunk):
        assert_same(values, expected)


def _of_other_shapes(mesh: DeviceMesh) -> str:
    rows = 3 if mesh.get_rank() == 0 else 4
    with pytest.raises(FzeroError) as error:
        partition({"w": torch.ones(rows, 2)}, mesh, source_rank=0)
    return str(error.value)


def test_other_shapes_on_another_rank_are_an_error_on_both() -> None:
    for message in run(2, _of_other_shapes):
        assert message.startswith("leaf w") and "[3, 2]" in message and "[4, 2]" in message


class Breaking:
    """A source that fails after some elements."""

    shape, dtype, path = torch.Size((100,)), torch.float32, "w"

    def read(self, start: int, out: Tensor) -> None:
        if start >= 40:
            raise OSError("the disk is gone")
        out.fill_(1)


def _breaking(mesh: DeviceMesh) -> str:
    values = Breaking() if mesh.get_rank() == 0 else torch.empty(100, device="meta")
    with pytest.raises((FzeroError, OSError)) as error:
        partition({"w": values}, mesh, source_rank=0, chunk=80)
    return str(error.value)


def test_a_source_that_fails_is_an_error_on_every_rank() -> None:
    first, *others = run(3, _breaking)
    assert first == "the disk is gone"
    assert others == ["rank 0: could not read its values: OSError: the disk is gone"] * 2


def test_a_source_rank_that_is_not_there_is_refused() -> None:
    run(1, _no_such_rank)


def _no_such_rank(mesh: DeviceMesh) -> None:
    with pytest.raises(FzeroError, match=r"source_rank: is 3, the mesh has ranks \[0\]"):
        partition({"w": torch.ones(3)}, mesh, source_rank=3)


def test_memory_of_a_gpu_is_not_pinned() -> None:
    message = r'^pin: is True, and slices are allocated on cuda:0; give device="cpu" too: only memory of the host'
    with pytest.raises(FzeroError, match=message):
        partition({"w": torch.ones(3)}, MESH, device="cuda:0", pin=True)
    with pytest.raises(FzeroError, match=message):
        fzero.build(lambda: torch.nn.Linear(3, 2), MESH, device="cuda:0", pin=True)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="memory can be pinned here")
def test_memory_is_not_pinned_for_nobody() -> None:
    with pytest.raises(FzeroError, match=r"(?m)^pin: is True, and there is no accelerator: .*; leave pin out$"):
        partition({"w": torch.ones(3)}, MESH, pin=True)


@pytest.mark.skipif(not torch.accelerator.is_available(), reason="there is nothing to pin memory for")
def test_memory_of_the_host_is_pinned() -> None:
    params = partition({"w": torch.ones(3)}, MESH, device="cpu", pin=True)
    assert params["w"].local.is_pinned() and params["w"].local.tolist() == [1.0] * 3
