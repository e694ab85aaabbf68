"""Mesh shapes: axis names and sizes, without devices.

`VirtualMesh(fsdp=8)` is a plan for eight ranks. A torch `DeviceMesh` becomes one through `mesh_shape`, so what only
plans (layouts, programs, costs) sees names and numbers and nothing else.
"""

from __future__ import annotations

import math
from typing import Any

from fzero.base.errors import FzeroError


class VirtualMesh:
    """Named axis sizes: `VirtualMesh(replica=2, fsdp=4)`. Compares and hashes by value.

    Raises:
        FzeroError: for no axis at all, or a size below 1.
    """

    def __init__(self, **sizes: int) -> None:
        for name, size in sizes.items():
            if size < 1:
                raise FzeroError(f"mesh axis {name}", f"has size {size}", "a size is at least 1")
        if not sizes:
            raise FzeroError("mesh", "has no axes", "name one, as in VirtualMesh(fsdp=8)")
        self.sizes = dict(sizes)

    @property
    def names(self) -> tuple[str, ...]:
        """Axis names, outermost first."""
        return tuple(self.sizes)

    @property
    def shard_axis(self) -> str:
        """The axis that state is partitioned over: "fsdp" where there is one, else the last."""
        return "fsdp" if "fsdp" in self.sizes else self.names[-1]

    def size(self, axis: str | None = None) -> int:
        """Ranks along `axis`, or in all.

        Raises:
            FzeroError: for an axis that the mesh does not have.
        """
        if axis is None:
            return math.prod(self.sizes.values())
        if axis not in self.sizes:
            raise FzeroError(f"mesh axis {axis!r}", f"this mesh has {self.names}", "name one of these")
        return self.sizes[axis]

    def position(self, number: int, axis: str) -> int:
        """The position along `axis` of a rank, by its number among all; ranks are counted row by row."""
        inner = math.prod(self.sizes[name] for name in self.names[self.names.index(axis) + 1 :])
        return number // inner % self.sizes[axis]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, VirtualMesh) and tuple(self.sizes.items()) == tuple(other.sizes.items())

    def __hash__(self) -> int:
        return hash(tuple(self.sizes.items()))

    def __repr__(self) -> str:
        return f"VirtualMesh({', '.join(f'{name}={size}' for name, size in self.sizes.items())})"


def mesh_shape(mesh: Any) -> VirtualMesh:
    """Names and sizes of a `DeviceMesh` (or of a `VirtualMesh`, which is returned as it is).

    Raises:
        FzeroError: for anything else, or a `DeviceMesh` whose axes have no names.
    """
    if isinstance(mesh, VirtualMesh):
        return mesh
    names = getattr(mesh, "mesh_dim_names", None)
    if not names:
        raise FzeroError(
            "mesh",
            f"{type(mesh).__name__} has no named axes",
            'make it with init_device_mesh(device, (world_size,), mesh_dim_names=("fsdp",))',
        )
    return VirtualMesh(**dict(zip(names, mesh.shape)))
