"""Ranks: who takes part in a mesh, and which of them this process is."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from fzero.base.errors import FzeroError
from fzero.base.mesh import VirtualMesh
from fzero.files import load
from fzero.layout.layout import Layout
from fzero.ranks.agreement import agree, digest, meet
from fzero.ranks.calls import EagerCall
from fzero.ranks.exchanges import Exchange, complete
from fzero.ranks.link import AtOnce, Link
from fzero.ranks.members import Members
from fzero.ranks.performer import MovePerformer, Record
from fzero.ranks.together import write_together
from fzero.ranks.transports import Pending

T = TypeVar("T")
CPU = torch.device("cpu")


class Ranks(MovePerformer, ABC):
    """The ranks of a mesh, as a process outside of a step has them: one rank of a `DeviceMesh` (`Live`), or all ranks
    of a `VirtualMesh` (`Virtual`). Operations are performed at once.

    `ranks` are the global ranks of the mesh, row by row. `members` are the processes that have them. This process is
    at position `rank` along the shard axis, None for all positions. `number` is its first rank, and the first process
    of a mesh has number 0. So code for both asks for no class: alone, agreements are nothing.
    """

    number = 0
    device: torch.device | None = None
    link: Link = AtOnce()
    _purpose: tuple[str, tuple[str, ...]] = "", ()  # that of `specify`

    def __init__(self, mesh: VirtualMesh, ranks: Sequence[int], members: Members) -> None:
        self.mesh, self.ranks, self.members = mesh, ranks, members
        self._laid: dict[VirtualMesh, Any] = {mesh: self}  # by meshes that differ in where state lies; copies share it
        self.readers: list[Callable[[], None]] = []  # each waits until a copy of state, such as a checkpoint's, is made

    @property
    def numbers(self) -> range:
        """The numbers of the ranks that this process has, among all ranks of the mesh, row by row."""
        return range(self.number, self.number + self.mesh.size() // len(self.members.ranks))

    @abstractmethod
    def along(self, axis: str) -> int:
        """The position along an axis of this process's first rank."""

    def choose_device(self, given: torch.device = CPU) -> torch.device:
        """The device of the mesh; on virtual ranks the `given` one, such as a tensor's own."""
        return self.device or given

    def lay_state(self, axes: Sequence[str] | None) -> Self:
        """The same ranks, with state along these axes of the mesh; for None these."""
        mesh = self.mesh.lay_state(axes)
        if mesh not in self._laid:
            self._laid[mesh] = copy.copy(self)
            self._laid[mesh]._lie_on(mesh)
        return self if axes is None else self._laid[mesh]

    def _lie_on(self, mesh: VirtualMesh) -> None:
        self.mesh = mesh

    def follow(self, on: MovePerformer) -> Self:
        """The same ranks, with state where `on` has it. These, where `on` is not of the same ranks."""
        return self._laid[on.mesh] if on in self._laid.values() else self

    def row(self, rank: int, axis: str) -> list[int]:
        """The global ranks in line with global rank `rank` along an axis."""
        number = self.ranks.index(rank)
        return next([self.ranks[i] for i in row] for row in self.mesh.rows(axis) if number in row)

    def settle(self) -> None:
        """Wait until nothing reads this process's state: no other rank, and none of `readers`. Call before memory of
        state is overwritten."""
        while self.readers:
            self.readers.pop()()

    # what ranks do together

    def specify(self, what: str, details: Sequence[str]) -> Self:
        if self.members.is_alone:
            return self
        purposeful = copy.copy(self)
        purposeful._purpose = f"{what}: ", tuple(details)
        return purposeful

    def count_agreements(self) -> int:
        return self.members.agreements

    def agree(self, what: str, details: Sequence[str] = ()) -> None:
        """Return once all ranks of the mesh are about to communicate about `what`, outside of a step.

        Raises:
            FzeroError: on all ranks, when one is about to do something else.
        """
        if self.members.is_alone:
            return
        for_what, more = self._purpose
        lines = [f"collective {for_what}{what}", *details, *more]
        agree(self.members, digest(lines), lambda: lines, what=f"agreement before {what}")

    def find_largest(self, number: int, what: str) -> int:
        """The largest of the numbers that all ranks of the mesh give, outside of a step. One all-reduce of 24 bytes on
        the host, which errors call the agreement on `what`."""
        return meet(self.members, what, number, f"the agreement on {what}")

    def is_equal(self, number: int, what: str) -> bool:
        """Whether all ranks of the mesh give one number, outside of a step. Costs what `find_largest` does, twice."""
        return not self.find_largest(int(number != self.find_largest(number, what)), what)

    def do_together(self, do: Callable[[], T], call: str) -> T:
        return write_together(self.members, do, call)

    @abstractmethod
    def gather_pieces(self, pieces: Sequence[Tensor], what: str, where: str) -> Tensor:
        """[N * S] bytes: pieces of equal sizes of all ranks along the shard axis, of which this process has some.
        Ranks agree on `where`, and errors call the collective `what`."""

    @abstractmethod
    def broadcast(self, x: Tensor, rank: int, layout: Layout) -> None:
        """Overwrite `x`, elements of a bucket, with `x` of the rank at position `rank` along the shard axis."""

    # operations

    def perform(self, operation: Record, *args: Any, **kwargs: Any) -> Any:
        if operation.moves is not None and not self.members.is_alone:
            self.agree(*EagerCall(operation, self.mesh, args, kwargs).describe())
        return self.perform_agreed(operation, *args, **kwargs)

    def perform_agreed(self, operation: Record, *args: Any, **kwargs: Any) -> Any:
        """`perform`, once all ranks have agreed on the call."""
        call = EagerCall(operation, self.mesh, args, kwargs)
        return call.separate(self.run(call))

    def run(self, call: EagerCall) -> Any:
        """The result of a call, which may lie in the memory of an operand."""
        operation = call.operation
        if operation.perform is None:
            return operation.fake(*call.args, **call.kwargs)
        function = operation.perform(call, call, self)
        if operation.moves is None:
            return function(*call.args, **call.kwargs)
        args = call.map_tensors(lambda x: load(x).to(self.choose_device(x.device)))
        return complete(function(*args, **call.kwargs), None, self.begin)

    @abstractmethod
    def begin(self, exchange: Exchange) -> Pending:
        """Start an exchange."""


def check_rank(where: str, rank: int | None, ranks: Sequence[int]) -> None:
    """Refuse a global rank that is not among those of a mesh. None is no rank."""
    if rank is not None and rank not in ranks:
        raise FzeroError(where, f"is {rank}, the mesh has ranks {list(ranks)}", "name one of them")
