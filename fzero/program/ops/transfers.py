"""Copies between a disk, the memory of the host and that of the device. The `offload` pass emits them.

    to_host, arrive     device -> host   start copies, and wait for them
    to_device, arrive   host -> device   likewise
    to_device_, arrive  host -> device   likewise, over values that lie on the device
    read, arrive        disk -> host     likewise
    write, arrive       host -> disk     likewise, into new extents of files
    write_, arrive      host -> disk     likewise, over extents that lie on the disk

The `donate` pass emits what writes over values. A value that is on its way may be read where the copies start from, and
not overwritten there.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fzero import files
from fzero.base.placement import Disk
from fzero.base.sizes import format_size
from fzero.program.fakes import copy_form
from fzero.program.kinds import Kind
from fzero.program.operation import NO_WORK, Node, Operation, nbytes, values_of
from fzero.program.records import is_call, record, register

if TYPE_CHECKING:
    from fzero.program.inference import Walk
    from fzero.program.memory import Allocator
    from fzero.program.program import Program
    from fzero.ranks.exchanges import Rank


def to_host(values: Sequence[Tensor]) -> list[Tensor]:
    """Start to copy these values into the memory of the host."""
    return [copy_form(x) for x in values]


def to_device(values: Sequence[Tensor]) -> list[Tensor]:
    """Start to copy these values into the memory of the device."""
    return [copy_form(x) for x in values]


def to_device_(values: Sequence[Tensor], into: Sequence[Tensor]) -> None:
    """Start to copy these values over the values `into`, which lie on the device. What reads those has ended: they
    were copied to the host since, and the copies have arrived."""


def read(values: Sequence[Tensor]) -> list[Tensor]:
    """Start to read these values from files into the memory of the host."""
    return [copy_form(x, torch.contiguous_format) for x in values]


def write(values: Sequence[Tensor], path: str, bucket: str) -> list[Tensor]:
    """Start to write these values, of a bucket, into files below a folder."""
    return [copy_form(x, torch.contiguous_format) for x in values]


def write_(values: Sequence[Tensor], into: Sequence[Tensor]) -> None:
    """Start to write these values over the values `into`, which lie in files. Reads of those that started before get
    what was there before."""


def arrive(started: Any, sending: Sequence[Tensor] = ()) -> Any:
    """The copies, once they are there. What is `sending` lives until then: without it the values that are copied may
    die as soon as the copies have started."""
    return started


def _kinds(walk: Walk, node: Node) -> list[Kind]:
    return [walk.of(x) for x in node.args[0]]


def _place_copies(allocator: Allocator, node: Node) -> tuple[Any, ...]:
    """New memory for each copy, with as many elements on each rank as what is copied."""
    if node.meta["val"] is None:
        return (None,)
    return ([allocator.place((node, i), x.meta["val"], allocator.at(x).counts) for i, x in enumerate(node.args[0])],)


def _write_to_files(allocator: Allocator, node: Node) -> tuple[Any, ...]:
    """New extents where the node makes some. What is written stays in memory until it has arrived."""
    return (*_place_copies(allocator, node), *allocator.keys_of(node.args[0]))


def _to_host(program: Program, node: Node, rank: Rank) -> Callable[..., Any]:
    return rank.link.to_host


def _to_device(program: Program, node: Node, rank: Rank) -> Callable[..., Any]:
    return rank.link.to_device


def _read(program: Program, node: Node, rank: Rank) -> Callable[..., Any]:
    return files.read


def _write(program: Program, node: Node, rank: Rank) -> Callable[..., Any]:
    place, bucket = Disk(Path(node.args[1])), node.args[2]

    def start(values: Sequence[Tensor], *_: str) -> files.Started:
        new = [files.allocate(place, x.dtype, x.numel(), rank.rank, bucket, bucket) for x in values]
        return files.write([x.contiguous() for x in values], new)

    return start


def _write_over(program: Program, node: Node, rank: Rank) -> Callable[..., Any]:
    return lambda values, into: files.write([x.contiguous() for x in values], into)


def _arrive(program: Program, node: Node, rank: Rank) -> Callable[..., Any]:
    start = record(node.args[0])
    if "disk" in (start.source, start.to):
        return files.Started.wait
    return lambda started, sending=(): rank.link.arrive(started, is_read=not sending)


def count_bytes(node: Node) -> int:
    """The bytes that a transfer moves, of the rank whose slices the graph shows."""
    return nbytes(values_of(node.args[0]))


def copy_of(node: Node) -> Node | None:
    """The start of the copies of which a node's value is one; None for any other node."""
    is_item = is_call(node, operator.getitem) and is_call(node.args[0], arrive)
    return node.args[0].args[0] if is_item else None


def is_of_saved_value(node: Node) -> bool:
    """Whether a node starts to copy a saved value, waits for that, or is the copy. The wait keeps alive what is
    copied."""
    start = node if record(node).to is not None else node.args[0] if is_call(node, arrive) else copy_of(node)
    return start is not None and any(len(wait.args) > 1 for wait in start.users)


def _line(program: Program, node: Node) -> str:
    values = f"{len(node.args[0])} values"
    return f"{node.target.__name__.rstrip('_'):<15} {values:<24} {format_size(count_bytes(node)):>10}"


def _define(target: Callable[..., Any], source: Any, to: Any, perform: Any, **known: Any) -> Any:
    """Register an operation that starts copies from a place to another."""
    name = target.__name__
    known = {"memory": _place_copies} | known
    return register(
        Operation(
            name=name,
            target=target,
            fake=target,
            kind=_kinds,
            source=source,
            to=to,
            perform=perform,
            work=lambda node: NO_WORK,
            label=lambda program, node: f"{name} {len(node.args[0])} values",
            line=_line,
            **known,
        )
    )


_define(to_host, "device", "host", _to_host, is_derived=True)
_define(to_device, "host", "device", _to_device)
_define(to_device_, "host", "device", _to_device, writes=lambda node: list(node.args[1]))
_define(read, "disk", "host", _read)
_define(write, "host", "disk", _write, memory=_write_to_files)
_define(write_, "host", "disk", _write_over, memory=_write_to_files, writes=lambda node: list(node.args[1]))
COPIES = {(record(each).source, record(each).to): each for each in (to_host, to_device, read, write)}
"""Where copies come from, and where they go -> the operation."""
OVERWRITING = {to_device: to_device_, write: write_}
"""An operation that makes new copies -> the one that writes over values."""
register(
    Operation(
        name="arrive",
        target=arrive,
        fake=arrive,
        kind=lambda walk, node: walk.of(node.args[0]),
        arrives=True,
        shares=lambda node: True,
        memory=lambda allocator, node: (allocator.at(node.args[0]),),
        perform=_arrive,
        work=lambda node: NO_WORK,
        is_quiet=True,
    )
)
