"""Live: the rank of this process in a torch `DeviceMesh`. Moves communicate at once, and programs run here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fzero.base.mesh import VirtualMesh, mesh_shape
from fzero.files import load
from fzero.layout import buffers
from fzero.layout.layout import Layout, wire
from fzero.layout.owners import Places
from fzero.optim.newton_schulz import Blocks, NewtonSchulz
from fzero.ranks.agreement import meet
from fzero.ranks.exchanges import AllReduce, Exchange, average_leaves, complete, gather_leaves
from fzero.ranks.link import link_of
from fzero.ranks.members import Members
from fzero.ranks.owners import orthogonalize_leaves
from fzero.ranks.ranks import Ranks
from fzero.ranks.transports import Pending, Transport, choose_transport
from fzero.ranks.virtual import virtual


class Live(Ranks):
    """The rank of this process in a mesh, with a transport for each axis.

    `live` makes a `Live`, on all `ranks` of the mesh together. `groups` are the process groups of the axes, and tensors
    are on `device_type`.
    """

    rank: int
    device: torch.device

    def __init__(
        self, mesh: VirtualMesh, groups: tuple[dist.ProcessGroup, ...], device_type: str, ranks: tuple[int, ...]
    ) -> None:
        super().__init__(mesh, ranks, Members(ranks, groups))
        self.device = torch.device(device_type)
        if device_type == "cuda":
            self.device = torch.device(device_type, torch.cuda.current_device())
        self.transports = {
            axis: choose_transport(group, device_type, self.members) for axis, group in zip(mesh.names, groups)
        }
        self.groups = dict(zip(mesh.names, groups))
        self.rank, self.link = self._sharding.rank, link_of(self.device)
        for axis in mesh.names:
            self.number = self.number * mesh.size(axis) + self.transports[axis].rank

    @property
    def _sharding(self) -> Transport:
        """The transport of the shard axis."""
        return self.transports[self.mesh.shard_axis]

    def begin(self, exchange: Exchange) -> Pending:
        """Start an exchange, by the transport of its axis."""
        return exchange.start(self.transports[exchange.axis], self.members.begin(exchange.what))

    def along(self, axis: str) -> int:
        return self.transports[axis].rank

    def broadcast(self, x: Tensor, rank: int, layout: Layout) -> None:
        if self.mesh.size(self.mesh.shard_axis) > 1:
            with self.members.begin(f"broadcast of {layout.bucket}"):
                work = dist.broadcast(x, group=self.groups[self.mesh.shard_axis], group_src=rank, async_op=True)
                work.wait(self.members.timeout)

    def settle(self) -> None:
        self._sharding.settle()
        super().settle()

    def gather(self, x: Tensor, layout: Layout, leaf: int) -> Tensor:
        self.agree(f"all_gather of {layout.leaves[leaf].path}: {describe_leaf(layout, leaf, x.dtype)}")
        return self.gather_agreed(x, layout, leaf)

    def gather_agreed(self, x: Tensor, layout: Layout, leaf: int) -> Tensor:
        along, x = wire(layout, (leaf,)), load(x).to(self.device)  # from the host or disk where the value lies there
        buffer = complete(gather_leaves([x], along, self.rank, self.mesh.shard_axis), None, self.begin)
        self.settle()
        full = buffers.join_leaf(buffer, along, 0, layout.leaves[leaf].shape)
        return full.clone() if layout.world == 1 else full  # one rank gathers a view of its slice

    def gather_pieces(self, pieces: Sequence[Tensor], what: str, where: str) -> Tensor:
        meet(self.members, f"{what}: {where}", what=what)
        gathered = self._sharding.all_gather(load(pieces[0]), self.members.begin(what)).wait()
        self._sharding.settle()
        return gathered

    def scatter(self, x: Tensor, layout: Layout, leaf: int) -> Tensor:
        self.agree(f"reduce_scatter of {layout.leaves[leaf].path}: {describe_leaf(layout, leaf, x.dtype)}")
        along = wire(layout, (leaf,))
        return buffers.slice_of(complete(average_leaves([x], along), None, self.begin), along, self.rank, 0)

    def spread(self, x: Tensor, like: Tensor) -> Tensor:
        return like.new_empty(like.shape, dtype=x.dtype).copy_(x)

    def all_reduce(self, x: Tensor, op: str, axis: str, leaf: str = "") -> Tensor:
        self.agree(f"all_reduce over {axis}: {op} of {x.dtype} {list(x.shape)} {leaf}")
        return self.begin(AllReduce(f"all_reduce over {axis}", axis, x, op)).wait()

    def orthogonalize(self, slices: list[Tensor], places: Places, blocks: Blocks, how: NewtonSchulz) -> list[Tensor]:
        lines = [f"{describe_leaf(*place, x.dtype)} as {list(row)}" for place, x, row in zip(places, slices, blocks)]
        self.agree(f"orthogonalize {len(slices)} leaves by {how}", lines)
        steps = orthogonalize_leaves(slices, places, self.rank, self.mesh.shard_axis, blocks, how)
        return complete(steps, None, self.begin)


def describe_leaf(layout: Layout, leaf: int, dtype: torch.dtype) -> str:
    """What ranks have to know alike of a leaf to communicate about the leaf."""
    at, shape = layout.leaf_ranges[leaf], list(layout.leaves[leaf].shape)
    return f"{dtype} {shape}, [{at.start}:{at.stop}] of bucket {layout.bucket!r} with {layout.shard} elements a rank"


def live(mesh: Any) -> Live:
    """The one `Live` of a `DeviceMesh`. Equal meshes on the same process groups share one `Live`.

    The first call for a mesh makes the `Live`, on all ranks of the mesh together.

    Raises:
        FzeroError: for a mesh without devices, without named axes or without a shard axis, or when another rank of the
            mesh does not come.
    """
    shape = mesh_shape(mesh, has_devices=True)
    shape.shard_axis  # noqa: B018  refused before any process group is made
    groups = tuple(mesh.get_group(axis) for axis in shape.names)
    key = shape, groups, mesh.device_type, tuple(mesh.mesh.flatten().tolist())
    if key not in _lives:
        _purge_lives()
        _lives[key] = Live(*key)
    return _lives[key]


def find_ranks(mesh: Any) -> Ranks:
    """The one `Ranks` of a mesh: a `DeviceMesh` has one in each process, and the first call is collective.

    Raises:
        FzeroError: as `live` does.
    """
    return virtual(mesh) if isinstance(mesh, VirtualMesh) else live(mesh)


_lives: dict[tuple[VirtualMesh, tuple[dist.ProcessGroup, ...], str, tuple[int, ...]], Live] = {}
"""A mesh has one `Live` as long as its process groups exist: values compare the `Live` by identity."""


def _purge_lives() -> None:
    """Free the connections and threads of each mesh whose process groups the user has destroyed."""
    for key in [key for key in _lives if not all(map(_exists, key[1]))]:
        _lives.pop(key).members.close()


def _exists(group: dist.ProcessGroup) -> bool:
    """Whether torch knows a process group: `destroy_process_group` makes torch forget it."""
    try:
        return dist.get_backend(group) != ""
    except ValueError:
        return False
