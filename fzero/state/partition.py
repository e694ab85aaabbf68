"""Partition: a tree of tensors to a tree of `Sharded` leaves on a mesh."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fzero.base import tree
from fzero.base.arguments import check_arguments
from fzero.base.devices import check_device, parse_device
from fzero.base.embeddings import is_embedding
from fzero.base.errors import FzeroError
from fzero.base.frozen import is_frozen
from fzero.base.placement import Disk, Placement, check_placement
from fzero.base.progress import Progress
from fzero.base.state import State
from fzero.files import check_writes
from fzero.layout.layout import Layout
from fzero.ranks.calls import describe_leaf
from fzero.ranks.live import find_ranks
from fzero.ranks.ranks import Ranks, check_rank
from fzero.state.fill import CHUNK_NBYTES, allocate_slices, fill
from fzero.state.grouping import Granularity, Layers, LeafLayouts, group_by_layout, plan_leaves
from fzero.state.large_buckets import warn_of_large_buckets
from fzero.state.send import Feed
from fzero.state.sources import Source, fingerprint, is_on_ranks, source_of
from fzero.state.splits import Rules, list_parts, split_codes
from fzero.values.functions import is_sharded
from fzero.values.origin import UNKNOWN, Origin, make_origin
from fzero.values.quantized import is_quantized, map_quantized_leaves
from fzero.values.sharded import Sharded

META = torch.device("meta")
Dtypes = torch.dtype | Callable[[str, Any], torch.dtype | None]


@check_arguments
def partition(
    params: tree.Tree,
    mesh: Any,
    *,
    layers: Layers | None = None,
    like: tree.Tree | None = None,
    dtype: Dtypes | None = None,
    persist: int = 0,
    granularity: Granularity | None = None,
    unit: int = 1,
    chunk: int = CHUNK_NBYTES,
    device: torch.device | str | None = None,
    pin: bool = False,
    to: Placement | None = None,
    source_rank: int | None = None,
    split: Rules | None = None,
    state: Sequence[str] | None = None,
) -> tree.Tree:
    """`params` with each leaf replaced by this rank's `Sharded` part of the leaf. On a `VirtualMesh` a leaf holds the
    parts of all ranks, for `fzero.simulate`.

    `unpartition(partition(params, mesh)) == params`. A leaf is a tensor of any strides, a numpy array, or a `Source` of
    `fzero.state.sources`. Values are copied, never aliased, and read `chunk` bytes at a time, so that beside its
    arguments a rank holds its parts and a chunk.

    All ranks call `partition` together, with the same values. With `source_rank` the values come from that global rank
    alone, which sends the parts of each chunk to the ranks that keep them. The other ranks give leaves of the same
    shapes and dtypes, for example on the meta device.

    Leaves are grouped into buckets. A bucket is gathered and scattered as one. The rule: each element of the outermost
    list or tuple on a leaf's path is a bucket, and so is any other top-level entry. A dict with numbers as its keys is
    like a list. Embeddings deep in a top-level entry are a bucket of their own. `layers(path)` returns the name of
    another bucket for a leaf, or None to keep the rule. The logger "fzero" warns of a bucket with most of the bytes
    that holds several layers, and says the `layers` that cuts it.

    `like` is a tree of partitioned parameters, for state that belongs to the parameters, such as an optimizer's:

    * a leaf whose path ends with a parameter's path, and that has the parameter's shape, has the parameter's layout;
    * any other 0-d leaf, such as a step count, is whole on every rank.

    Of a `fzero.State`, `params` are partitioned, and then the other fields `like` them. Leaves of a state that are
    partitioned already stay.

    `dtype` casts leaves while they are read: a dtype casts floating leaves to it, a function of path and leaf returns a
    leaf's dtype, or None to keep it. A step reads quantized leaves in a dtype that is given. Leaves of
    up to `persist` elements stay whole on every rank; their gradients are averaged. `granularity(path, shape)` returns
    a number of elements, such as a row's, that no rank boundary cuts. With `unit` every leaf and every rank's slice
    begin at multiples of so many elements, as blocks of 8-bit optimizer state want it.
    `split` gives ranks along model axes parts of leaves: `{"layers.*.up.weight": ("tp", 0)}` cuts dim 0 of these leaves
    over the ranks along "tp", and `("tp", 0, 2)` cuts each of two halves of it. In a path "*" stands for any text. A
    step computes with the part (docs/axes.md). Each part is then cut over the shard axis, whatever `persist` is.
    `state=("fsdp", "sp")` names the axes of the mesh that leaves are cut over, in the place of "fsdp": data axes, or
    model axes too. A leaf that is split over some of them is cut over the rest. State that is `like` these leaves, and
    steps of them, follow.

    Parts are allocated on `device`, by default the mesh's (on a virtual mesh the leaf's). With `device="cpu"` and `pin`
    they are in pinned memory. `to` is a placement, such as `fzero.host()`: leaves of which ranks keep slices lie there
    then, and steps compute with them on the device.

    Raises:
        FzeroError: for a leaf that is no tensor, that is partitioned already, or that has no values; for a `split` that
            no leaf has a name for, or that does not divide; for `pin` on a
            device that is not the host, or memory that cannot be pinned; on all ranks when one gives other shapes, or
            when the source rank fails to read.
    """
    check_placement(to)
    on = _find_ranks(mesh, state, [like, params])
    if persist < 0:
        raise FzeroError("persist", f"is {persist}", "give a number of elements, from 0 on")
    check_rank("source_rank", source_rank, on.ranks)
    how: dict[str, Any] = {
        "layers": layers, "persist": persist, "granularity": granularity, "unit": unit, "split": split
    }  # fmt: skip
    cut: Callable[..., tree.Tree] = functools.partial(
        _partition_tree, on=on, dtype=dtype, chunk=chunk, device=device, pin=pin, to=to, source_rank=source_rank, **how
    )
    return _partition_state(params, like, cut) if isinstance(params, State) else cut(params, like=like)


def _find_ranks(mesh: Any, state: Sequence[str] | None, known: tree.Tree) -> Ranks:
    """The ranks of a mesh, with state along these axes. Without axes it lies as that of leaves that are known does."""
    on = find_ranks(mesh, state)
    return on if state is not None else on.follow(next((x.on for x in tree.leaves(known) if is_sharded(x)), on))


def _partition_tree(
    params: tree.Tree,
    like: tree.Tree | None,
    on: Ranks,
    dtype: Dtypes | None,
    chunk: int,
    device: torch.device | str | None,
    pin: bool,
    to: Placement | None,
    source_rank: int | None,
    **how: Any,
) -> tree.Tree:
    """`partition` of a tree that is no `State`. `how` are keywords of `plan_leaves`."""
    if isinstance(dtype, torch.dtype):
        params = map_quantized_leaves(lambda leaf: leaf.read_as(dtype), params)
    given, paths = tree.flatten(params, is_leaf=is_quantized)[0], tree.paths(params, is_leaf=is_quantized)
    codings = {path: leaf.coding for path, leaf in zip(paths, given) if is_quantized(leaf)}
    how["split"] = split_codes(how["split"], paths, codings, on.mesh)
    leaves, treedef = tree.flatten(params)
    keys = tree.keys(treedef)
    sources = [_open_leaf(tree.dotted(key), leaf) for key, leaf in zip(keys, leaves)]
    dtypes = [_choose_dtype(dtype, source) for source in sources]
    targets = [
        _Absent(source.shape, wanted, source.path, is_frozen(leaf), is_embedding(leaf))
        for source, wanted, leaf in zip(sources, dtypes, leaves)
    ]
    planned = plan_leaves(keys, targets, on.mesh, like=like, **how)
    if how["layers"] is None and like is None:
        warn_of_large_buckets(keys, targets, planned)
    if source_rank is not None or any(map(is_on_ranks, sources)):
        _agree(on, source_rank, chunk, sources, targets, planned)
    feed = None if source_rank is None or on.members.is_alone else Feed(on, source_rank)
    where = _find_devices(leaves, device, on, pin)
    values = fill_leaves(
        on, planned, sources, dtypes, where, chunk, pin, feed, places=dict.fromkeys(range(len(leaves)), to)
    )
    if feed is not None:
        feed.end()
    return tree.unflatten(treedef, [values[i] for i in range(len(leaves))])


def _find_devices(leaves: Sequence[Any], device: torch.device | str | None, on: Ranks, pin: bool) -> list[torch.device]:
    """The device of each leaf's slices: the one that is given, else the mesh's, else the leaf's own."""
    given = None if device is None else parse_device(device)
    if given is not None and not pin:  # only memory of the host is pinned, which allocation checks
        check_device(given)
    return [given or on.choose_device(torch.device(getattr(leaf, "device", None) or "cpu")) for leaf in leaves]


