"""Unpartition: whole tensors of `Sharded` leaves, all at once, one at a time or by chunks; and edits of one leaf."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fzero.base import torch_private, tree
from fzero.base.arguments import check_arguments
from fzero.base.embeddings import is_embedding
from fzero.base.errors import FzeroError
from fzero.base.frozen import freeze, is_frozen
from fzero.base.placement import Disk
from fzero.files import load
from fzero.layout.chunks import chunks
from fzero.layout.layout import Layout, Leaf
from fzero.layout.parts import join_parts, take_part
from fzero.layout.ranges import shift
from fzero.program import ops
from fzero.program.records import record
from fzero.ranks.calls import describe_leaf
from fzero.ranks.ranks import Ranks, check_rank
from fzero.state.exchange import Part, Stretch, find_owners, perform, plan
from fzero.state.fill import CHUNK_NBYTES, allocate_slices, chunk_numel, fill
from fzero.state.sources import TensorSource, check_range, fingerprint
from fzero.state.splits import list_parts, put_values, split_shape
from fzero.values.functions import is_sharded
from fzero.values.origin import describe_state, follow
from fzero.values.sharded import Sharded


@check_arguments
def unpartition(params: tree.Tree, *, rank: int | None = None) -> tree.Tree:
    """`params` with each `Sharded` leaf as a whole tensor on every rank; other leaves stay. All ranks call
    `unpartition` together. With `rank`, a global rank, leaves are whole on that rank alone, and None on the others.

    Raises:
        FzeroError: for a rank that the mesh does not have.
    """
    _agree("unpartition" if rank is None else f"unpartition on rank {rank}", params)
    return tree.map(lambda leaf: _assemble(leaf, rank) if is_sharded(leaf) else leaf, params)


def _agree(what: str, params: tree.Tree) -> None:
    """Let all ranks agree on `what` they are about to do, and on the leaves of a tree."""
    leaves = [leaf for leaf in tree.leaves(params) if is_sharded(leaf) and not leaf.on.is_tracing]
    for on in dict.fromkeys(leaf.ranks for leaf in leaves if not leaf.ranks.members.is_alone):
        on.agree(what, [line for leaf in leaves if leaf.on is on for line in _describe(leaf)])


def _describe(leaf: Sharded) -> list[str]:
    """What is the same on all ranks about a leaf."""
    held = describe_leaf(leaf.form.layout, leaf.index, leaf.dtype)
    return [f"leaf {leaf.path}: {held}", describe_state(leaf.path, leaf.origin)]


@check_arguments
def iter_full(params: tree.Tree, *, chunk: int | None = None) -> Iterator[tuple[str, Any]]:
    """`(path, whole tensor)` of each leaf in order. With `chunk`, in bytes, `(path, (range, values))` of each chunk of
    each flattened leaf, values 1-d. All ranks iterate together to the end; a rank holds one whole leaf, or one chunk,
    at a time.

    Raises:
        FzeroError: for a chunk smaller than one element.
    """
    for path, leaf in zip(tree.paths(params), tree.leaves(params)):
        if chunk is None:
            _agree(f"iter_full of {path}", leaf)
            yield path, _assemble(leaf, None) if is_sharded(leaf) else leaf
            continue
        for piece in chunks(leaf.numel(), chunk_numel(chunk, leaf.dtype)):
            _agree(f"iter_full of {path}: elements {piece.start} to {piece.stop}", leaf)
            yield path, (piece, assemble_piece(leaf, piece))


@check_arguments
def update_leaf(params: tree.Tree, path: str, fn: Callable[[Tensor], Tensor]) -> tree.Tree:
    """`params` with the leaf at a dotted path replaced by `fn(whole leaf)`, which may have another shape. All ranks
    call `update_leaf` together, with the same `fn`. It replaces DeepSpeed's `GatheredParameters`.

        params = fzero.update_leaf(params, "embed", lambda w: torch.cat([w, new_rows]))
        opt_state = fzero.update_leaf(opt_state, "0.mu.embed", lambda m: torch.cat([m, torch.zeros_like(new_rows)]))

    A new shape changes the layout of the leaf's bucket, and every leaf of the bucket is copied. Update the state that
    belongs to the leaf, such as an optimizer's, to the same shape.

    Raises:
        FzeroError: for a path without a `Sharded` leaf, and for a result of another dtype.
    """
    leaves, treedef = tree.flatten(params)
    paths = tree.paths(params)
    if path not in paths or not is_sharded(leaves[paths.index(path)]):
        raise FzeroError(path, f"is no Sharded leaf of the {len(paths)} in the tree", f"it has {', '.join(paths[:8])}")
    old = leaves[paths.index(path)]
    _agree(f"update_leaf of {path}", params)
    new = fn(_read_whole(old))
    if new.dtype != old.dtype:
        raise FzeroError(path, f"is {old.dtype}, the new value {new.dtype}", f"return value.to({old.dtype})")
    layout = _reshape(old, path, tuple(new.shape))
    at = {paths[i]: i for i in range(len(paths))}
    prefix = path.removesuffix(old.path)
    family = {
        index: at[prefix + leaf.path] for index, leaf in enumerate(old.form.layout.leaves) if prefix + leaf.path in at
    }
    shapes = {index: layout.leaves[index] for index in family}
    slices = _allocate_like(old, shapes, layout)
    for index, i in family.items():
        value = new if i == at[path] else _read_whole(leaves[i])
        flat, source = slices[index].view(-1), TensorSource(value, paths[i])
        for out, part in list_parts(flat, source, layout, index, old.ranks):
            fill(out, part, layout, index, layout.rank_of(old.on), CHUNK_NBYTES)
        origin = leaves[i].origin if i != at[path] else follow([old.origin], fingerprint(TensorSource(new, path)))
        leaves[i] = Sharded.of_form(slices[index], old.form._replace(layout=layout, leaf=index))
        leaves[i].origin = origin  # where `fn` returned other values on another rank, the next step tells
    return tree.unflatten(treedef, leaves)


def replace_values(leaf: Sharded, whole: Tensor) -> Sharded:
    """A leaf of the form of `leaf` with the values of a whole tensor, which all ranks have. No rank waits for others.

    The slice is filled where it lies; parts along a model axis are those of this rank, or of all ranks of a process.

    Raises:
        FzeroError: for another shape.
    """
    form, path = leaf.form, leaf.path
    layout, index = form.layout, form.leaf
    if whole.shape != leaf.global_shape:
        raise FzeroError(
            path, f"has shape {list(leaf.global_shape)}, the new value {list(whole.shape)}", "give equal shapes"
        )
    slices = allocate_slices(
        {index: layout.leaves[index]}, layout, layout.rank_of(leaf.on), leaf.dtype, leaf.device, place=leaf.place
    )
    source = TensorSource(whole.to(leaf.dtype), path)
    for out, part in list_parts(slices[index].view(-1), source, layout, index, leaf.ranks):
        fill(out, part, layout, index, layout.rank_of(leaf.on), CHUNK_NBYTES)
    made = Sharded.of_form(slices[index], form)
    made.origin = follow([leaf.origin], fingerprint(source))
    return made


def _read_whole(leaf: Sharded) -> Tensor:
    """The whole leaf, once ranks have agreed on it."""
    return _join(leaf, leaf.ranks) if leaf.form.layout.splits > 1 else leaf.full_tensor().detach()


def _allocate_like(old: Sharded, shapes: Mapping[int, Leaf], layout: Layout) -> dict[int, Tensor]:
    """Memory for slices of a layout where a leaf lies. On a disk, all ranks have room or none returns."""

    def allocate() -> dict[int, Tensor]:
        return allocate_slices(shapes, layout, layout.rank_of(old.on), old.dtype, old.device, place=old.place)

    return old.on.do_together(allocate, "update_leaf on a disk") if isinstance(old.place, Disk) else allocate()


def _reshape(leaf: Sharded, path: str, shape: tuple[int, ...]) -> Layout:
    """The leaf's layout with another shape for the whole leaf."""
    others, layout, split = list(leaf.form.layout.leaves), leaf.form.layout, leaf.leaf.split
    if split is not None:
        shape, split = split_shape(path, shape, split, layout.mesh)
    others[leaf.index] = replace(leaf.leaf, shape=shape, split=split)
    return replace(layout, leaves=tuple(others))


