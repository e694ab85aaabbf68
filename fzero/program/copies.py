"""Copies: the bytes that a step copies between device, host and disk, from its graph, before anything runs."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from fzero.program.arguments import sources_of
from fzero.program.memory import Allocator
from fzero.program.records import body_of, record, turns_of

if TYPE_CHECKING:
    from fzero.program.program import Program


def count_copies(program: Program, rank: int = 0) -> Counter[str]:
    """Operation -> the bytes that a rank copies by it in a step: "read" and "write" for a disk, "to_host" and
    "to_device" for the device. `rank` is a position along the shard axis."""
    allocator, total = Allocator(program, [rank]), Counter[str]()
    for node in program.graph.nodes:
        body = body_of(node)
        if body is not None:
            inside = count_copies(body, rank)
            total.update({name: turns_of(node) * nbytes for name, nbytes in inside.items()})
        elif node.op == "call_function" and record(node).to is not None:
            total[record(node).name.rstrip("_")] += sum(int(allocator.bytes_of(x)) for x in sources_of(node))
    return total
