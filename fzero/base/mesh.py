"""Mesh shapes: the names and sizes of axes, without devices, and what the axes mean.

`VirtualMesh(fsdp=8)` describes eight ranks. `mesh_shape` turns a torch `DeviceMesh` into a `VirtualMesh`, so code that
only plans (layouts, programs, costs) needs no device.

Several axes together, over which one collective acts, have one name: "replica+fsdp" (`join`). Ranks along them are
numbered row by row, as in the mesh.

An axis of a mesh has one of three meanings:

    shard axis    ranks take different examples, and each rank holds a slice of the state; it may be axes together
    data axis     ranks take different examples, or parts of examples
    model axis    ranks take the same examples, and compute parts of the model
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from fzero.base.arguments import is_whole
from fzero.base.errors import FzeroError

SHARD_AXIS = "fsdp"
SHARD_AXES = ("node", "local")
"""Together the shard axis of a mesh that has both side by side, and no "fsdp". Ranks along "local" share a host."""
JOINT = "+"
"""Between the names of axes that are named together."""
DATA_AXES = ("replica", SHARD_AXIS)
"""Axes with these names are data axes, whether or not the caller says so."""


class VirtualMesh:
    """Named axis sizes: `VirtualMesh(replica=2, fsdp=4)`. Two meshes are equal whose names and sizes are, and whose
    state lies along the same axes.

    Raises:
        FzeroError: for no axis at all, a name with a "+", or a size that is no whole number from 1 on.
    """

    def __init__(self, **sizes: int) -> None:
        for name, size in sizes.items():
            if JOINT in name:
                raise FzeroError(f"mesh axis {name!r}", "has a '+', which joins axes", "name it without")
            if not is_whole(size) or operator.index(size) < 1:
                raise FzeroError(f"mesh axis {name}", f"has size {size!r}", "a size is at least 1, a whole number")
        if not sizes:
            raise FzeroError("mesh", "has no axes", "name one, as in VirtualMesh(fsdp=8)")
        self.sizes = {name: operator.index(size) for name, size in sizes.items()}
        self.state: tuple[str, ...] | None = None
        """The axes that `lay_state` chose."""

    def lay_state(self, axes: Sequence[str] | None) -> VirtualMesh:
        """The mesh with state along these axes, together the shard axis, and along no others. This one for None.

        Raises:
            FzeroError: for no axis, an axis that the mesh does not have, or one that is named twice.
        """
        if axes is None:
            return self
        made, chosen = VirtualMesh(**self.sizes), self.split(self.join(axes))
        made.state = None if chosen == made._usual_axes else chosen
        return made

    @property
    def names(self) -> tuple[str, ...]:
        """Axis names, outermost first."""
        return tuple(self.sizes)

    @property
    def shard_axis(self) -> str:
        """The axis that state is partitioned over: "fsdp", or the only axis of the mesh whatever its name. On a mesh
        with the axes "node" and "local" side by side, and without "fsdp", it is both together: "node+local". Those that
        `lay_state` chose come before all of these.

        Raises:
            FzeroError: for a mesh of several axes without these.
        """
        axes = self._usual_axes if self.state is None else self.state
        if not axes:
            problem = f"none of the axes {self.names} is the shard axis"
            way_out = (
                'call the axis that state lies along "fsdp", or two neighbouring ones "node" and "local", in this order'
            )
            raise FzeroError("mesh", problem, way_out)
        return JOINT.join(axes)

    @property
    def _usual_axes(self) -> tuple[str, ...]:
        """The axes that state lies along by their names; none where names do not say it."""
        if len(self.sizes) == 1:
            return self.names
        if SHARD_AXIS in self.sizes:
            return (SHARD_AXIS,)
        return SHARD_AXES if SHARD_AXES in zip(self.names, self.names[1:]) else ()

    @property
    def shard_axes(self) -> tuple[str, ...]:
        """The axes that make up the shard axis, outermost first."""
        return self.split(self.shard_axis)

    @property
    def replica_axes(self) -> tuple[str, ...]:
        """The axes but the shard axis: ranks along them hold the same slices of state."""
        return tuple(name for name in self.names if name not in self.shard_axes)

    def size(self, axis: str | None = None) -> int:
        """The number of ranks along `axis`, or along several axes together; without `axis`, of all ranks.

        Raises:
            FzeroError: for an axis that the mesh does not have.
        """
        if axis is None:
            return math.prod(self.sizes.values())
        return math.prod(self.sizes[name] for name in self.split(axis))

    def has(self, axis: str) -> bool:
        """Whether this is the name of an axis, or of several axes together."""
        return axis in self.sizes or all(name in self.sizes for name in axis.split(JOINT))

    def split(self, axis: str) -> tuple[str, ...]:
        """The axes that are named together: `"replica+fsdp" -> ("replica", "fsdp")`.

        Raises:
            FzeroError: for an axis that the mesh does not have.
        """
        if axis in self.sizes:
            return (axis,)
        if not self.has(axis):
            raise FzeroError(f"mesh axis {axis!r}", f"this mesh has {self.names}", "name one of these")
        return tuple(axis.split(JOINT))

    def join(self, axes: Iterable[str]) -> str:
        """The name of several axes together, outermost first.

        Raises:
            FzeroError: for no axis, an axis that the mesh does not have, or one that is named twice.
        """
        found = [name for axis in axes for name in self.split(axis)]
        if not found or len(set(found)) < len(found):
            raise FzeroError("mesh axes", f"are {tuple(found)}", "name one or more axes of the mesh, each once")
        return JOINT.join(sorted(found, key=self.names.index))

    def data_axes(self, data: Sequence[str] | None = None) -> tuple[str, ...]:
        """The axes along which ranks take different examples, outermost first: those of `data`; without `data` the
        shard axis, and axes with the names "replica" and "fsdp".

        Raises:
            FzeroError: for a mesh without a shard axis; for an axis in `data` that the mesh lacks; for `data` that
                leaves out the shard axis.
        """
        if isinstance(data, str):
            raise FzeroError("data", f"is the string {data!r}", f"give a tuple of axis names, as in data=({data!r},)")
        shard_axes = self.shard_axes
        for axis in data or ():
            if axis not in self.sizes:
                raise FzeroError(
                    f"mesh axis {axis!r}", f"is in data, and this mesh has {self.names}", "name only these"
                )
        missing = () if data is None or self.state else tuple(axis for axis in shard_axes if axis not in data)
        if data is not None and missing:
            problem = f"{tuple(data)} leaves out {missing[0]!r}, the axis of {self} that state lies along"
            raise FzeroError("data", problem, f"give data={(*data, *missing)}")
        chosen = {*shard_axes, *DATA_AXES} if data is None else set(data)
        return tuple(axis for axis in self.names if axis in chosen)

    def position(self, number: int, axis: str) -> int:
        """The position along `axis`, or along several axes together, of rank `number`. Ranks are numbered row by row
        over the whole mesh."""
        position = 0
        for name in self.split(axis):
            inner = math.prod(self.sizes[other] for other in self.names[self.names.index(name) + 1 :])
            position = position * self.sizes[name] + number // inner % self.sizes[name]
        return position

    def rows(self, axis: str) -> list[list[int]]:
        """The numbers of the ranks that are in line along `axis`, or along several axes together: each row in order of
        positions. Rows are in order of their first rank."""
        along, rows = set(self.split(axis)), dict[tuple[int, ...], list[int]]()
        others = [name for name in self.names if name not in along]
        for number in range(self.size()):
            rows.setdefault(tuple(self.position(number, name) for name in others), []).append(number)
        return list(rows.values())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, VirtualMesh) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def _key(self) -> tuple[object, ...]:
        return tuple(self.sizes.items()), self.state

    def __repr__(self) -> str:
        shape = f"VirtualMesh({', '.join(f'{name}={size}' for name, size in self.sizes.items())})"
        return shape if self.state is None else f"{shape} with state along {self.state}"


def find_model_axes(mesh: VirtualMesh, data: Sequence[str] | None = None) -> tuple[str, ...]:
    """The axes of a mesh that are no data axes, outermost first.

    * The only axis of a mesh is a data axis, whatever its name.
    * `data` names all data axes. The other axes are model axes.
    * Without `data` the shard axis and "replica" are the data axes of a mesh, and it may have no others.

    Raises:
        FzeroError: for a mesh without a shard axis; for an axis in `data` that the mesh lacks; for `data`
            that leaves out the shard axis; without `data`, for an axis that does not say what it means.
    """
    known = mesh.data_axes(data)
    others = tuple(axis for axis in mesh.names if axis not in known)
    if others and data is None:
        problem, axis = f"has no meaning on {mesh}, whose data axes are {known}", others[0]
        way_out = f"give data={(*known, axis)} if ranks along {axis!r} take different examples, and data={known} if"
        raise FzeroError(f"mesh axis {axis!r}", problem, f"{way_out} they take the same (docs/axes.md)")
    return others


def virtual_mesh(ranks: VirtualMesh | int) -> VirtualMesh:
    """The mesh of so many ranks, along the one axis "fsdp". A mesh is returned unchanged."""
    return ranks if isinstance(ranks, VirtualMesh) else VirtualMesh(**{SHARD_AXIS: ranks})


def read_mesh(where: str, text: str) -> VirtualMesh:
    """`"fsdp=64,tp=8"` as a mesh.

    Raises:
        FzeroError: for what names no axes and sizes, for an axis that is named twice, and as `VirtualMesh`.
    """
    pairs = [[part.strip() for part in each.split("=")] for each in text.split(",")]
    names = [pair[0] for pair in pairs]
    is_mesh = all(len(pair) == 2 and pair[0].isidentifier() and pair[1].isdecimal() for pair in pairs)
    if not is_mesh or len(set(names)) < len(names):
        raise FzeroError(where, f"is {text!r}", "write axes and sizes, each axis once, as in fsdp=64,tp=8")
    return VirtualMesh(**{name: int(size) for name, size in pairs})


class LaidMesh(NamedTuple):
    """A torch `DeviceMesh` with state along other axes than their names say. Functions take it for a mesh, and it has
    the attributes of one."""

    devices: Any
    state: tuple[str, ...]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.devices, name)


def lay_state(mesh: Any, axes: Sequence[str] | None) -> Any:
    """A mesh with state along these axes of it, None: as it is."""
    if axes is None:
        return mesh
    return mesh.lay_state(axes) if isinstance(mesh, VirtualMesh) else LaidMesh(devices_of(mesh), tuple(axes))


def devices_of(mesh: Any) -> Any:
    """The torch `DeviceMesh` of a mesh."""
    return mesh.devices if isinstance(mesh, LaidMesh) else mesh


def mesh_shape(mesh: Any, *, has_devices: bool = False) -> VirtualMesh:
    """The axis names and sizes of a torch `DeviceMesh`. A `VirtualMesh` is returned unchanged.

    Raises:
        FzeroError: for any other object, or a `DeviceMesh` whose axes have no names; with `has_devices` for a
            `VirtualMesh`.
    """
    if isinstance(mesh, VirtualMesh):
        if has_devices:
            raise FzeroError("mesh", f"{mesh} has names and sizes but no devices", "give a DeviceMesh")
        return mesh
    if isinstance(mesh, LaidMesh):
        return mesh_shape(mesh.devices).lay_state(mesh.state)
    names = getattr(mesh, "mesh_dim_names", None)
    if not names:
        raise FzeroError(
            "mesh",
            f"{type(mesh).__name__} has no named axes",
            'make it with init_device_mesh(device, (world_size,), mesh_dim_names=("fsdp",))',
        )
    return VirtualMesh(**dict(zip(names, mesh.shape)))
