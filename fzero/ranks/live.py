"""Live: the rank of this process in a torch `DeviceMesh`. Moves communicate at once, and programs run here."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fzero.base.errors import FzeroError
from fzero.base.mesh import VirtualMesh, mesh_shape
from fzero.files import load
from fzero.layout import buffers
from fzero.layout.layout import Layout, wire
from fzero.layout.owners import Places
from fzero.optim.newton_schulz import Blocks, NewtonSchulz
from fzero.ranks.agreement import agree, digest, meet
from fzero.ranks.exchanges import AllReduce, Exchange, average_leaves, complete, gather_leaves
from fzero.ranks.link import link_of
from fzero.ranks.members import Members
from fzero.ranks.owners import orthogonalize_leaves
from fzero.ranks.together import write_together
from fzero.ranks.transports import Pending, Transport, choose_transport

T = TypeVar("T")


class Live:
    """The rank of this process in a mesh, with a transport for each axis. A `MovePerformer`.

    `live` makes a `Live`, on all `ranks` of the mesh together. `groups` are the process groups of the axes, and tensors
    are on `device_type`.
    """

    is_tracing = False
    writes = 0
    _purpose: tuple[str, tuple[str, ...]] = "", ()  # that of `specify`

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
        self.rank, self.link = self._sharding.rank, link_of(self.device)
        self.readers: list[Callable[[], None]] = []  # each waits until a copy of state, such as a checkpoint's, is made
        self.number = 0  # among all ranks of the mesh, row by row
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
        """This rank's position along an axis."""
        return self.transports[axis].rank

    def broadcast(self, x: Tensor, rank: int, layout: Layout) -> None:
        """Overwrite `x`, elements of a bucket, with `x` of the rank at position `rank` along the shard axis."""
        if self.mesh.size(self.mesh.shard_axis) > 1:
            with self.members.begin(f"broadcast of {layout.bucket}"):
                work = dist.broadcast(x, group=self.groups[self.mesh.shard_axis], group_src=rank, async_op=True)
                work.wait(self.members.timeout)

    def row(self, rank: int) -> list[int]:
        """The global ranks in line with global rank `rank` along the shard axis. They hold one copy of all state."""
        number, axes = self.ranks.index(rank), [name for name in self.mesh.names if name != self.mesh.shard_axis]
        position = [self.mesh.position(number, axis) for axis in axes]
        others = ([self.mesh.position(other, axis) for axis in axes] for other in range(len(self.ranks)))
        return [rank for rank, where in zip(self.ranks, others) if where == position]

    def settle(self) -> None:
        """Wait until nothing reads this rank's state: no other rank, and none of `readers`. Call before memory of state
        is overwritten."""
        self._sharding.settle()
        while self.readers:
            self.readers.pop()()

    def specify(self, what: str, details: Sequence[str]) -> Live:
        purposeful = copy.copy(self)
        purposeful._purpose = f"{what}: ", tuple(details)
        return purposeful

    def count_agreements(self) -> int:
        return self.members.agreements

    def varies(self, x: Tensor) -> bool:
        return False

    def may_write(self, x: Tensor) -> bool:
        return False

    def note_result(self, x: Tensor, full: Tensor, result: Any) -> None:
        pass

    def note_write(self) -> None:
        raise NotImplementedError  # nothing may write

    def note_reduce_dtype(self, path: str, dtype: torch.dtype) -> None:
        pass

    def agree(self, what: str, details: Sequence[str] = ()) -> None:
        """Return once all ranks of the mesh are about to communicate about `what`, outside of a step.

        Raises:
            FzeroError: on all ranks, when one is about to do something else.
        """
        for_what, more = self._purpose
        lines = [f"collective {for_what}{what}", *details, *more]
        agree(self.members, digest(lines), lambda: lines, what=f"agreement before {what}")

    def find_largest(self, number: int, what: str) -> int:
        """The largest of the numbers that all ranks of the mesh give, outside of a step. One all-reduce of 24 bytes on
        the host, which errors call the agreement on `what`."""
        return meet(self.members, what, number, f"the agreement on {what}")

    def gather(self, x: Tensor, layout: Layout, leaf: int) -> Tensor:
        self.agree(f"all_gather of {layout.leaves[leaf].path}: {describe_leaf(layout, leaf, x.dtype)}")
        return self.gather_agreed(x, layout, leaf)

    def gather_agreed(self, x: Tensor, layout: Layout, leaf: int) -> Tensor:
        """`gather`, once all ranks have agreed on it."""
        along, x = wire(layout, (leaf,)), load(x).to(self.device)  # from the host or disk where the value lies there
        buffer = complete(gather_leaves([x], along, self.rank, self.mesh.shard_axis), None, self.begin)
        self.settle()
        full = buffers.join_leaf(buffer, along, 0, layout.leaves[leaf].shape)
        return full.clone() if layout.world == 1 else full  # one rank gathers a view of its slice

    def scatter(self, x: Tensor, layout: Layout, leaf: int) -> Tensor:
        self.agree(f"reduce_scatter of {layout.leaves[leaf].path}: {describe_leaf(layout, leaf, x.dtype)}")
        along = wire(layout, (leaf,))
        return buffers.slice_of(complete(average_leaves([x], along), None, self.begin), along, self.rank, 0)

    def take(self, x: Tensor, layout: Layout, leaf: int) -> Tensor:
        part = layout.part(leaf, self.rank)
        return x.reshape(-1)[part.start : part.stop].clone()

    def beside(self, x: Tensor) -> Tensor:
        return x.clone()

    def spread(self, x: Tensor, like: Tensor) -> Tensor:
        return like.new_empty(like.shape, dtype=x.dtype).copy_(x)

    def all_reduce(self, x: Tensor, op: str, axis: str, leaf: str = "") -> Tensor:
        self.agree(f"all_reduce over {axis}: {op} of {x.dtype} {list(x.shape)} {leaf}")
        return self.begin(AllReduce(f"all_reduce over {axis}", axis, x, op)).wait()

    def axis_index(self, axis: str, device: torch.device) -> Tensor:
        return torch.full((), self.along(axis), device=device)  # not torch.tensor, which a CUDA graph cannot capture

    def orthogonalize(self, slices: list[Tensor], places: Places, blocks: Blocks, how: NewtonSchulz) -> list[Tensor]:
        lines = [f"{describe_leaf(*place, x.dtype)} as {list(row)}" for place, x, row in zip(places, slices, blocks)]
        self.agree(f"orthogonalize {len(slices)} leaves by {how}", lines)
        steps = orthogonalize_leaves(slices, places, self.rank, self.mesh.shard_axis, blocks, how)
        return complete(steps, None, self.begin)

    def do_together(self, do: Callable[[], T], call: str) -> T:
        return write_together(self.members, do, call)


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
    shape = mesh_shape(mesh)
    if isinstance(mesh, VirtualMesh):
        raise FzeroError("mesh", f"{mesh} has names and sizes but no devices", "give a DeviceMesh")
    shape.shard_axis  # noqa: B018  refused before any process group is made
    groups = tuple(mesh.get_group(axis) for axis in shape.names)
    key = shape, groups, mesh.device_type, tuple(mesh.mesh.flatten().tolist())
    if key not in _lives:
        _purge_lives()
        _lives[key] = Live(*key)
    return _lives[key]


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
