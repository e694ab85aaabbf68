"""Placement: a full tree to a tree of `Sharded` leaves on a mesh, and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fzero import tree
from fzero.errors import FzeroError
from fzero.layout import Layout, Leaf
from fzero.live import Live, live
from fzero.mesh import VirtualMesh
from fzero.sharded import Sharded, is_sharded

Buckets = Callable[[str], str | None]


def partition(params: tree.Tree, mesh: Any, *, layers: Buckets | None = None) -> tree.Tree:
    """`params` with each tensor replaced by this rank's `Sharded` part of it, on the mesh's device.

    `unpartition(partition(params, mesh)) == params`. Leaves are grouped into buckets, each gathered and scattered as
    one: an element of the outermost list (or tuple) on a leaf's path, else the top-level entry, is a bucket.
    `layers(path)` may name another bucket for a leaf, or return None to keep that rule. Every rank gives the same
    values. The tensors of `params` are copied, never aliased.

    Raises:
        FzeroError: for a leaf that is no tensor, or is partitioned already.
    """
    leaves, treedef = tree.flatten(params)
    keys = tree.keys(treedef)
    _check(keys, leaves)
    on = live(mesh)
    values: list[Any] = [None] * len(leaves)
    for layout, members in layouts(keys, leaves, on.mesh, layers):
        for index, (position, value) in enumerate(zip(members, place([leaves[i] for i in members], layout, on))):
            values[position] = Sharded(value, layout, index, on)
    return tree.unflatten(treedef, values)


def layouts(
    keys: list[tuple[str | int, ...]], leaves: list[Tensor], mesh: VirtualMesh, layers: Buckets | None = None
) -> list[tuple[Layout, list[int]]]:
    """The buckets of a tree, one a layer and dtype: `(layout, positions of its leaves)`. Reads shapes and dtypes."""
    groups: dict[tuple[str, torch.dtype], list[int]] = {}
    for position, (key, leaf) in enumerate(zip(keys, leaves)):
        named = layers(tree.dotted(key)) if layers else None
        groups.setdefault((bucket_of(key) if named is None else named, leaf.dtype), []).append(position)
    names = [name for name, _ in groups]
    return [
        (
            Layout(
                name if names.count(name) == 1 else f"{name}:{str(dtype).removeprefix('torch.')}",
                tuple(Leaf(tree.dotted(keys[i]), tuple(leaves[i].shape)) for i in members),
                mesh,
            ),
            members,
        )
        for (name, dtype), members in groups.items()
    ]


def bucket_of(key: tuple[str | int, ...]) -> str:
    """The layer that a leaf belongs to: its path up to the outermost list or tuple position, else its first entry."""
    for depth, part in enumerate(key):
        if isinstance(part, int):
            return tree.dotted(key[: depth + 1])
    return tree.dotted(key[:1])


def place(leaves: list[Tensor], layout: Layout, on: Live) -> list[Tensor]:
    """This rank's slices of these leaves: views of one new buffer whose padding is zeros."""
    block = torch.zeros(layout.shard, dtype=leaves[0].dtype, device=on.device)
    slices, start = [], 0
    for index, leaf in enumerate(leaves):
        part = layout.part(index, on.rank)
        here = block[start : start + len(part)]
        here.copy_(leaf.detach().reshape(-1)[part.start : part.stop])
        slices.append(here)
        start += len(part)
    return slices


def unpartition(params: tree.Tree) -> tree.Tree:
    """`params` with each `Sharded` leaf gathered whole, on every rank; others stay. All ranks call it together."""
    return tree.map(lambda leaf: leaf.full_tensor().detach().clone() if is_sharded(leaf) else leaf, params)


def _check(keys: list[tuple[str | int, ...]], leaves: list[Any]) -> None:
    for key, leaf in zip(keys, leaves):
        if is_sharded(leaf):
            raise FzeroError(
                tree.dotted(key),
                f"is partitioned already, over {leaf.layout.world} ranks in bucket {leaf.layout.bucket!r}",
                "partition a tree once; fzero.unpartition gives full tensors again",
            )
        if not isinstance(leaf, Tensor):
            raise FzeroError(
                tree.dotted(key), f"is a {type(leaf).__name__}, not a tensor", "keep only tensors in the tree"
            )
