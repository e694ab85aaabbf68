"""Placement: a full tree to a tree of `Sharded` leaves on a mesh, and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fzero.base import tree
from fzero.base.errors import FzeroError
from fzero.base.mesh import VirtualMesh
from fzero.layout.layout import Layout
from fzero.ranks.agreement import agree, digest
from fzero.ranks.live import live
from fzero.ranks.virtual import virtual
from fzero.state.fill import CHUNK, fill, room
from fzero.state.grouping import Granularity, Layers, grouped, places
from fzero.state.send import Feed
from fzero.state.sources import Source, source_of
from fzero.values.sharded import Sharded, is_sharded

Dtypes = torch.dtype | Callable[[str, Any], torch.dtype | None]


def partition(
    params: tree.Tree,
    mesh: Any,
    *,
    layers: Layers | None = None,
    like: tree.Tree | None = None,
    dtype: Dtypes | None = None,
    persist: int = 0,
    granularity: Granularity | None = None,
    chunk: int = CHUNK,
    device: torch.device | str | None = None,
    pin: bool = False,
    source_rank: int | None = None,
) -> tree.Tree:
    """`params` with each leaf replaced by this rank's `Sharded` part of it. On a `VirtualMesh` by every rank's parts,
    for `fzero.simulate`.

    `unpartition(partition(params, mesh)) == params`. A leaf is a tensor of any strides, a numpy array, or a `Source` of
    `fzero.state.sources`; values are copied, never aliased, and read `chunk` bytes at a time, so that a rank holds no
    more than its parts and a chunk beside what it was given. Every rank gives the same values; with `source_rank` that
    rank alone has them and sends each chunk's parts to their owners, the others give leaves of the same shapes and
    dtypes, on the meta device say.

    Leaves are grouped into buckets, each gathered and scattered as one: an element of the outermost list (or tuple) on
    a leaf's path, else the top-level entry, is a bucket. `layers(path)` may name another bucket for a leaf, or return
    None to keep that rule. `like`, a tree of parameters that are partitioned already, is for state that goes with them,
    such as an optimizer's: a leaf whose path is some prefix and a parameter's path, and that has its shape, lies as
    that parameter does; any other 0-d leaf, such as a step count, is held whole by every rank.

    `dtype`, one or a function of path and leaf (None keeps the leaf's), casts on the way. Leaves of up to `persist`
    elements stay whole on every rank; their gradients are averaged. `granularity(path, shape)` is a number of elements,
    such as a row's, that no rank boundary cuts. Parts are made on `device`, by default the mesh's (of a virtual mesh
    the leaf's), in pinned memory with `pin`.

    Raises:
        FzeroError: for a leaf that is no tensor, is partitioned already or has no values, and on all ranks where one
            gives other shapes, or where the source rank fails to read.
    """
    leaves, treedef = tree.flatten(params)
    keys = tree.keys(treedef)
    on = virtual(mesh) if isinstance(mesh, VirtualMesh) else live(mesh)
    sources = [_source(tree.dotted(key), leaf) for key, leaf in zip(keys, leaves)]
    cast = [_dtype(dtype, source) for source in sources]
    goals = [_Absent(source.shape, to, source.path) for source, to in zip(sources, cast)]
    found = places(keys, goals, on.mesh, layers=layers, like=like, persist=persist, granularity=granularity)
    feed = _feed(on, source_rank, sources, goals)
    values: dict[int, Sharded] = {}
    for layout, members in grouped(found, cast):
        given = {index: sources[i] for i, index in members.items()}
        first = next(iter(members))
        where = torch.device(device or on.device or getattr(leaves[first], "device", None) or "cpu")
        slices = room(given, layout, on.rank, cast[first], where, pin)
        for i, index in members.items():
            _bring(slices[index].view(-1), sources[i], layout, index, on.rank, chunk, feed)
            values[i] = Sharded(slices[index], layout, index, on)
    if feed is not None:
        feed.end()
    return tree.unflatten(treedef, [values[i] for i in range(len(leaves))])


@dataclass
class _Absent:
    """The source of a leaf without values."""

    shape: torch.Size
    dtype: torch.dtype
    path: str

    def read(self, start: int, out: Tensor) -> None:
        raise FzeroError(
            self.path,
            "is on the meta device: it has a shape but no values",
            "give it values with fzero.init, fzero.load_safetensors, or source_rank=r where rank r has them",
        )


def _source(path: str, leaf: Any) -> Source:
    """The source of a leaf."""
    if is_sharded(leaf):
        raise FzeroError(
            path,
            f"is partitioned already, over {leaf.layout.world} ranks in bucket {leaf.layout.bucket!r}",
            "partition a tree once; fzero.unpartition gives full tensors again",
        )
    if isinstance(leaf, Tensor) and leaf.is_meta:
        return _Absent(leaf.shape, leaf.dtype, path)
    return source_of(leaf, path)


def _dtype(dtype: Any, source: Source) -> torch.dtype:
    """What a leaf is cast to: only floating leaves are, unless a function says so."""
    if isinstance(dtype, torch.dtype):
        return dtype if source.dtype.is_floating_point else source.dtype
    return (dtype(source.path, source) if dtype is not None else None) or source.dtype


def _feed(on: Any, source_rank: int | None, sources: Sequence[Source], goals: Sequence[Source]) -> Feed | None:
    """What brings values from `source_rank`, once all ranks agree about what they will be; None where all have them."""
    if source_rank is None or on.rank is None:
        return None
    lines = [f"leaf {a.path}: {list(a.shape)} {a.dtype}, as {b.dtype}" for a, b in zip(sources, goals)]
    agree(on.members, digest(lines), lines)
    return Feed(on, source_rank)


def _bring(
    out: Tensor, source: Source, layout: Layout, leaf: int, rank: int | None, chunk: int, feed: Feed | None
) -> None:
    if out.is_meta:
        return
    if feed is not None:
        feed.leaf(out, source, layout, leaf, chunk)
    else:
        fill(out, source, layout, leaf, rank, chunk)
