"""Live: one rank of a torch `DeviceMesh`, where moves communicate at once and a program's operations run."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fzero import buffers
from fzero.errors import FzeroError
from fzero.layout import Layout, wire
from fzero.mesh import VirtualMesh, mesh_shape
from fzero.transport import Pending, Transport, transport


class Live:
    """This process's place in a mesh, with a transport for each axis. Performs the `Primitives` of `collectives`.

    Made by `live`. `groups` are the process groups of the axes, `device_type` is where tensors live.
    """

    is_tracing = False

    def __init__(self, mesh: VirtualMesh, groups: tuple[dist.ProcessGroup, ...], device_type: str) -> None:
        self.mesh = mesh
        self.device = torch.device(device_type)
        if device_type == "cuda":
            self.device = torch.device(device_type, torch.cuda.current_device())
        self.transports = {axis: transport(group, device_type) for axis, group in zip(mesh.names, groups)}
        self.rank = self._sharding.rank
        self.control = _control(mesh, groups)

    @property
    def _sharding(self) -> Transport:
        return self.transports[self.mesh.shard_axis]

    def all_gather(self, slices: Sequence[Tensor], layout: Layout, leaves: tuple[int, ...]) -> Pending:
        """Start gathering some leaves of a bucket from this rank's slices of them."""
        return self._sharding.all_gather(buffers.block_of(slices, wire(layout, leaves)))

    def reduce_scatter(self, fulls: Sequence[Tensor], layout: Layout, leaves: tuple[int, ...]) -> Pending:
        """Start scattering some leaves of a bucket, given in full; their mean is over every axis of the mesh."""
        pending = self._sharding.reduce_scatter(buffers.blocks_of(fulls, wire(layout, leaves)))
        others = [axis for axis in self.mesh.names if axis != self.mesh.shard_axis and self.mesh.size(axis) > 1]
        return Pending([], lambda: self._averaged(pending.wait(), others)) if others else pending

    def _averaged(self, block: Tensor, axes: Sequence[str]) -> Tensor:
        for axis in axes:
            block = self.all_reduce(block, "avg", axis)
        return block

    def all_reduce_list(self, values: Sequence[Tensor], op: str, axis: str) -> list[Tensor]:
        """`all_reduce` of several tensors of one dtype in one collective."""
        if len(values) == 1:
            return [self.all_reduce(values[0], op, axis)]
        packed = self.all_reduce(torch.cat([value.reshape(-1) for value in values]), op, axis)
        return [flat.view(value.shape) for flat, value in zip(packed.split([v.numel() for v in values]), values)]

    def gather(self, x: Tensor, layout: Layout, leaf: int) -> Tensor:
        buffer = self.all_gather([x], layout, (leaf,)).wait()
        return buffers.whole(buffer, wire(layout, (leaf,)), 0, layout.leaves[leaf].shape)

    def scatter(self, x: Tensor, layout: Layout, leaf: int) -> Tensor:
        block = self.reduce_scatter([x], layout, (leaf,)).wait()
        return buffers.part(block, wire(layout, (leaf,)), self.rank, 0)

    def take(self, x: Tensor, layout: Layout, leaf: int) -> Tensor:
        part = layout.part(leaf, self.rank)
        return x.reshape(-1)[part.start : part.stop]

    def beside(self, x: Tensor) -> Tensor:
        return x.clone()

    def spread(self, x: Tensor, like: Tensor) -> Tensor:
        return like.new_empty(like.shape, dtype=x.dtype).copy_(x)

    def all_reduce(self, x: Tensor, op: str, axis: str) -> Tensor:
        return self.transports[axis].all_reduce(x, op)

    def axis_index(self, axis: str, device: torch.device) -> Tensor:
        return torch.tensor(self.transports[axis].rank, device=device)


def live(mesh: Any) -> Live:
    """The one `Live` of a `DeviceMesh`; equal meshes on the same process groups have the same.

    Raises:
        FzeroError: for a mesh without devices or without named axes.
    """
    shape = mesh_shape(mesh)
    if isinstance(mesh, VirtualMesh):
        raise FzeroError("mesh", f"{mesh} has names and sizes but no devices", "give a DeviceMesh")
    return _live(shape, tuple(mesh.get_group(axis) for axis in shape.names), mesh.device_type)


_live = lru_cache(maxsize=None)(Live)


def _control(mesh: VirtualMesh, groups: tuple[dist.ProcessGroup, ...]) -> dist.ProcessGroup | None:
    """A CPU process group over all ranks of the mesh, to agree on; None for one rank alone. Makes one where needed."""
    if mesh.size() == 1:
        return None
    if len(groups) == 1 and dist.get_backend(groups[0]) == "gloo":
        return groups[0]
    if mesh.size() != dist.get_world_size():
        raise FzeroError("mesh", f"has {mesh.size()} of {dist.get_world_size()} ranks", "make it of all ranks")
    return dist.new_group(backend="gloo")
