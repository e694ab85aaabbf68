"""The arguments of a program's operations, by name: `LeafMove(*node.args).bucket`.

Nodes have positional arguments. Each class here names those of a family of operations, in order. To change an argument,
write `node.args = tuple(LeafMove(*node.args)._replace(leaf=0))`. `Loop` (`fzero.program.ops.loops`) is one more.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

from fzero.program.operation import Node


class LeafMove(NamedTuple):
    """The arguments of an operation on one leaf: `gather`, `scatter` and `take`. `size` is the shape of the full leaf,
    or the elements of the slice."""

    value: Node
    bucket: str
    leaf: int
    size: Any

    @property
    def key(self) -> tuple[str, int]:
        """The leaf: its bucket, and its index in the bucket's layout."""
        return self.bucket, self.leaf


class BucketMove(NamedTuple):
    """The arguments of an operation that starts to move leaves of a bucket: `all_gather` and `reduce_scatter`."""

    values: Sequence[Node]
    bucket: str
    leaves: Sequence[int]
    numel: int


class BufferView(NamedTuple):
    """The arguments of an operation that takes one leaf of a buffer: `whole` and `part`. `size` is as in `LeafMove`."""

    buffer: Node
    bucket: str
    leaves: Sequence[int]
    position: int
    size: Any


def view_of(node: Node) -> BufferView:
    """What a node names that takes one leaf of a buffer (`Operation.names` "position"). Operations of others may have
    arguments behind these."""
    return BufferView(*node.args[: len(BufferView._fields)])


class Reduction(NamedTuple):
    """The arguments of `all_reduce`, and of `all_reduce_list`, whose `value` is a list."""

    value: Any
    op: str
    axis: str


class Item(NamedTuple):
    """The arguments of a node that takes one of several results (`operator.getitem`)."""

    source: Node
    position: int


def item_of(node: Node) -> Item | None:
    """What a node takes one of several results of, and which; None for any other node."""
    return Item(*node.args) if node.target is operator.getitem else None


def position_of(item: Node) -> int:
    """Which of several results a node takes."""
    return Item(*item.args).position


def items_of(call: Node) -> dict[int, Node]:
    """The nodes that take one of several results of a node: which result -> the last node that takes it."""
    return {position_of(user): user for user in call.users if user.target is operator.getitem}


def call_of(draw: Node) -> tuple[Any, tuple[Any, ...]]:
    """The operation of torch by which a node draws (`Operation.draws`), and the arguments of that operation."""
    _, target, *args = draw.args
    return target, tuple(args)


def bucket_of(node: Node) -> Any:
    """The bucket whose leaves a node names (`Operation.names`)."""
    _, bucket, *_ = node.args
    return bucket


def start_of(wait: Node) -> Node:
    """The node that started what a node waits for: a collective, or copies."""
    start, *_ = wait.args
    return start


def sources_of(start: Node) -> Sequence[Node]:
    """The values that a node starts to copy from one place to another (`Operation.to`), in order."""
    values, *_ = start.args
    return values


def operand_of(node: Node) -> Any:
    """The first operand of a node, a node or a list of nodes: the only one of a view, a copy or a cast."""
    operand, *_ = node.args
    return operand


def name_in(node: Node) -> str | None:
    """The bucket, axis or reduction that a node names in its second argument; None where that is no name."""
    name = node.args[1] if len(node.args) > 1 else None
    return name if isinstance(name, str) else None
