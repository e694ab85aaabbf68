"""Exchange: which rank sends which elements of a leaf to which rank, and this rank's share of the sending.

    leaf              |- - - - - - - - - - - -|
    rank 1 has        |- - - - - - - - - - - -|
    ranks keep        |---- 0 ----|---- 1 ----|
    messages           1 sends to 0, 1 copies

`find_owners` and `plan` compute with integers only and return the same lists on every rank. `perform` sends and
receives over the host process group of a mesh; tensors on other devices, or on a disk, are staged in host memory. No
rank receives an element that it does not want.

A number precedes the values of each message: 0, or minus the length of an error's text, which then replaces the values.
So a rank that waits for values raises with the text of the sender's error.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fzero.base.errors import FzeroError
from fzero.files import OnDisk, load
from fzero.layout.chunks import overlaps
from fzero.layout.layout import Layout
from fzero.layout.ranges import intersect
from fzero.ranks.members import TAG
from fzero.ranks.ranks import Ranks

NUMBERS, VALUES = TAG + 1, TAG + 2
"""Tags of a message's number and of its values. gloo keeps the order of messages of one tag only."""


class Part(NamedTuple):
    """Elements of a flattened leaf that a global rank has or wants."""

    rank: int
    elements: range


class Message(NamedTuple):
    """Elements of a flattened leaf that one global rank sends to another, or copies when both are the same."""

    sender: int
    receiver: int
    elements: range


class Stretch(NamedTuple):
    """Values of a flattened leaf, 1-d, from element `start` on."""

    start: int
    values: Tensor

    def at(self, elements: range) -> Tensor:
        """A view of the values of these elements."""
        return self.values[elements.start - self.start : elements.stop - self.start]

    def put(self, elements: range, values: Tensor) -> None:
        """Copy values over those of these elements. On a disk that fails `files.check_writes` raises, and not the
        copy: a rank that raised between two messages would leave the others waiting."""
        here = self.at(elements)
        try:
            here.copy_(values)
        except FzeroError:
            if not isinstance(here, OnDisk):
                raise


NOTHING = Stretch(0, torch.empty(0, device="cpu"))


def ranks_by_position(layout: Layout, ranks: Sequence[int], split: int = 0) -> list[list[int]]:
    """The global ranks at each position of the shard axis, one for each copy of the part of leaves that ranks at the
    position `split` of the split axes have. `ranks` lists the global ranks of the mesh row by row."""
    mesh, found = layout.mesh, list[list[int]]([] for _ in range(layout.world))
    for number, rank in enumerate(ranks):
        if not layout.split_axis or mesh.position(number, layout.split_axis) == split:
            found[mesh.position(number, layout.shard_axis)].append(rank)
    return found


def find_owners(layout: Layout, leaf: int, piece: range, ranks: Sequence[Sequence[int]]) -> list[Part]:
    """The elements of `piece`, a range of a flattened leaf, that each rank keeps. `ranks[i]` are the global ranks at
    position i of the shard axis: all of them, as `ranks_by_position` returns, or those of one copy of the state."""
    return [
        Part(rank, overlap.source)
        for overlap in overlaps(layout, leaf, piece)
        if overlap.rank is not None
        for rank in ranks[overlap.rank]
    ]


def plan(have: Sequence[Part], want: Sequence[Part]) -> list[Message]:
    """The messages that bring each part of `want` to its rank. `have` contains each element once.

    plan([Part(1, range(10))], [Part(0, range(5)), Part(1, range(5, 10))])
    [Message(1, 0, range(0, 5)), Message(1, 1, range(5, 10))]
    """
    return [
        Message(sender, receiver, elements)
        for receiver, wanted in want
        for sender, held in have
        if (elements := intersect(held, wanted))
    ]


def perform(
    on: Ranks, what: str, messages: Iterable[Message], have: Stretch = NOTHING, room: Stretch = NOTHING
) -> None:
    """Send this rank's messages from `have` and write those for this rank into `room`. Collective: every sender and
    every receiver of `messages` calls `perform` with the same messages.

    Raises:
        FzeroError: when a sender reported an error, with the error's text; when a rank is lost or does not come within
            torch's timeout, naming the rank and `what`.
    """
    me, group, timeout = on.ranks[on.number], on.members.group, on.members.timeout
    sends: list[tuple[Any, Tensor]] = []
    numbers: list[tuple[Any, Message, Tensor]] = []
    arrivals: list[tuple[Any, range, Tensor]] = []
    errors: list[FzeroError] = []
    with on.members.begin(what):
        for message in messages:
            if message.sender == message.receiver == me:
                room.put(message.elements, have.at(message.elements))
            elif message.sender == me:
                sends += _send(on, message.receiver, 0, have.at(message.elements))
            elif message.receiver == me:
                number = torch.zeros((), dtype=torch.int64, device="cpu")
                numbers.append((dist.irecv(number, message.sender, group, NUMBERS), message, number))
        for work, message, number in numbers:
            work.wait(timeout)
            if number < 0:
                errors.append(_receive_error(on, message.sender, -int(number)))
            elif message.elements:
                here = room.at(message.elements)
                is_host = here.is_cpu and not isinstance(here, OnDisk)
                stage = here if is_host else torch.empty(here.shape, dtype=here.dtype, device="cpu")
                staged = range(0) if is_host else message.elements
                arrivals.append((dist.irecv(stage, message.sender, group, VALUES), staged, stage))
        for work, staged, stage in arrivals:
            work.wait(timeout)
            if staged:
                room.put(staged, stage)
        for work, _ in sends:
            work.wait(timeout)
    if errors:  # raised last, so that no other sender waits for this rank
        raise errors[0]


def report(on: Ranks, what: str, error: Exception, ranks: Iterable[int]) -> None:
    """Send the text of `error` to `ranks`, in place of the one message that each expects next from this rank."""
    text = f"{type(error).__name__}: {error}".encode()
    with on.members.begin(what):
        sends = [
            send
            for rank in ranks
            for send in _send(on, rank, -len(text), torch.frombuffer(bytearray(text), dtype=torch.uint8))
        ]
        for work, _ in sends:
            work.wait(on.members.timeout)


def _send(on: Ranks, rank: int, number: int, values: Tensor) -> list[tuple[Any, Tensor]]:
    """Start sending a message. Returns each send with its tensor, which must live until the send ends."""
    head, group = torch.tensor(number, device="cpu"), on.members.group
    sends = [(dist.isend(head, rank, group, NUMBERS), head)]
    if values.numel():
        stage = load(values.detach()).cpu().contiguous()
        sends.append((dist.isend(stage, rank, group, VALUES), stage))
    return sends


def _receive_error(on: Ranks, rank: int, nbytes: int) -> FzeroError:
    text = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
    received: Any = dist.irecv(text, rank, on.members.group, VALUES)
    received.wait(on.members.timeout)
    return FzeroError(f"rank {rank}", f"could not read its values: {bytes(text.tolist()).decode()}")
