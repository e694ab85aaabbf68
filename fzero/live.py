"""Live: one rank of a torch `DeviceMesh`, where moves communicate at once and a program's operations run."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fzero import buffers
from fzero.layout import Layout, wire
from fzero.mesh import mesh_shape
from fzero.transport import Pending, Transport, transport


class Live:
    """This process's place in a mesh, with a transport for each axis. Performs the `Primitives` of `collectives`."""

    def __init__(self, mesh: Any) -> None:
        self.mesh = mesh_shape(mesh)
        self.device = torch.device(mesh.device_type, torch.cuda.current_device()) if _is_cuda(mesh) else _cpu(mesh)
        self.transports: dict[str, Transport] = {
            axis: transport(mesh.get_group(axis), mesh.device_type) for axis in self.mesh.names
        }
        self.rank = self.transports[self.mesh.shard_axis].rank
        self.control = _control(mesh)

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


def _is_cuda(mesh: Any) -> bool:
    return mesh.device_type == "cuda"


def _cpu(mesh: Any) -> torch.device:
    return torch.device(mesh.device_type)


def _control(mesh: Any) -> dist.ProcessGroup | None:
    """A CPU process group over all ranks of the mesh, to agree on; None for one rank alone. Makes one where needed."""
    if mesh.size() == 1:
        return None
    if mesh.ndim == 1 and dist.get_backend(mesh.get_group()) == "gloo":
        return mesh.get_group()
    return dist.new_group(mesh.mesh.flatten().tolist(), backend="gloo")


@cache
def live(mesh: Any) -> Live:
    """The one `Live` of a mesh in this process."""
    return Live(mesh)
