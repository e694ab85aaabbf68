"""Placement: which leaves become one bucket, and where a rank's slices lie. No process group."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from fzero import tree
from fzero.errors import FzeroError
from fzero.layout import Layout, Leaf
from fzero.mesh import VirtualMesh
from fzero.placement import Buckets, bucket_of, layouts, partition, place

MESH = VirtualMesh(fsdp=2)


def buckets(params: tree.Tree, layers: Buckets | None = None) -> dict[str, list[str]]:
    """Bucket name -> paths of its leaves."""
    leaves, treedef = tree.flatten(params)
    found = layouts(tree.keys(treedef), leaves, MESH, layers)
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
    ((layout, members),) = layouts([("w",)], [torch.ones(2, 5)], MESH)
    assert layout == Layout("w", (Leaf("w", (2, 5)),), MESH) and members == [0]


def test_layouts_read_no_data() -> None:
    ((layout, _),) = layouts([("w",)], [torch.empty(10**6, 10**6, device="meta")], VirtualMesh(fsdp=4096))
    assert layout.part(0, 4095).stop == 10**12


def test_placed_slices_are_neighbours_in_zeros() -> None:
    layout = Layout("layer", (Leaf("w", (2, 2)), Leaf("b", (3,))), MESH, align=5)  # 7 elements, padded to 10
    leaves = [torch.tensor([[1, 2], [3, 4]]), torch.tensor([5, 6, 7])]
    first, last = (place(leaves, layout, SimpleNamespace(rank=rank, device=torch.device("cpu"))) for rank in range(2))
    assert [x.tolist() for x in first] == [[1, 2, 3, 4], [5]]
    assert [x.tolist() for x in last] == [[], [6, 7]]
    assert last[1].as_strided((5,), (1,)).tolist() == [6, 7, 0, 0, 0]


def test_placed_slices_are_copies() -> None:
    layout = Layout("layer", (Leaf("w", (4,)),), VirtualMesh(fsdp=1), align=1)
    source = torch.ones(4, requires_grad=True)
    (held,) = place([source], layout, SimpleNamespace(rank=0, device=torch.device("cpu")))
    held.zero_()
    assert source.tolist() == [1, 1, 1, 1] and not held.requires_grad


def test_a_leaf_that_is_no_tensor_is_refused_before_anything_communicates() -> None:
    with pytest.raises(FzeroError, match=r"blocks\.0\.p: is a float, not a tensor; keep only tensors in the tree"):
        partition({"blocks": [{"p": 0.5}]}, MESH)
