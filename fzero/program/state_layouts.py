"""State that passes add to a step: how it lies over the ranks, and what kind its values are.

    like=leaf                    each rank's slice of the leaf, as its parameter lies
    a shape                      equal parts of the flattened shape, one a rank along the shard axis
    a shape, replicated          the same on every rank
    differs=("replica",)         slices, of which ranks along replica have their own
    differs=("replica", "fsdp")  a whole value, of which every rank has its own

State that differs along an axis is stored as a leaf with one more dim, split over that axis. So a checkpoint has the
values of all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from fzero.base.errors import FzeroError
from fzero.layout.layout import ALIGN, Layout, Leaf
from fzero.layout.splits import Split
from fzero.program.kinds import Kind, Slice
from fzero.program.operation import Node
from fzero.program.records import record

if TYPE_CHECKING:
    from fzero.program.program import Program

IN_A_TURN = (
    "is given state by a pass, and its turns keep none: they are microbatches or tiles",
    "let fzero.accumulate(..., sync='once') scatter behind its loop, or add state where program.is_body is false",
)
"""The problem of a pass that adds state to the body of a loop of `fzero.accumulate`, and the way out."""
STEP_COUNT = "passes.step_count"
"""The path of the state that `Program.step_count` adds."""
Initial = float | Callable[[tuple[int, ...], torch.Generator], Tensor]


@dataclass(frozen=True)
class PassState:
    """State that a pass added to a step, such as an error-feedback buffer or a second copy of parameters.

    `path` is its name for the user, who holds and saves the state. `bucket` and `leaf` name its layout. Before the
    first step every element is `initial`, or the value is `initial(shape, generator)`, which every rank draws alike.
    """

    path: str
    bucket: str
    leaf: int
    dtype: torch.dtype
    initial: Initial
    shape: tuple[int, ...] = ()


class Lying(NamedTuple):
    """How state lies: its layout and leaf, the shape of one value, that of what one rank has, the dtype of the leaf
    that the state is like, and the kind of the value where the layout does not say it."""

    layout: Layout
    leaf: int
    shape: tuple[int, ...]
    local: tuple[int, ...]
    dtype: torch.dtype
    own: Kind | None = None


def lay_out_state(
    program: Program,
    path: str,
    shape: Sequence[int] | None,
    like: str | Node | None,
    replicated: bool,
    differs: tuple[str, ...],
) -> Lying:
    """How a pass's state lies.

    Raises:
        FzeroError: for both `shape` and `like`, or none; for a `like` that is no leaf; for `differs` with
            `replicated`, with an axis that the mesh lacks, or beside a leaf that is split over other axes.
    """
    if (shape is None) == (like is None):
        raise FzeroError(path, f"has shape={shape} and like={like}", "give a state's shape, or a leaf that it is like")
    for axis in differs:
        if not program.mesh.has(axis):
            raise FzeroError(
                path, f"differs along {axis!r}, and this mesh has {program.mesh.names}", "name one of these"
            )
    differs = tuple(name for axis in differs for name in program.mesh.split(axis))
    if differs and replicated:
        raise FzeroError(path, f"is replicated, and differs along {differs}", "leave one of both out")
    bucket, index, dtype = (path, 0, torch.float32) if like is None else _find_leaf(program, path, like)
    leaf = Leaf(path, tuple(shape)) if shape is not None else program.layouts[bucket].leaves[index]
    if along := set(program.mesh.shard_axes).intersection(differs):
        if missing := set(program.mesh.shard_axes) - along:
            problem = f"differs along {differs}, and state lies along {program.mesh.shard_axis!r}"
            raise FzeroError(path, problem, f"add {', '.join(sorted(missing))} to them, or leave all of these out")
        return _lay_out_whole(program, path, leaf, differs, dtype)
    layout = program.layouts[bucket] if like is not None else Layout(path, (leaf,), program.mesh, replicated=replicated)
    if replicated and not layout.replicated:
        raise FzeroError(path, "is replicated, and like a leaf that ranks have slices of", "give its shape")
    if differs:
        if layout.replicated or layout.splits > 1:
            problem = f"differs along {differs}, like {leaf.path!r}, which ranks have {'parts' * (layout.splits > 1)}"
            raise FzeroError(path, problem, "give a shape")
        layout = _split_over(layout, program.mesh.join(differs))
    local = leaf.shape if layout.replicated else (len(layout.part(index, 0)),)
    own = Slice(bucket if like is not None else layout.bucket, index, frozenset(differs)) if differs else None
    return Lying(layout, index, leaf.shape, local, dtype, own)


def _split_over(layout: Layout, axis: str) -> Layout:
    """The layout of the same slices, of which ranks along `axis` have their own."""
    split = Split(axis, 0)
    leaves = tuple(replace(leaf, shape=(1, *leaf.shape), split=split) for leaf in layout.leaves)
    return replace(layout, bucket=f"{layout.bucket} along {axis}", leaves=leaves)


def _lay_out_whole(program: Program, path: str, leaf: Leaf, differs: tuple[str, ...], dtype: torch.dtype) -> Lying:
    """A whole value for each rank along `differs`, flat: a row of its own in a leaf whose rows no boundary cuts."""
    mesh = program.mesh
    others = [axis for axis in differs if axis not in mesh.shard_axes]
    rows = (mesh.size(mesh.shard_axis), *leaf.shape)
    split = Split(mesh.join(others), 0) if others else None
    numel = math.prod(leaf.shape)
    is_aligned = numel % ALIGN == 0  # then rows are slices of any layout, as that of a tree of shapes
    row = Leaf(path, (1, *rows) if others else rows, 1 if is_aligned else max(1, numel), split=split)
    layout = Layout(path, (row,), mesh, align=ALIGN if is_aligned else 1)
    return Lying(layout, 0, leaf.shape, (numel,), dtype, frozenset(differs))


def _find_leaf(program: Program, path: str, like: str | Node) -> tuple[str, int, torch.dtype]:
    """`(bucket, leaf, dtype)` of a leaf's path, of an argument that is state, or of a node that names one leaf."""
    given = [pair for pair in zip(program.placeholders, program.arguments) if pair[1].bucket is not None]
    if not isinstance(like, str) and like.op == "call_function" and record(like).names == "leaf":
        _, bucket, leaf, *_ = like.args
        return bucket, leaf, like.meta["val"].dtype
    found = dict[tuple[str, int], torch.dtype]()
    for node, argument in given:
        if node is like or (isinstance(like, str) and like in (argument.path, program.path_of(argument))):
            found.setdefault((str(argument.bucket), argument.leaf), node.meta["val"].dtype)
    if len(found) != 1:
        leaves = ", ".join(dict.fromkeys(program.path_of(argument) for _, argument in given))
        problem = f"is like {str(like)!r}, which {'several buckets have' if found else 'is no leaf of the step'}"
        way_out = f"give a leaf's path, the node of its argument, or its gather or scatter; leaves are {leaves:.200}"
        raise FzeroError(path, problem, way_out)
    (((bucket, leaf), dtype),) = found.items()
    return bucket, leaf, dtype
