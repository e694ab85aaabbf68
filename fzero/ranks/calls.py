"""Calls: one call of an operation outside of a program, and what ranks compare of it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fzero.base.mesh import VirtualMesh
from fzero.base.torch_private import FakeTensorMode, pytree_leaves
from fzero.files import duplicate, is_alias
from fzero.layout.layout import Layout
from fzero.layout.wires import LayoutTable
from fzero.ranks.performer import Record


class EagerCall(LayoutTable):
    """One call of an operation. In `perform(program, node, rank)` it is the program and the node.

    `args` have tensors in the place of nodes, and a `Layout` in the place of its name in a program.
    """

    def __init__(
        self, operation: Record, mesh: VirtualMesh, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None
    ) -> None:
        self.operation, self.mesh, self.args, self.kwargs = operation, mesh, args, kwargs or {}
        self.target = operation.target

    @cached_property
    def layouts(self) -> dict[Layout, Layout]:  # type: ignore[override]
        return {x: x for x in pytree_leaves(self.args) if isinstance(x, Layout)}

    @cached_property
    def meta(self) -> dict[str, Any]:
        """`{"val": result}`, where the result has no elements."""
        with FakeTensorMode() as mode:
            return {"val": self.operation.fake(*self.map_tensors(mode.from_tensor), **self.kwargs)}

    def describe(self) -> tuple[str, list[str]]:
        """The call in words, and lines for the leaves that it names: what ranks must have alike. The shapes of slices
        differ between ranks."""
        operands, name = pytree_leaves(self.args[:1]), self.operation.name
        if not self.layouts:
            given = [f"{x.dtype} {list(x.shape)}" for x in operands]
            return f"{name}: {given} {self.args[1:]} {dict(self.kwargs)}", []
        layouts, leaves = (x if isinstance(x, (list, tuple)) else [x] for x in self.args[1:3])
        each = zip(layouts, leaves, itertools.cycle(operands))
        lines = [f"leaf {layout.leaves[leaf].path}: {describe_leaf(layout, leaf, x.dtype)}" for layout, leaf, x in each]
        return f"{name} of {len(lines)} leaves", [*lines, f"{name} {self.args[3:]} {dict(self.kwargs)}"]

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> list[Any]:
        """The arguments, with `function` of each tensor among them and in their lists."""
        return _map_tensors(function, self.args)

    def separate(self, made: Any) -> Any:
        """A result, or a list of results, copied where one lies in the memory of an operand."""
        operands = [x for each in self.args for x in (each if isinstance(each, list) else (each,))]
        return _map_tensors(lambda x: copy_alias(x, operands), [made])[0]


def _map_tensors(function: Callable[[Tensor], Tensor], given: Sequence[Any]) -> list[Any]:
    return [
        function(x) if isinstance(x, Tensor) else _map_tensors(function, x) if isinstance(x, list) else x for x in given
    ]


def copy_alias(x: Tensor, operands: Sequence[Any]) -> Tensor:
    """`x`, copied where it lies in the memory of an operand, or in the file of one."""
    return duplicate(x) if any(isinstance(each, Tensor) and is_alias(x, each) for each in operands) else x


def describe_leaf(layout: Layout, leaf: int, dtype: torch.dtype) -> str:
    """What ranks have to know alike of a leaf to communicate about the leaf."""
    at, shape = layout.leaf_ranges[leaf], list(layout.leaves[leaf].shape)
    return f"{dtype} {shape}, [{at.start}:{at.stop}] of bucket {layout.bucket!r} with {layout.shard} elements a rank"
