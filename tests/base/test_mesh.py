"""Mesh shapes, and what their axes mean."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy
import pytest

from fzero.base.errors import FzeroError
from fzero.base.mesh import VirtualMesh, find_model_axes, mesh_shape


def test_sizes_and_names() -> None:
    mesh = VirtualMesh(replica=2, fsdp=4)
    assert mesh.names == ("replica", "fsdp")
    assert mesh.size("fsdp") == 4 and mesh.size() == 8


@pytest.mark.parametrize(
    ("mesh", "axis"),
    [
        (VirtualMesh(fsdp=4), "fsdp"),
        (VirtualMesh(fsdp=2, tensor=4), "fsdp"),
        (VirtualMesh(replica=2, fsdp=4), "fsdp"),
        (VirtualMesh(tensor=4), "tensor"),
        (VirtualMesh(replica=2, node=2, local=4), "node+local"),
        (VirtualMesh(node=2, fsdp=2, local=4), "fsdp"),
    ],
)
def test_shard_axis_is_fsdp_or_the_only_one(mesh: VirtualMesh, axis: str) -> None:
    assert mesh.shard_axis == axis


def test_state_along_two_axes_leaves_the_others_as_replicas() -> None:
    mesh = VirtualMesh(replica=2, node=2, local=4)
    assert mesh.shard_axes == ("node", "local") and mesh.replica_axes == ("replica",)
    assert mesh.size(mesh.shard_axis) == 8 and mesh.data_axes() == mesh.names
    with pytest.raises(FzeroError, match=r"data: \('node',\) leaves out 'local', .*; give data=\('node', 'local'\)"):
        mesh.data_axes(("node",))


@pytest.mark.parametrize("sizes", [{"local": 2, "node": 2}, {"node": 2, "tp": 2, "local": 2}, {"node": 2, "tp": 2}])
def test_axes_that_are_not_side_by_side_are_no_shard_axis(sizes: dict[str, int]) -> None:
    with pytest.raises(FzeroError, match='or two neighbouring ones "node" and "local", in this order'):
        VirtualMesh(**sizes).shard_axis  # noqa: B018


def test_a_mesh_of_several_axes_without_fsdp_has_no_shard_axis() -> None:
    mesh = VirtualMesh(replica=2, data=4)
    refused = r"mesh: none of the axes \('replica', 'data'\) is the shard axis; call the axis .* lies along \"fsdp\""
    with pytest.raises(FzeroError, match=refused):
        mesh.shard_axis  # noqa: B018
    with pytest.raises(FzeroError, match=refused):
        find_model_axes(mesh, data=("replica", "data"))


@pytest.mark.parametrize(
    ("mesh", "data"),
    [
        (VirtualMesh(fsdp=4), None),
        (VirtualMesh(tensor=4), None),
        (VirtualMesh(tensor=4), ("tensor",)),
        (VirtualMesh(replica=2, fsdp=4), None),
        (VirtualMesh(fsdp=4, replica=2), ("replica", "fsdp")),
        (VirtualMesh(dp=2, fsdp=4), ["fsdp", "dp"]),
        (VirtualMesh(pod=2, replica=3, fsdp=4), ("pod", "replica", "fsdp")),
    ],
)
def test_data_axes_may_be_all_axes(mesh: VirtualMesh, data: Sequence[str] | None) -> None:
    assert mesh.data_axes(data) == mesh.names and find_model_axes(mesh, data) == ()


def test_axes_that_data_leaves_out_are_model_axes() -> None:
    mesh = VirtualMesh(tp=2, replica=2, fsdp=2, ep=2)
    assert find_model_axes(mesh, ("fsdp", "ep")) == ("tp", "replica")
    assert mesh.data_axes(("fsdp", "ep")) == ("fsdp", "ep")


def test_axes_together_have_one_name() -> None:
    mesh = VirtualMesh(a=2, fsdp=3, b=2)
    assert mesh.join(("b", "a")) == "a+b" == mesh.join(["a+b"]) and mesh.split("a+b") == ("a", "b")
    assert (mesh.size("a+b"), mesh.size("fsdp"), mesh.size()) == (4, 3, 12)
    assert [mesh.position(number, "a+b") for number in range(12)] == [0, 1, 0, 1, 0, 1, 2, 3, 2, 3, 2, 3]
    assert mesh.rows("a+b") == [[0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10, 11]] and len(mesh.rows("fsdp")) == 4
    assert mesh.has("fsdp+b") and not mesh.has("b+c")
    with pytest.raises(FzeroError, match=r"mesh axes: are \(\); name one or more axes"):
        mesh.join([])


@pytest.mark.parametrize(
    ("mesh", "data", "refused"),
    [
        (
            VirtualMesh(fsdp=2, tp=4),
            None,
            r"mesh axis 'tp': has no meaning on VirtualMesh\(fsdp=2, tp=4\), whose data axes are \('fsdp',\); "
            r"give data=\('fsdp', 'tp'\) if ranks along 'tp' take different examples, and data=\('fsdp',\) if they",
        ),
        (VirtualMesh(fsdp=2, tp=1), None, "mesh axis 'tp': has no meaning"),
        (
            VirtualMesh(fsdp=2),
            ("dp", "fsdp"),
            r"mesh axis 'dp': is in data, and this mesh has \('fsdp',\); name only these",
        ),
        (VirtualMesh(dp=2), ("fsdp",), r"mesh axis 'fsdp': is in data, and this mesh has \('dp',\)"),
        (
            VirtualMesh(dp=2, fsdp=4),
            ("dp",),
            r"data: \('dp',\) leaves out 'fsdp', the axis of VirtualMesh\(dp=2, fsdp=4\) that state lies along; "
            r"give data=\('dp', 'fsdp'\)",
        ),
        (VirtualMesh(dp=2), (), r"data: \(\) leaves out 'dp'"),
        (VirtualMesh(fsdp=2), "fsdp", r"data: is the string 'fsdp'; .* data=\('fsdp',\)"),
    ],
)
def test_axes_without_a_meaning_are_refused(mesh: VirtualMesh, data: Sequence[str] | None, refused: str) -> None:
    with pytest.raises(FzeroError, match=refused):
        find_model_axes(mesh, data)


def test_meshes_compare_and_hash_by_names_and_sizes_in_order() -> None:
    assert VirtualMesh(a=2, b=3) == VirtualMesh(a=2, b=3)
    assert hash(VirtualMesh(a=2, b=3)) == hash(VirtualMesh(a=2, b=3))
    assert len({VirtualMesh(a=2, b=3), VirtualMesh(b=3, a=2), VirtualMesh(a=2, b=4), VirtualMesh(a=2)}) == 4


def test_repr_is_how_to_make_it() -> None:
    mesh = VirtualMesh(replica=2, fsdp=4)
    assert eval(repr(mesh)) == mesh


def test_a_size_below_one_is_refused() -> None:
    with pytest.raises(FzeroError, match="mesh axis fsdp: has size 0; a size is at least 1"):
        VirtualMesh(fsdp=0)


@pytest.mark.parametrize("size", [2.5, 2.0, "2", None])
def test_a_size_that_is_no_whole_number_is_refused(size: Any) -> None:
    with pytest.raises(FzeroError, match=f"mesh axis fsdp: has size {size!r}; a size is at least 1, a whole number"):
        VirtualMesh(fsdp=size)


def test_sizes_of_numpy_are_whole_numbers() -> None:
    assert VirtualMesh(fsdp=numpy.int64(2)) == VirtualMesh(fsdp=2)


def test_no_axis_is_refused() -> None:
    with pytest.raises(FzeroError, match=r"mesh: has no axes; name one, as in VirtualMesh\(fsdp=8\)"):
        VirtualMesh()


def test_an_unknown_axis_is_refused() -> None:
    with pytest.raises(FzeroError, match=r"mesh axis 'tp': this mesh has \('fsdp',\)"):
        VirtualMesh(fsdp=2).size("tp")


def test_mesh_shape_of_a_virtual_mesh_is_itself() -> None:
    mesh = VirtualMesh(fsdp=2)
    assert mesh_shape(mesh) is mesh


def test_mesh_shape_reads_names_and_sizes_of_a_device_mesh() -> None:
    device_mesh = SimpleNamespace(mesh_dim_names=("replica", "fsdp"), shape=(2, 4))
    assert mesh_shape(device_mesh) == VirtualMesh(replica=2, fsdp=4)


@pytest.mark.parametrize("mesh", [SimpleNamespace(mesh_dim_names=None, shape=(2,)), "fsdp", 8])
def test_a_mesh_without_named_axes_is_refused_with_the_way_to_make_one(mesh: object) -> None:
    with pytest.raises(FzeroError, match=rf'{type(mesh).__name__} has no named axes.*mesh_dim_names=\("fsdp",\)'):
        mesh_shape(mesh)
