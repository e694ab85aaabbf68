"""Pieces: what of a tree goes into which file of a checkpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.base import tree
from fzero.base.errors import FzeroError
from fzero.base.garbage import pause_garbage_collection
from fzero.checkpoint.manifest import DTYPE_NAMES, KINDS, OTHERS, Value, render_value
from fzero.checkpoint.places import Grid, Place
from fzero.layout.owners import balance
from fzero.layout.parts import take_part
from fzero.ranks.ranks import Ranks
from fzero.ranks.virtual import ALONE
from fzero.state.sources import Source, TensorSource, fingerprint, source_of
from fzero.values.origin import describe_origin
from fzero.values.sharded import Sharded


class CheckpointPlan(NamedTuple):
    """Where each leaf of a tree goes. Every rank works it out by itself, and all ranks alike."""

    grid: Grid
    places: dict[str, Place]
    values: dict[str, Value]
    leaves: dict[str, Sharded | Source]

    def list_lines(self) -> list[str]:
        """What all ranks must have alike, one line a leaf: also where a `Sharded` came from, and some elements of a
        tensor that ranks hold whole."""
        found = [f"{path}: {' '.join(render_value(value))}" for path, value in self.values.items()]
        for (path, dtype, shape, *numbers), leaf in zip(self.places.values(), self.leaves.values()):
            found.append(f"{path}: {DTYPE_NAMES[dtype]}{list(shape)} at {numbers}, made {_describe_origin(leaf)}")
        return found

    def pick(self, file: int) -> dict[str, Source]:
        """What a file has, by key: a slice of a leaf is 1-d, a whole leaf has its shape."""
        picked = {}
        for path, whole in self.places.items():
            for position, place in enumerate(whole.list_parts()):
                part = self.grid.find_part(place, file)
                if part or (not place.shard and file == place.first):
                    picked[path] = _view_bytes(_cut(self.leaves[path], part, position))
        return picked


@pause_garbage_collection()
def plan(state: tree.Tree, on: Ranks) -> CheckpointPlan:
    """The plan of a tree whose `Sharded` leaves lie on these ranks. Reads no values.

    Raises:
        FzeroError: for a leaf that a checkpoint cannot hold, and for two leaves of one path.
    """
    leaves, treedef = tree.flatten(state)
    paths = [tree.dotted(key) for key in tree.keys(treedef)]
    for path, count in Counter(paths).items():
        if count > 1:
            raise FzeroError(path, f"{count} leaves have this path", "rename an entry of a dict")
    grid = Grid.of(*describe_mesh(on))
    kinds = set(KINDS.values())
    values = {path: leaf for path, leaf in zip(paths, leaves) if type(leaf) in kinds}
    held = {path: _open_leaf(leaf, path) for path, leaf in zip(paths, leaves) if path not in values}
    places = {path: _place(path, leaf, on) for path, leaf in held.items()}
    for path, first in _choose_firsts(places, held, grid).items():
        places[path] = places[path]._replace(first=first)
    return CheckpointPlan(grid, places, values, held)


def describe_mesh(on: Ranks) -> tuple[dict[str, int], str]:
    """The sizes of the axes that a tree lies along, and the shard axis."""
    return ({}, "") if on is ALONE else (on.mesh.sizes, on.mesh.shard_axis)


def _describe_origin(leaf: Sharded | Source) -> str:
    if isinstance(leaf, Sharded):
        return describe_origin(leaf.origin)
    return f"elements with the hash {fingerprint(leaf):08x}"


def _open_leaf(leaf: Any, path: str) -> Sharded | Source:
    if not isinstance(leaf, Sharded):
        try:
            leaf = source_of(leaf, path)
        except FzeroError:
            if isinstance(leaf, Tensor):
                raise
            kinds = ", ".join(KINDS)
            problem = f"is a {type(leaf).__name__}: a checkpoint holds tensors, and leaves of type {kinds}"
            raise FzeroError(path, problem, "leave it out, or save a number or a string in its place") from None
    if leaf.dtype not in DTYPE_NAMES:
        raise FzeroError(path, f"is {leaf.dtype}: a checkpoint holds {', '.join(DTYPE_NAMES.values())}", "cast it")
    if isinstance(leaf, Sharded) and leaf.local.is_meta:
        raise FzeroError(path, "is on the meta device: it has a shape but no values", "save a tree with values")
    return leaf


def _place(path: str, leaf: Sharded | Source, on: Ranks) -> Place:
    """Where a leaf lies, in the first file or the first copy of the state."""
    if not isinstance(leaf, Sharded):
        return Place(path, leaf.dtype, tuple(leaf.shape), 0, 0, 0)
    layout, index = leaf.form.layout, leaf.form.leaf
    start, shard = (0, 0) if layout.replicated else (layout.leaf_ranges[index].start, layout.shard)
    place, split = Place(path, leaf.dtype, layout.leaves[index].shape, start, shard, 0), layout.leaves[index].split
    if split is None:
        return place
    others = on.mesh.rows(split.axis)[0]  # the ranks that are first along all other axes
    axis = "" if layout.positions is None else layout.shard_axis
    return place._replace(first=others[0], dim=split.dim, parts=split.parts, firsts=tuple(others), axis=axis)


def _choose_firsts(places: Mapping[str, Place], leaves: Mapping[str, Sharded | Source], grid: Grid) -> dict[str, int]:
    """The `first` of each leaf that several files may have: so that each copy of the state, and each rank, writes about
    as many bytes. Values beside the `Sharded` leaves are those of the first rank."""
    copies, chosen = grid.list_firsts(), dict[str, int]()
    sliced = [path for path, x in places.items() if x.shard and not x.firsts] if len(copies) > 1 else []
    whole = [path for path, leaf in leaves.items() if isinstance(leaf, Sharded) and not places[path].shard]
    for paths, files in (sliced, copies), (whole, list(range(grid.files))):
        costs = [places[path].numel * places[path].dtype.itemsize for path in paths]
        owners = balance(costs, [None] * len(costs), len(files))
        chosen.update((path, files[owner]) for path, owner in zip(paths, owners))
    return chosen


def _cut(leaf: Sharded | Source, part: range, position: int) -> Source:
    """These elements of a leaf, or of the part at a position of a split leaf, which this process holds."""
    if not isinstance(leaf, Sharded):
        return leaf
    if leaf.is_replicated:
        return TensorSource(leaf.local, leaf.path)
    begin, local = leaf.part.start, leaf.local.view(-1)
    if leaf.on.rank is None:  # all parts are here
        local = take_part(local, leaf.form.layout, position)
    return TensorSource(local[part.start - begin : part.stop - begin], leaf.path)


def _view_bytes(values: Source) -> Source:
    """Values of a dtype that safetensors has: others as bytes."""
    if values.dtype not in OTHERS.values():
        return values
    whole = torch.empty(values.shape.numel(), dtype=values.dtype, device="cpu")
    values.read(0, whole)
    return TensorSource(whole.view(torch.uint8), values.path)
