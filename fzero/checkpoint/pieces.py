"""Pieces: what of a tree goes into which file of a checkpoint."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.base import tree
from fzero.base.errors import FzeroError
from fzero.base.mesh import VirtualMesh
from fzero.checkpoint.manifest import DTYPE_NAMES, KINDS, OTHERS, Value, render_value
from fzero.checkpoint.places import Grid, Place
from fzero.layout.owners import balance
from fzero.state.sources import Source, TensorSource, fingerprint, source_of
from fzero.values.sharded import Sharded


class Plan(NamedTuple):
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
            made = leaf.origin if isinstance(leaf, Sharded) else f"elements with the hash {fingerprint(leaf):08x}"
            found.append(f"{path}: {DTYPE_NAMES[dtype]}{list(shape)} at {numbers}, made {made}")
        return found

    def pick(self, file: int) -> dict[str, Source]:
        """What a file has, by key: a slice of a leaf is 1-d, a whole leaf has its shape."""
        picked = {}
        for path, leaf in self.leaves.items():
            part = self.grid.find_part(self.places[path], file)
            if part or (not self.places[path].shard and file == self.places[path].first):
                picked[path] = _view_bytes(_cut(leaf, part))
        return picked


def plan(state: tree.Tree, mesh: VirtualMesh | None) -> Plan:
    """The plan of a tree that lies on a mesh, None for a tree without `Sharded` leaves. Reads no values.

    Raises:
        FzeroError: for a leaf that a checkpoint cannot hold, and for two leaves of one path.
    """
    paths, leaves = tree.paths(state), tree.leaves(state)
    for path, count in Counter(paths).items():
        if count > 1:
            raise FzeroError(path, f"{count} leaves have this path", "rename an entry of a dict")
    grid = Grid.of({}, "") if mesh is None else Grid.of(mesh.sizes, mesh.shard_axis)
    values = {path: leaf for path, leaf in zip(paths, leaves) if type(leaf) in KINDS.values()}
    held = {path: _open_leaf(leaf, path) for path, leaf in zip(paths, leaves) if path not in values}
    firsts = _choose_firsts(held, grid)
    return Plan(grid, {path: _place(path, leaf, firsts[path]) for path, leaf in held.items()}, values, held)


def hash_lines(lines: Sequence[str]) -> str:
    """A hash of lines, the same in every process."""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


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


def _choose_firsts(leaves: dict[str, Sharded | Source], grid: Grid) -> dict[str, int]:
    """The file that has a leaf, or the first of the files that have the leaf's slices: so that each copy of the state
    writes about as many bytes, and so that values beside the `Sharded` leaves are those of the first rank."""
    firsts = dict.fromkeys(leaves, 0)
    sliced = [path for path, leaf in leaves.items() if _is_cut(leaf)]
    whole = [path for path, leaf in leaves.items() if isinstance(leaf, Sharded) and not _is_cut(leaf)]
    for chosen, files in (sliced, grid.list_firsts()), (whole, list(range(grid.files))):
        costs = [leaves[path].shape.numel() * leaves[path].dtype.itemsize for path in chosen]
        owners = balance(costs, [None] * len(costs), len(files))
        firsts.update((path, files[owner]) for path, owner in zip(chosen, owners))
    return firsts


def _is_cut(leaf: Sharded | Source) -> bool:
    return isinstance(leaf, Sharded) and not leaf.is_replicated


def _place(path: str, leaf: Sharded | Source, first: int) -> Place:
    start = shard = 0
    if isinstance(leaf, Sharded) and _is_cut(leaf):
        start, shard = leaf.form.layout.leaf_ranges[leaf.index].start, leaf.form.layout.shard
    return Place(path, leaf.dtype, tuple(leaf.shape), start, shard, first)


def _cut(leaf: Sharded | Source, part: range) -> Source:
    """These elements of a leaf, which this process holds."""
    if not isinstance(leaf, Sharded):
        return leaf
    if leaf.is_replicated:
        return TensorSource(leaf.local, leaf.path)
    begin = leaf.part.start
    return TensorSource(leaf.local.view(-1)[part.start - begin : part.stop - begin], leaf.path)


def _view_bytes(values: Source) -> Source:
    """Values of a dtype that safetensors has: others as bytes."""
    if values.dtype not in OTHERS.values():
        return values
    whole = torch.empty(values.shape.numel(), dtype=values.dtype, device="cpu")
    values.read(0, whole)
    return TensorSource(whole.view(torch.uint8), values.path)
