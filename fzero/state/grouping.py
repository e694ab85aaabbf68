"""Buckets: which leaves of a tree travel together, and so where each one lies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fzero.base import tree
from fzero.base.mesh import VirtualMesh
from fzero.layout.layout import Layout, Leaf, replicated_layout
from fzero.values.sharded import is_sharded

Keys = Sequence[tuple[str | int, ...]]
Layers = Callable[[str], str | None]
Granularity = Callable[[str, tuple[int, ...]], int | None]
Places = dict[int, tuple[Layout, int]]
"""Position of a leaf in its tree -> its layout, and its index there."""


def places(
    keys: Keys,
    leaves: Sequence[Any],
    mesh: VirtualMesh,
    *,
    layers: Layers | None = None,
    like: tree.Tree | None = None,
    persist: int = 0,
    granularity: Granularity | None = None,
) -> Places:
    """Where each leaf lies, by the keywords of `fzero.partition`. Of leaves only shapes and dtypes are read."""
    found = _beside(keys, leaves, like, mesh)
    for i, leaf in enumerate(leaves):
        if i not in found and leaf.shape.numel() <= persist:
            whole = Leaf(tree.dotted(keys[i]), tuple(leaf.shape))
            found[i] = (Layout(bucket_of(keys[i]), (whole,), mesh, replicated=True), 0)
    rest = [i for i in range(len(leaves)) if i not in found]
    for layout, members in layouts([keys[i] for i in rest], [leaves[i] for i in rest], mesh, layers, granularity):
        found.update((rest[position], (layout, index)) for index, position in enumerate(members))
    return found


def layouts(
    keys: Keys,
    leaves: Sequence[Any],
    mesh: VirtualMesh,
    layers: Layers | None = None,
    granularity: Granularity | None = None,
) -> list[tuple[Layout, list[int]]]:
    """The buckets of a tree, one a layer and dtype: `(layout, positions of its leaves)`. Reads shapes and dtypes."""
    groups: dict[tuple[str, torch.dtype], list[int]] = {}
    for position, (key, leaf) in enumerate(zip(keys, leaves)):
        named = layers(tree.dotted(key)) if layers else None
        groups.setdefault((bucket_of(key) if named is None else named, leaf.dtype), []).append(position)
    dtypes = Counter(name for name, _ in groups)
    return [
        (
            Layout(
                name if dtypes[name] == 1 else f"{name}:{str(dtype).removeprefix('torch.')}",
                tuple(_leaf(tree.dotted(keys[i]), tuple(leaves[i].shape), granularity) for i in members),
                mesh,
            ),
            members,
        )
        for (name, dtype), members in groups.items()
    ]


def _leaf(path: str, shape: tuple[int, ...], granularity: Granularity | None) -> Leaf:
    block = granularity(path, shape) if granularity is not None else None
    return Leaf(path, shape) if block is None else Leaf(path, shape, block)


def bucket_of(key: tuple[str | int, ...]) -> str:
    """The layer that a leaf belongs to: its path up to the outermost list or tuple position, else its first entry."""
    for depth, part in enumerate(key):
        if isinstance(part, int):
            return tree.dotted(key[: depth + 1])
    return tree.dotted(key[:1])


def _beside(keys: Keys, leaves: Sequence[Any], like: tree.Tree | None, mesh: VirtualMesh) -> Places:
    """The leaves that lie as a parameter of `like` does, or are held whole because of it: position -> layout, index."""
    if like is None:
        return {}
    known = {param.path: param for param in tree.leaves(like) if is_sharded(param)}
    found = {}
    for position, (key, leaf) in enumerate(zip(keys, leaves)):
        ends = (known.get(tree.dotted(key[start:])) for start in range(1, len(key) + 1))
        param = next((param for param in ends if param is not None and param.shape == leaf.shape), None)
        if param is not None:
            found[position] = (param.layout, param.index)
        elif not leaf.shape:
            found[position] = (replicated_layout(leaf.shape, mesh), 0)
    return found


def grouped(
    found: Places, dtypes: Sequence[torch.dtype] | Mapping[int, torch.dtype]
) -> list[tuple[Layout, dict[int, int]]]:
    """Leaves of one layout and dtype together, each index of the layout once: `(layout, position -> index)`."""
    groups: dict[tuple[Layout, torch.dtype, int], dict[int, int]] = {}
    seen: Counter[tuple[Layout, torch.dtype, int]] = Counter()
    for position, (layout, index) in sorted(found.items()):
        key = (layout, dtypes[position], index)
        groups.setdefault((*key[:2], seen[key]), {})[position] = index
        seen[key] += 1
    return [(layout, members) for (layout, _, _), members in groups.items()]