def fill_leaves(
    on: Ranks,
    planned: LeafLayouts,
    sources: Mapping[int, Source] | Sequence[Source],
    dtypes: Mapping[int, torch.dtype] | Sequence[torch.dtype],
    devices: Mapping[int, torch.device] | Sequence[torch.device],
    chunk: int,
    pin: bool = False,
    feed: Feed | None = None,
    memory: Mapping[int, Tensor] | None = None,
    places: Mapping[int, Placement | None] | None = None,
) -> dict[int, Sharded]:
    """Leaves of known layouts with the values of sources, by position. Slices of one bucket are views of one buffer, on
    the device of its first leaf or in the placement that leaves have among `places`. Leaves that have a slice in
    `memory` take that one.

    Raises:
        FzeroError: on all ranks, where the disk of one has no room or fails.
    """
    kinds = {i: (dtypes[i], (places or {}).get(i)) for i in planned}
    groups = group_by_layout(planned, kinds)

    def allocate() -> dict[int, Tensor]:
        slices = dict(memory or {})
        for layout, members in groups:
            new = {index: sources[i] for i, index in members.items() if i not in slices}
            first = next(iter(members))
            to, device = None if layout.replicated else kinds[first][1], torch.device(devices[first])
            made = allocate_slices(new, layout, layout.rank_of(on), dtypes[first], device, pin, to) if new else {}
            slices |= {i: made[index] for i, index in members.items() if index in made}
        return slices

    def read_values(slices: Mapping[int, Tensor]) -> dict[int, Sharded]:
        values: dict[int, Sharded] = {}
        progress = Progress("reading", "leaves", "leaves", len(planned))
        for layout, members in groups:
            for i, index in members.items():
                _fill(slices[i], sources[i], layout, index, on, chunk, feed)
                values[i] = Sharded(slices[i], layout, index, on)
                to = None if layout.replicated else kinds[i][1]
                if to is not None:
                    form = values[i].form._replace(device=torch.device(devices[i]), place=to)
                    values[i] = Sharded.of_form(slices[i], form)
                values[i].origin = _origin_of(sources[i], values[i], on, feed, i)
                progress.count(layout.leaves[index].path)
        for value in values.values():  # at the end: ranks that exchange values wait for each other leaf by leaf
            check_writes(value.local)
        return values

    is_on_disk = any(isinstance(place, Disk) and devices[i] != META for i, (_, place) in kinds.items())
    if not is_on_disk:
        return read_values(allocate())
    call = "a fill of slices on a disk"
    if feed is None and not any(is_on_ranks(sources[i]) for i in planned):
        return on.do_together(lambda: read_values(allocate()), call)
    slices = on.do_together(allocate, call)  # before any rank waits for values of another
    return on.do_together(lambda: read_values(slices), call)


