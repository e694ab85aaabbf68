"""Copies between the memory of the device and that of the host. The `offload` pass emits them.

    to_host, arrive     device -> host   start copies, and wait for them
    to_device, arrive   host -> device   likewise
    to_device_, arrive  host -> device   likewise, over values that lie on the device; the `donate` pass emits these

A value that is on its way may be read where the copies start from, and not overwritten there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fzero.program.kinds import Kind
from fzero.program.listing import format_size
from fzero.program.operation import NO_WORK, Node, Operation, nbytes, values_of
from fzero.program.records import register

if TYPE_CHECKING:
    from fzero.program.inference import Walk
    from fzero.program.memory import Allocator
    from fzero.program.program import Program
    from fzero.ranks.exchanges import Rank


def to_host(values: Sequence[Tensor]) -> list[Tensor]:
    """Start to copy these values into the memory of the host."""
    return [torch.empty_like(x, memory_format=torch.preserve_format) for x in values]


def to_device(values: Sequence[Tensor]) -> list[Tensor]:
    """Start to copy these values into the memory of the device."""
    return [torch.empty_like(x, memory_format=torch.preserve_format) for x in values]


def to_device_(values: Sequence[Tensor], into: Sequence[Tensor]) -> None:
    """Start to copy these values over the values `into`, which lie on the device. What reads those has ended: they
    were copied to the host since, and the copies have arrived."""


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


def _to_host(program: Program, node: Node, rank: Rank) -> Callable[..., Any]:
    return rank.link.to_host


def _to_device(program: Program, node: Node, rank: Rank) -> Callable[..., Any]:
    return rank.link.to_device


def _arrive(program: Program, node: Node, rank: Rank) -> Callable[..., Any]:
    return lambda started, sending=(): rank.link.arrive(started)


def count_bytes(node: Node) -> int:
    """The bytes that a transfer moves, of the rank whose slices the graph shows."""
    return nbytes(values_of(node.args[0]))


def _line(program: Program, node: Node) -> str:
    values = f"{len(node.args[0])} values"
    return f"{node.target.__name__.rstrip('_'):<15} {values:<24} {format_size(count_bytes(node)):>10}"


def _define(target: Callable[..., Any], to: Any, perform: Any, **known: Any) -> Any:
    """Register an operation that starts copies to the host or to the device."""
    name = target.__name__
    return register(
        Operation(
            name=name,
            target=target,
            fake=target,
            kind=_kinds,
            to=to,
            perform=perform,
            memory=_place_copies,
            work=lambda node: NO_WORK,
            label=lambda program, node: f"{name} {len(node.args[0])} values",
            line=_line,
            **known,
        )
    )


_define(to_host, "host", _to_host, is_derived=True)
_define(to_device, "device", _to_device)
_define(to_device_, "device", _to_device, writes=lambda node: list(node.args[1]))
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
