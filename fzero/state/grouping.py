"""Grouping: which leaves of a tree share a bucket, and the layout of each leaf."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fzero.base import tree
from fzero.base.arguments import is_whole
from fzero.base.dtypes import name_dtype
from fzero.base.embeddings import is_embedding
from fzero.base.errors import FzeroError
from fzero.base.frozen import is_frozen
from fzero.base.mesh import VirtualMesh
from fzero.layout.layout import ALIGN, Layout, Leaf, replicated_layout
from fzero.layout.splits import Split
from fzero.optim.quantized import BLOCK, LEAST, count_blocks
from fzero.state.splits import Rules, find_splits, split_shape
from fzero.values.functions import is_sharded

Keys = Sequence[tuple[str | int, ...]]
Layers = Callable[[str], str | None]
Granularity = Callable[[str, tuple[int, ...]], int | None]
LeafLayouts = dict[int, tuple[Layout, int]]
"""Position of a leaf in its tree -> the leaf's layout, and the leaf's index in the layout."""


def plan_leaves(
    keys: Keys,
    leaves: Sequence[Any],
    mesh: VirtualMesh,
    *,
    layers: Layers | None = None,
    like: tree.Tree | None = None,
    persist: int = 0,
    granularity: Granularity | None = None,
    unit: int = 1,
    split: Rules | None = None,
) -> LeafLayouts:
    """The layout of each leaf, by the keywords of `fzero.partition`. Reads only shapes and dtypes of leaves."""
    found = _match_params(keys, leaves, like, mesh)
    splits = find_splits(split, list(map(tree.dotted, keys)), mesh)
    for i, leaf in enumerate(leaves):
        if i not in found and leaf.shape.numel() <= persist and tree.dotted(keys[i]) not in splits:
            own = _leaf(tree.dotted(keys[i]), leaf, None, {}, mesh)
            found[i] = (Layout(bucket_of(keys[i]), (own,), mesh, replicated=True), 0)
    rest = [i for i in range(len(leaves)) if i not in found]
    given = [keys[i] for i in rest], [leaves[i] for i in rest]
    for layout, members in plan_buckets(*given, mesh, layers, granularity, unit, splits):
        found.update((rest[position], (layout, index)) for index, position in enumerate(members))
    return found


def plan_buckets(
    keys: Keys,
    leaves: Sequence[Any],
    mesh: VirtualMesh,
    layers: Layers | None = None,
    granularity: Granularity | None = None,
    unit: int = 1,
    splits: Mapping[str, Split] | None = None,
) -> list[tuple[Layout, list[int]]]:
    """The buckets of a tree, one for each layer, dtype and axis that leaves are split over: `(layout, positions of the
    bucket's leaves)`. Reads only shapes and dtypes of leaves.

    Leaves of odd sizes stand behind the others, so that a leaf begins at a multiple of the largest power of two, up to
    `ALIGN`, that divides its number of elements. Kernels of GPUs want a leaf to begin at a multiple of 16 bytes.
    """
    groups: dict[tuple[str, torch.dtype, str], list[int]] = {}
    splits = splits or {}
    for position, (key, leaf) in enumerate(zip(keys, leaves)):
        named: Any = layers(tree.dotted(key)) if layers else None
        if not isinstance(named, str | None):
            problem = f"returns {named!r:.80} for leaf {tree.dotted(key)}"
            raise FzeroError("layers", problem, "return the name of a bucket, or None for the rule")
        split = splits.get(tree.dotted(key))
        axis, name = "" if split is None else split.axis, _choose_bucket(key, leaf) if named is None else named
        groups.setdefault((name, leaf.dtype, axis), []).append(position)
    for members in groups.values():
        members.sort(key=lambda i: -_alignment(leaves[i].shape.numel()))
    dtypes = Counter((name, axis) for name, _, axis in groups)
    return [
        (
            Layout(
                (name if dtypes[name, axis] == 1 else f"{name}:{name_dtype(dtype)}") + (f":{axis}" if axis else ""),
                tuple(_leaf(tree.dotted(keys[i]), leaves[i], granularity, splits, mesh) for i in members),
                mesh,
                unit=unit,
            ),
            members,
        )
        for (name, dtype, axis), members in groups.items()
    ]


def _alignment(numel: int) -> int:
    """The largest power of two, up to `ALIGN`, that divides a number of elements."""
    return math.gcd(numel, ALIGN)


def _leaf(
    path: str, leaf: Any, granularity: Granularity | None, splits: Mapping[str, Split], mesh: VirtualMesh
) -> Leaf:
    shape, split = tuple(leaf.shape), splits.get(path)
    if split is not None:
        shape, split = split_shape(path, shape, split, mesh)
    block = granularity(path, shape) if granularity is not None else None
    if block is not None and not is_whole(block):
        problem = f"returns {block!r:.80} for leaf {path}"
        raise FzeroError("granularity", problem, "return a number of elements, or None")
    return Leaf(path, shape, 1 if block is None else block, is_frozen(leaf), is_embedding(leaf), split)


def _choose_bucket(key: tuple[str | int, ...], leaf: Any) -> str:
    """The layer of a leaf. The embeddings deep in a top-level entry, such as "model", are a layer by themselves: the
    final norm, or the head, of that entry needs no gather of them."""
    name = bucket_of(key)
    return f"{name}.embeddings" if is_embedding(leaf) and name == tree.dotted(key[:1]) and len(key) > 2 else name


def bucket_of(key: tuple[str | int, ...]) -> str:
    """The layer of a leaf: the leaf's path up to the outermost list or tuple position, else the path's first entry. A
    number as the key of a dict, as in `nn.ModuleDict({"0": Block(), ...})`, is such a position."""
    for depth, part in enumerate(key):
        if isinstance(part, int) or (isinstance(part, str) and part.isdecimal()):
            return tree.dotted(key[: depth + 1])
    return tree.dotted(key[:1])


def _match_params(keys: Keys, leaves: Sequence[Any], like: tree.Tree | None, mesh: VirtualMesh) -> LeafLayouts:
    """The leaves whose layout follows from `like`: a leaf with the path and shape of a parameter has the parameter's
    layout; a leaf with one number for each block of a large parameter lies with the blocks; any other 0-d leaf is
    replicated."""
    if like is None:
        return {}
    known = {param.path: param for param in tree.leaves(like) if is_sharded(param)}
    found = {}
    for position, (key, leaf) in enumerate(zip(keys, leaves)):
        ends = (known.get(tree.dotted(key[start:])) for start in range(len(key) + 1))
        param = next((param for param in ends if param is not None and param.global_shape == leaf.shape), None)
        if param is not None:
            found[position] = (param.form.layout, param.index)
        elif (param := _find_param_of_scales(known, key, leaf)) is not None:
            found[position] = (param.form.layout.coarsen(BLOCK, param.index), param.index)
        elif not leaf.shape:
            found[position] = (replicated_layout(leaf.shape, mesh), 0)
    return found


def _find_param_of_scales(known: Mapping[str, Any], key: tuple[str | int, ...], leaf: Any) -> Any:
    """The large parameter whose blocks a leaf has one number for: the scales of 8-bit state, by their name."""
    if not any(str(part).endswith("scales") for part in key):
        return None
    ends = (known.get(tree.dotted(key[start:])) for start in range(len(key) + 1))
    for param in ends:
        if param is not None and param.numel() >= LEAST and tuple(leaf.shape) == (count_blocks(param.numel()),):
            return param
    return None


def group_by_layout(
    found: LeafLayouts, dtypes: Sequence[Any] | Mapping[int, Any]
) -> list[tuple[Layout, dict[int, int]]]:
    """Groups of leaves with one layout and dtype: `(layout, position -> index)`. A group has an index once: leaves with
    the same index, such as the two moments of a parameter, are in different groups. The dtype may be a pair of a dtype
    and a placement."""
    groups: dict[tuple[Layout, Any, int], dict[int, int]] = {}
    seen: Counter[tuple[Layout, Any, int]] = Counter()
    for position, (layout, index) in sorted(found.items()):
        key = (layout, dtypes[position], index)
        groups.setdefault((*key[:2], seen[key]), {})[position] = index
        seen[key] += 1
    return [(layout, members) for (layout, _, _), members in groups.items()]