def _partition_state(state: State, like: tree.Tree | None, partition: Callable[..., tree.Tree]) -> State:
    """A state, by a function that partitions a tree: `params` first, then the rest `like` them."""
    done, rest = tree.split(state, lambda path, leaf: is_sharded(leaf))
    params = tree.merge(done.params, partition(rest.params, like=like))
    known = like if like is not None else () if params is None else params
    others = partition(rest._replace(params=None)._asdict(), like=known, split=None)  # split as `params` are
    return State(**tree.merge(done._replace(params=None)._asdict(), others))._replace(params=params)


def _origin_of(source: Source, value: Sharded, on: Ranks, feed: Feed | None, position: int) -> Origin:
    """The origin of the leaf at a position, by which ranks notice later that they were given other values."""
    if on.members.is_alone or value.local.is_meta:
        return UNKNOWN
    # no rank knows what the values are that another one sends: all ranks know the call that sent them
    is_sent = feed is not None or is_on_ranks(source)
    return make_origin(hash((on.count_agreements(), position)) if is_sent else fingerprint(source))


@dataclass
class _Absent:
    """The source of a leaf without values."""

    shape: torch.Size
    dtype: torch.dtype
    path: str
    is_frozen: bool = False
    is_embedding: bool | None = None

    def read(self, start: int, out: Tensor) -> None:
        raise FzeroError(
            self.path,
            "is on the meta device: it has a shape but no values",
            "give it values with fzero.init, fzero.load_safetensors, or source_rank=r where rank r has them",
        )