def _assemble(leaf: Sharded, rank: int | None) -> Tensor | None:
    """A leaf as a new whole tensor, on every rank or on `rank` alone."""
    if leaf.on.is_tracing:
        check_rank("rank", rank, range(leaf.on.mesh.size()))
        return leaf.full_tensor()
    on = leaf.ranks
    check_rank("rank", rank, on.ranks)
    if leaf.form.layout.splits > 1 and (rank is None or on.members.is_alone):
        return freeze(_join(leaf, on), leaf)
    if on.members.is_alone or torch_private.depth():  # under torch.func a slice has no memory of its own
        return freeze(leaf.full_tensor().detach(), leaf)
    if rank is None:
        return freeze(_gather(leaf, on), leaf)
    whole = _collect(leaf, on, rank)
    return None if whole is None else freeze(whole, leaf)


def _gather(leaf: Sharded, on: Ranks) -> Tensor:
    """A whole leaf on every rank, once ranks have agreed on it."""
    local = leaf.local.detach()
    if leaf.is_replicated:
        return local.clone()
    return on.perform_agreed(record(ops.gather), local, leaf.form.layout, leaf.index, list(leaf.shape))


def _join(leaf: Sharded, on: Ranks) -> Tensor:
    """A leaf that is split over model axes, whole on every rank."""
    layout = leaf.form.layout
    if on.rank is None:
        parts = load(leaf.local.detach()).to(leaf.device)
    else:
        part, axis = _gather(leaf, on), layout.split_axis
        parts = on.perform_agreed(record(ops.gather_rows), part[None], axis, layout.splits)
    return join_parts(parts, layout, leaf.index).view(leaf.global_shape)


