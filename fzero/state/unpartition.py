"""Assembly: whole tensors out of `Sharded` leaves, all at once, one at a time or by chunks, and back in again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fzero.base import tree
from fzero.base.errors import FzeroError
from fzero.layout.chunks import chunks, overlaps
from fzero.layout.layout import Layout
from fzero.ranks.live import Live
from fzero.state.fill import CHUNK, elements, fill, room
from fzero.state.sources import TensorSource
from fzero.values.sharded import Sharded, is_sharded


def unpartition(params: tree.Tree, *, rank: int | None = None) -> tree.Tree:
    """`params` with each `Sharded` leaf whole, on every rank, or on the global `rank` alone and None on the others.
    Other leaves stay. All ranks call it together.

    Raises:
        FzeroError: for a rank that the mesh does not have.
    """
    return tree.map(lambda leaf: _whole(leaf, rank) if is_sharded(leaf) else leaf, params)


def iter_full(params: tree.Tree, *, chunk: int | None = None) -> Iterator[tuple[str, Any]]:
    """`(path, whole tensor)` of each leaf in order; with `chunk`, bytes, `(path, (range, values))` of each chunk, 1-d,
    of the flattened leaf. All ranks go through it together; no more than one leaf, or chunk, is whole at a time.

    Raises:
        FzeroError: for a chunk without an element.
    """
    for path, leaf in zip(tree.paths(params), tree.leaves(params)):
        if chunk is None:
            yield path, _whole(leaf, None) if is_sharded(leaf) else leaf
            continue
        for piece in chunks(leaf.numel(), elements(chunk, leaf.dtype)):
            yield path, (piece, _values(leaf, piece))


def update_leaf(params: tree.Tree, path: str, fn: Callable[[Tensor], Tensor]) -> tree.Tree:
    """`params` with the leaf at a dotted path replaced by `fn(whole leaf)`, which may have another shape. All ranks
    call it together, with one `fn`. What DeepSpeed's `GatheredParameters` is for, as values.

        params = fzero.update_leaf(params, "embed", lambda w: torch.cat([w, new_rows]))
        opt_state = fzero.update_leaf(opt_state, "0.mu.embed", lambda m: torch.cat([m, torch.zeros_like(new_rows)]))

    With another shape the bucket is laid out anew, leaf by leaf; state that goes with the leaf must get that shape too.

    Raises:
        FzeroError: for a path that is no `Sharded` leaf's, or another dtype.
    """
    leaves, treedef = tree.flatten(params)
    paths = tree.paths(params)
    if path not in paths or not is_sharded(leaves[paths.index(path)]):
        raise FzeroError(path, f"is no Sharded leaf of the {len(paths)} in the tree", f"it has {', '.join(paths[:8])}")
    old = leaves[paths.index(path)]
    new = fn(old.full_tensor().detach().clone())
    if new.dtype != old.dtype:
        raise FzeroError(path, f"is {old.dtype}, the new value {new.dtype}", f"return value.to({old.dtype})")
    layout = _reshaped(old, tuple(new.shape))
    at = {paths[i]: i for i in range(len(paths))}
    prefix = path.removesuffix(old.path)
    family = {index: at[prefix + leaf.path] for index, leaf in enumerate(old.layout.leaves) if prefix + leaf.path in at}
    shapes = {index: new if i == at[path] else leaves[i] for index, i in family.items()}
    slices = room(shapes, layout, old.on.rank, old.dtype, old.device)
    for index, i in family.items():
        value = new if i == at[path] else leaves[i].full_tensor().detach()
        fill(slices[index].view(-1), TensorSource(value, paths[i]), layout, index, old.on.rank, CHUNK)
        leaves[i] = Sharded(slices[index], layout, index, old.on)
    return tree.unflatten(treedef, leaves)


def _reshaped(leaf: Sharded, shape: tuple[int, ...]) -> Layout:
    """A leaf's layout with another shape for it."""
    others = list(leaf.layout.leaves)
    others[leaf.index] = replace(leaf.leaf, shape=shape)
    return replace(leaf.layout, leaves=tuple(others))


def _whole(leaf: Sharded, rank: int | None) -> Tensor | None:
    """A leaf in its shape, a new tensor."""
    if rank is None or not isinstance(leaf.on, Live):
        return leaf.full_tensor().detach().clone()
    if rank not in leaf.on.ranks:
        raise FzeroError("rank", f"is {rank}, the mesh has ranks {list(leaf.on.ranks)}", "name one of them")
    return _collected(leaf, leaf.on, rank)


def _collected(leaf: Sharded, on: Live, rank: int) -> Tensor | None:
    """A leaf on one rank: its own row of ranks along the shard axis sends it their parts."""
    layout = leaf.layout
    row, mine = on.row(rank), on.ranks[on.number]
    if mine == rank and layout.replicated:
        return leaf.local.detach().clone()
    with on.members.begin(f"collecting {leaf.path} on rank {rank}"):
        if mine == rank:
            flat = torch.empty(leaf.numel(), dtype=leaf.dtype)
            works: list[Any] = []
            for at, peer in enumerate(row):
                part = layout.part(leaf.index, at)
                here = flat[part.start : part.stop]
                if peer == rank:
                    here.copy_(leaf.local)
                elif part:
                    works.append(dist.irecv(here, peer, group=on.members.group))
            for work in works:
                work.wait(on.members.timeout)
            return flat.view(leaf.shape).to(leaf.device)
        if mine in row and leaf.local.numel() and not layout.replicated:
            sent: Any = dist.isend(leaf.local.detach().cpu().contiguous(), rank, group=on.members.group)
            sent.wait(on.members.timeout)
    return None


def _values(leaf: Sharded | Tensor, piece: range) -> Tensor:
    """[len(piece)] some elements of a flattened leaf, sent by the ranks that hold them to those of their row."""
    if not isinstance(leaf, Sharded):
        out = torch.empty(len(piece), dtype=leaf.dtype)
        TensorSource(leaf).read(piece.start, out)
        return out
    on, layout = leaf.on, leaf.layout
    if not isinstance(on, Live) or layout.replicated:
        return leaf.local.detach().reshape(-1)[piece.start : piece.stop].clone()
    out = torch.empty(len(piece), dtype=leaf.dtype, device=leaf.device)
    for overlap in overlaps(layout, leaf.index, piece):
        here = out[overlap.source.start - piece.start : overlap.source.stop - piece.start]
        if overlap.rank == on.rank:
            start = layout.part(leaf.index, on.rank).start
            here.copy_(leaf.local[overlap.source.start - start : overlap.source.stop - start])
        assert overlap.rank is not None  # it belongs to one
        on.broadcast(here, overlap.rank, layout)
    return out
