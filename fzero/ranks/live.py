"""Live: the rank of this process in a torch `DeviceMesh`. Operations communicate at once, and programs run here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fzero.base.errors import FzeroError
from fzero.base.mesh import VirtualMesh, devices_of, mesh_shape
from fzero.files import load
from fzero.layout.layout import Layout
from fzero.ranks.agreement import meet
from fzero.ranks.calls import EagerCall
from fzero.ranks.exchanges import AllGather, Exchange, begin
from fzero.ranks.link import link_of
from fzero.ranks.members import Members
from fzero.ranks.ranks import Ranks
from fzero.ranks.transports import Alone, Pending, Transport, choose_transport
from fzero.ranks.virtual import virtual


class Live(Ranks):
    """The rank of this process in a mesh, with a transport for each axis, and for axes that are named together one
    that is made when they are named first.

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
        self.link = link_of(self.device)
        for axis in mesh.names:
            self.number = self.number * mesh.size(axis) + self.transports[axis].rank
        self._lie_on(mesh)

    def _lie_on(self, mesh: VirtualMesh) -> None:
        self.mesh = mesh
        if mesh.shard_axis not in self.transports:
            self._join(mesh.shard_axis)
        self.rank = self._sharding.rank

    @property
    def _sharding(self) -> Transport | Alone:
        """The transport of the shard axis."""
        return self.transports[self.mesh.shard_axis]

    def begin(self, exchange: Exchange) -> Pending:
        """Start an exchange, by the transport of its axis."""
        attempt = self.members.begin(exchange.what)
        return begin(exchange, self.transports.get(exchange.axis) or self._join(exchange.axis), attempt)

    def along(self, axis: str) -> int:
        return self.mesh.position(self.number, axis)

    def _join(self, axis: str) -> Transport | Alone:
        """Make the transport of several axes together. All ranks run one program, so all make it here."""
        row = next(row for row in self.mesh.rows(axis) if self.number in row)
        sizes = [self.mesh.size(name) for name in self.mesh.split(axis)]
        if len(row) == max(sizes):  # along the other axes a rank is alone
            alike = self.mesh.split(axis)[sizes.index(len(row))]
            self.transports[axis], self.groups[axis] = self.transports[alike], self.groups[alike]
        else:
            ranks, backend = [self.ranks[number] for number in row], dist.get_backend(next(iter(self.groups.values())))
            if ranks != sorted(ranks):  # as torch numbers the ranks of a group
                problem = f"has the ranks {ranks} along {axis!r}, and a group has them in ascending order"
                raise FzeroError("mesh", problem, "make the mesh with init_device_mesh")
            self.groups[axis] = self.members.new_group(ranks, backend)
            self.transports[axis] = choose_transport(self.groups[axis], self.device.type, self.members)
        return self.transports[axis]

    def broadcast(self, x: Tensor, rank: int, layout: Layout) -> None:
        if layout.world > 1:
            if layout.shard_axis not in self.groups:
                self._join(layout.shard_axis)
            with self.members.begin(f"broadcast of {layout.bucket}"):
                work = dist.broadcast(x, group=self.groups[layout.shard_axis], group_src=rank, async_op=True)
                work.wait(self.members.timeout)

    def settle(self) -> None:
        for transport in self.transports.values():  # an operation may gather state over any axis
            transport.settle()
        super().settle()

    def run(self, call: EagerCall) -> Any:
        made = super().run(call)
        for transport in self.transports.values() if call.operation.moves is not None else ():
            transport.settle()  # the memory of operands may be overwritten afterwards
        return made

    def gather_pieces(self, pieces: Sequence[Tensor], what: str, where: str) -> Tensor:
        meet(self.members, f"{what}: {where}", what=what)
        gathered = self.begin(AllGather(what, self.mesh.shard_axis, load(pieces[0]))).wait()
        self._sharding.settle()
        return gathered


def live(mesh: Any) -> Live:
    """The one `Live` of a `DeviceMesh`. Equal meshes on the same process groups share one `Live`.

    The first call for a mesh makes the `Live`, on all ranks of the mesh together.

    Raises:
        FzeroError: for a mesh without devices, without named axes or without a shard axis, or when another rank of the
            mesh does not come.
    """
    shape, devices = mesh_shape(mesh, has_devices=True), devices_of(mesh)
    shape.shard_axis  # noqa: B018  refused before any process group is made
    groups = tuple(devices.get_group(axis) for axis in shape.names)
    key = mesh_shape(devices), groups, devices.device_type, tuple(devices.mesh.flatten().tolist())
    if key not in _lives:
        _purge_lives()
        _lives[key] = Live(*key)
    return _lives[key].lay_state(shape.state)


def find_ranks(mesh: Any, state: Sequence[str] | None = None) -> Ranks:
    """The one `Ranks` of a mesh, with state along the axes `state`: a `DeviceMesh` has one in each process, and the
    first call is collective.

    Raises:
        FzeroError: as `live` and `VirtualMesh.lay_state` do.
    """
    return (virtual(mesh) if isinstance(mesh, VirtualMesh) else live(mesh)).lay_state(state)


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
