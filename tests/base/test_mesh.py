"""Mesh shapes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from fzero.base.errors import FzeroError
from fzero.base.mesh import VirtualMesh, mesh_shape


def test_sizes_and_names() -> None:
    mesh = VirtualMesh(replica=2, fsdp=4)
    assert mesh.names == ("replica", "fsdp")
    assert mesh.size("fsdp") == 4 and mesh.size() == 8


@pytest.mark.parametrize(
    ("mesh", "axis"),
    [
        (VirtualMesh(fsdp=4), "fsdp"),
        (VirtualMesh(fsdp=2, tensor=4), "fsdp"),
        (VirtualMesh(replica=2, data=4), "data"),
    ],
)
def test_shard_axis_is_fsdp_else_the_last(mesh: VirtualMesh, axis: str) -> None:
    assert mesh.shard_axis == axis


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