def _open_leaf(path: str, leaf: Any) -> Source:
    """The source of a leaf."""
    if is_sharded(leaf):
        raise FzeroError(
            path,
            f"is partitioned already, over {leaf.form.layout.world} ranks in bucket {leaf.form.layout.bucket!r}",
            "partition a tree once; fzero.unpartition gives full tensors again",
        )
    if isinstance(leaf, Tensor) and leaf.is_meta:
        return _Absent(leaf.shape, leaf.dtype, path)
    return source_of(leaf, path)


def _choose_dtype(dtype: Dtypes | None, source: Source) -> torch.dtype:
    """The dtype that a leaf is cast to. A dtype is for floating leaves only; a function may cast any leaf."""
    if isinstance(dtype, torch.dtype):
        return dtype if source.dtype.is_floating_point else source.dtype
    chosen: Any = dtype(source.path, source) if dtype is not None else None
    if not isinstance(chosen, torch.dtype | None):
        problem = f"returns {chosen!r:.80} for leaf {source.path}"
        raise FzeroError("dtype", problem, "return a dtype, or None to keep the leaf's")
    return chosen or source.dtype


def _agree(
    on: Ranks,
    source_rank: int | None,
    chunk: int,
    sources: Sequence[Source],
    targets: Sequence[Source],
    planned: LeafLayouts,
) -> None:
    """Let all ranks agree on leaves, layouts and chunks, before some send values to others."""
    lines = [
        f"leaf {source.path}: {source.dtype} as {describe_leaf(*planned[i], target.dtype)}"
        for i, (source, target) in enumerate(zip(sources, targets))
    ]
    origin = "rows on ranks" if source_rank is None else f"rank {source_rank}"
    on.agree(f"partition from {origin}, {chunk} bytes at a time", lines)


def _fill(out: Tensor, source: Source, layout: Layout, leaf: int, on: Ranks, chunk: int, feed: Feed | None) -> None:
    """Fill the memory of what this process has of a leaf."""
    if out.is_meta:
        return
    flat = out if out.ndim == 1 else out.view(-1)
    if feed is not None:
        feed.fill(flat, source, layout, leaf, chunk)
    elif is_on_ranks(source):
        if layout.splits > 1 and not getattr(source, "fills_parts", False):
            raise FzeroError(source.path, "is split, and its values lie on ranks", "give it whole on each rank")
        source.fill(on, flat, layout, leaf, chunk)
    else:
        for into, part in list_parts(flat, source, layout, leaf, on):
            fill(into, part, layout, leaf, layout.rank_of(on), chunk)
