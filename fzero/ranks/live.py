"""Live: one rank of a torch `DeviceMesh`, where moves communicate at once and a program's operations run."""

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
from fzero.ranks.transports import Pending, Transport, transport


class Live:
    """This process's place in a mesh, with a transport for each axis. A `MovePerformer` of `moves`.

    Made by `live`, on all `ranks` of the mesh together. `groups` are the process groups of the axes, `device_type` is
    where tensors live.
    """

    is_tracing = False

    def __init__(
        self, mesh: VirtualMesh, groups: tuple[dist.ProcessGroup, ...], device_type: str, ranks: tuple[int, ...]
    ) -> None:
        self.mesh, self.ranks = mesh, ranks  # global ranks, row by row
        self.device = torch.device(device_type)
        if device_type == "cuda":
            self.device = torch.device(device_type, torch.cuda.current_device())
        self.members = Members(ranks, groups)
        self.transports = {axis: transport(group, device_type, self.members) for axis, group in zip(mesh.names, groups)}
        self.groups = dict(zip(mesh.names, groups))
        self.rank = self._sharding.rank
        self.number = 0  # among all ranks of the mesh, row by row
        for axis in mesh.names:
            self.number = self.number * mesh.size(axis) + self.transports[axis].rank

    @property
    def _sharding(self) -> Transport:
        return self.transports[self.mesh.shard_axis]

    def all_gather(
        self, slices: Sequence[Tensor], layout: Layout, leaves: tuple[int, ...], dtype: torch.dtype | None = None
    ) -> Pending:
        """Start gathering some leaves of a bucket from this rank's slices of them, cast to a `dtype` that is given."""
        along, begun = wire(layout, leaves), self.members.begin(f"all_gather of {layout.bucket}")
        block = None if dtype else buffers.view_of(slices, along, self.rank)
        if block is not None:
            return self._sharding.all_gather(block, begun)
        full = slices[0].new_empty(along.numel, dtype=dtype)
        block = full[self.rank * along.stride :][: along.stride]
        return self._sharding.all_gather(buffers.fill(block, slices, along, self.rank), begun, full)

    def reduce_scatter(self, fulls: Sequence[Tensor], layout: Layout, leaves: tuple[int, ...]) -> Pending:
        """Start scattering some leaves of a bucket, given in full; their mean is over every axis of the mesh."""
        begun = self.members.begin(f"reduce_scatter of {layout.bucket}")
        pending = self._sharding.reduce_scatter(fulls, wire(layout, leaves), begun)
        others = [axis for axis in self.mesh.names if axis != self.mesh.shard_axis and self.mesh.size(axis) > 1]
        return Pending(begun, [], lambda: self._averaged(pending.wait(), layout, others)) if others else pending

    def _averaged(self, block: Tensor, layout: Layout, axes: Sequence[str]) -> Tensor:
        for axis in axes:
            begun = self.members.begin(f"all_reduce of {layout.bucket} over {axis}")
            block = self.transports[axis].all_reduce(block, "avg", begun)
        return block

    def all_reduce_list(self, values: Sequence[Tensor], op: str, axis: str) -> list[Tensor]:
        """`all_reduce` of several tensors of one dtype in one collective."""
        if len(values) == 1:
            return [self.all_reduce(values[0], op, axis)]
        packed = self.all_reduce(torch.cat([value.reshape(-1) for value in values]), op, axis)
        return [flat.view(value.shape) for flat, value in zip(packed.split([v.numel() for v in values]), values)]

    def broadcast(self, x: Tensor, rank: int, layout: Layout) -> None:
        """Overwrite `x`, values of a bucket, with those of the rank at this position of the shard axis."""
        if self.mesh.size(self.mesh.shard_axis) > 1:
            with self.members.begin(f"broadcast of {layout.bucket}"):
                work = dist.broadcast(x, group=self.groups[self.mesh.shard_axis], group_src=rank, async_op=True)
                work.wait(self.members.timeout)

    def row(self, rank: int) -> list[int]:
        """The global ranks that hold one copy of all state together: those along the shard axis beside `rank`."""
        number, axes = self.ranks.index(rank), [name for name in self.mesh.names if name != self.mesh.shard_axis]
        place = [self.mesh.position(number, axis) for axis in axes]
        others = ([self.mesh.position(other, axis) for axis in axes] for other in range(len(self.ranks)))
        return [rank for rank, where in zip(self.ranks, others) if where == place]

    def settle(self) -> None:
        """Return when no other rank reads this one's memory any more: before what was sent is changed."""
        self._sharding.settle()

    def gather(self, x: Tensor, layout: Layout, leaf: int) -> Tensor:
        buffer = self.all_gather([x], layout, (leaf,)).wait()
        self.settle()
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
        return self.transports[axis].all_reduce(x, op, self.members.begin(f"all_reduce over {axis}"))

    def axis_index(self, axis: str, device: torch.device) -> Tensor:
        return torch.full((), self.transports[axis].rank, device=device)  # a copy from the host would not be captured


def live(mesh: Any) -> Live:
    """The one `Live` of a `DeviceMesh`; equal meshes on the same process groups have the same. Made where it is not
    there yet, by all ranks of the mesh together.

    Raises:
        FzeroError: for a mesh without devices or without named axes, or when another rank of it does not come.
    """
    shape = mesh_shape(mesh)
    if isinstance(mesh, VirtualMesh):
        raise FzeroError("mesh", f"{mesh} has names and sizes but no devices", "give a DeviceMesh")
    groups = tuple(mesh.get_group(axis) for axis in shape.names)
    return _live(shape, groups, mesh.device_type, tuple(mesh.mesh.flatten().tolist()))


_live = lru_cache(maxsize=None)(Live)