def _collect(leaf: Sharded, on: Ranks, rank: int) -> Tensor | None:
    """A whole leaf on one rank. Only the ranks of one copy of the state, that of `rank`, send to it."""
    layout, me, numel = leaf.form.layout, on.ranks[on.number], leaf.leaf.numel
    if layout.replicated:
        return leaf.local.detach().clone() if me == rank else None
    row = on.row(rank, layout.cut_axes)
    if me not in row:
        return None
    held = [(layout.part(leaf.index, along), position) for along, position in layout.cut_positions]
    have = [Part(peer, shift(part, position * numel)) for peer, (part, position) in zip(row, held) if part]
    part, position = held[row.index(me)]
    parts = torch.empty(leaf.numel() if me == rank else 0, dtype=leaf.dtype, device=leaf.device)
    mine = Stretch(position * numel + part.start, leaf.local.detach())
    messages = plan(have, [Part(rank, range(leaf.numel()))])
    perform(on, f"collecting {leaf.path} on rank {rank}", messages, mine, Stretch(0, parts))
    return join_parts(parts, layout, leaf.index).view(leaf.global_shape) if me == rank else None


def assemble_piece(leaf: Tensor, piece: range) -> Tensor:
    """[len(piece)] some elements of a flattened whole leaf, on every rank."""
    if not isinstance(leaf, Sharded):
        out = torch.empty(len(piece), dtype=leaf.dtype, device="cpu")
        TensorSource(leaf).read(piece.start, out)
        return out
    if leaf.form.layout.splits == 1:
        return _assemble_within(leaf, piece)
    layout, index, on = leaf.form.layout, leaf.index, leaf.ranks
    held = [layout.range_in_part(index, position, piece) for position in range(layout.splits)]
    if on.rank is None:
        rows = [take_part(leaf.local.detach(), layout, place)[at.start : at.stop] for place, at in enumerate(held)]
        return join_parts(torch.cat(rows).to(leaf.device), layout, index, piece)
    row = leaf.local.new_empty(max(map(len, held)), device=leaf.device)  # those of other ranks may be longer
    mine = _assemble_within(leaf, held[on.along(layout.split_axis)])
    row[: mine.numel()] = mine
    every = on.perform_agreed(record(ops.gather_rows), row[None], layout.split_axis, layout.splits)
    return join_parts(torch.cat([row[: len(at)] for row, at in zip(every, held)]), layout, index, piece)


def _assemble_within(leaf: Sharded, piece: range) -> Tensor:
    """[len(piece)] some elements of a flattened leaf, or of this rank's part of a split one, on the ranks in line along
    the shard axis."""
    layout = leaf.form.layout
    if leaf.on.is_tracing or layout.replicated or leaf.ranks.members.is_alone:
        return leaf.local.detach().reshape(-1)[piece.start : piece.stop].clone().to(leaf.device)
    on = leaf.ranks
    me = on.ranks[on.number]
    row = on.row(me, layout.shard_axis)
    have = Stretch(leaf.part.start, leaf.local.detach())  # which may lie on the host
    room = Stretch(piece.start, torch.empty(len(piece), dtype=leaf.dtype, device=leaf.device))
    # Not `plan` and `perform`: an owner would send its part N - 1 times through host memory. A broadcast is a tree of
    # log2(N) rounds, and NCCL's stays on the device.
    for rank, part in find_owners(layout, leaf.index, piece, [[peer] for peer in row]):
        if rank == me:
            room.at(part).copy_(have.at(part))
        on.broadcast(room.at(part), row.index(rank), layout)
    return room.values


class SourceOfSharded:
    """The source of the values of a `Sharded` leaf. Ranks send each other a chunk at a time."""

    fills_parts = True

    def __init__(self, leaf: Sharded) -> None:
        self._value, self.path, self.shape, self.dtype = leaf, leaf.path, leaf.global_shape, leaf.dtype
        self.is_frozen, self.is_embedding = is_frozen(leaf), is_embedding(leaf)

    def read(self, start: int, out: Tensor) -> None:
        out.copy_(assemble_piece(self._value, check_range(self, start, out)))

    def fingerprint(self) -> bytes:
        """Nothing: one rank alone cannot read the values."""
        return b""

    def fill(self, on: Ranks, out: Tensor, layout: Layout, leaf: int, chunk: int) -> None:
        """Fill `out`, this rank's part of the leaf in a layout, 1-d. All ranks of the leaf's mesh call together."""
        for piece in chunks(self.shape.numel(), chunk_numel(chunk, self.dtype)):
            put_values(out, Stretch(piece.start, assemble_piece(self._value, piece)), layout, leaf, on)
