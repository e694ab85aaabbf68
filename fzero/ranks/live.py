"""Live: the rank of this process in a torch `DeviceMesh`. Moves communicate at once, and programs run here."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fzero.base.errors import FzeroError
from fzero.base.mesh import VirtualMesh, mesh_shape
from fzero.layout import buffers
from fzero.layout.layout import Layout, wire
from fzero.ranks.members import Members
from fzero.ranks.transports import Pending, Transport, choose_transport


class Live:
    """The rank of this process in a mesh, with a transport for each axis. Performs the `Primitives` of `moves`.

    `live` makes a `Live`, on all `ranks` of the mesh together. `groups` are the process groups of the axes, and tensors
    are on `device_type`.
    """

    is_tracing = False

    def __init__(
        self, mesh: VirtualMesh, groups: tuple[dist.ProcessGroup, ...], device_type: str, ranks: tuple[int, ...]
    ) -> None:
        self.mesh, self.ranks = mesh, ranks  # global ranks of the mesh, row by row
        self.device = torch.device(device_type)
        if device_type == "cuda":
            self.device = torch.device(device_type, torch.cuda.current_device())
        self.members = Members(ranks, groups)
        self.transports = {
            axis: choose_transport(group, device_type, self.members) for axis, group in zip(mesh.names, groups)
        }
        self.groups = dict(zip(mesh.names, groups))
        self.rank = self._sharding.rank
        self.number = 0  # among all ranks of the mesh, row by row
        for axis in mesh.names:
            self.number = self.number * mesh.size(axis) + self.transports[axis].rank

    @property
    def _sharding(self) -> Transport:
        """The transport of the shard axis."""
        return self.transports[self.mesh.shard_axis]

    def all_gather(
        self, slices: Sequence[Tensor], layout: Layout, leaves: tuple[int, ...], dtype: torch.dtype | None = None
    ) -> Pending:
        """Start to gather some leaves of a bucket from this rank's slices of the leaves, cast to `dtype` if given."""
        along, attempt = wire(layout, leaves), self.members.begin(f"all_gather of {layout.bucket}")
        block = None if dtype else buffers.view_of(slices, along, self.rank)
        if block is not None:
            return self._sharding.all_gather(block, attempt)
        full = slices[0].new_empty(along.numel, dtype=dtype)
        block = full[self.rank * along.stride :][: along.stride]
        return self._sharding.all_gather(buffers.fill_block(block, slices, along, self.rank), attempt, full)

    def reduce_scatter(self, fulls: Sequence[Tensor], layout: Layout, leaves: tuple[int, ...]) -> Pending:
        """Start to scatter some leaves of a bucket, given in full. The mean is over all axes of the mesh."""
        attempt = self.members.begin(f"reduce_scatter of {layout.bucket}")
        pending = self._sharding.reduce_scatter(fulls, wire(layout, leaves), attempt)
        others = [axis for axis in self.mesh.names if axis != self.mesh.shard_axis and self.mesh.size(axis) > 1]
        return Pending(attempt, [], lambda: self._average(pending.wait(), layout, others)) if others else pending

    def _average(self, block: Tensor, layout: Layout, axes: Sequence[str]) -> Tensor:
        """The mean of a block over these axes, one after the other."""
        for axis in axes:
            attempt = self.members.begin(f"all_reduce of {layout.bucket} over {axis}")
            block = self.transports[axis].all_reduce(block, "avg", attempt)
        return block

    def all_reduce_list(self, values: Sequence[Tensor], op: str, axis: str) -> list[Tensor]:
        """Reduce several tensors of one dtype over an axis in one collective: `all_reduce` of each."""
        if len(values) == 1:
            return [self.all_reduce(values[0], op, axis)]
        packed = self.all_reduce(torch.cat([value.reshape(-1) for value in values]), op, axis)
        return [flat.view(value.shape) for flat, value in zip(packed.split([v.numel() for v in values]), values)]

    def broadcast(self, x: Tensor, rank: int, layout: Layout) -> None:
        """Overwrite `x`, elements of a bucket, with `x` of the rank at position `rank` along the shard axis."""
        if self.mesh.size(self.mesh.shard_axis) > 1:
            with self.members.begin(f"broadcast of {layout.bucket}"):
                work = dist.broadcast(x, group=self.groups[self.mesh.shard_axis], group_src=rank, async_op=True)
                work.wait(self.members.timeout)

    def row(self, rank: int) -> list[int]:
        """The global ranks in line with global rank `rank` along the shard axis. They hold one copy of all state."""
        number, axes = self.ranks.index(rank), [name for name in self.mesh.names if name != self.mesh.shard_axis]
        place = [self.mesh.position(number, axis) for axis in axes]
        others = ([self.mesh.position(other, axis) for axis in axes] for other in range(len(self.ranks)))
        return [rank for rank, where in zip(self.ranks, others) if where == place]

    def settle(self) -> None:
        """Wait until no other rank reads this rank's memory. Call before memory that was sent is overwritten."""
        self._sharding.settle()

    def gather(self, x: Tensor, layout: Layout, leaf: int) -> Tensor:
        buffer = self.all_gather([x], layout, (leaf,)).wait()
        self.settle()
        return buffers.join_leaf(buffer, wire(layout, (leaf,)), 0, layout.leaves[leaf].shape)

    def scatter(self, x: Tensor, layout: Layout, leaf: int) -> Tensor:
        block = self.reduce_scatter([x], layout, (leaf,)).wait()
        return buffers.slice_of(block, wire(layout, (leaf,)), self.rank, 0)

    def take(self, x: Tensor, layout: Layout, leaf: int) -> Tensor:
        part = layout.part(leaf, self.rank)
        return x.reshape(-1)[part.start : part.stop]

    def beside(self, x: Tensor) -> Tensor:
        return x.clone()

    def spread(self, x: Tensor, like: Tensor) -> Tensor:
        return like.new_empty(like.shape, dtype=x.dtype).copy_(x)

    def all_reduce(self, x: Tensor, op: str, axis: str) -> Tensor:
        return self.transports[axis].all_reduce(x, op, self.members.begin(f"all_reduce over {axis}"))

    def axis_index(self, axis: str, device: torch.device) -> Tensor:
        return torch.full(
            (), self.transports[axis].rank, device=device
        )  # not torch.tensor: a CUDA graph cannot capture a copy from the host


def live(mesh: Any) -> Live:
    """The one `Live` of a `DeviceMesh`. Equal meshes on the same process groups share one `Live`.

    The first call for a mesh makes the `Live`, on all ranks of the mesh together.

    Raises:
        FzeroError: for a mesh without devices, without named axes or without a shard axis, or when another rank of the
            mesh does not come.
    """
    shape = mesh_shape(mesh)
    if isinstance(mesh, VirtualMesh):
        raise FzeroError("mesh", f"{mesh} has names and sizes but no devices", "give a DeviceMesh")
    shape.shard_axis  # noqa: B018  refused before any process group is made
    groups = tuple(mesh.get_group(axis) for axis in shape.names)
    return _live(shape, groups, mesh.device_type, tuple(mesh.mesh.flatten().tolist()))


_live = lru_cache(maxsize=None)(Live)
