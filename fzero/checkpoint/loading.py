"""Loading: a checkpoint into a tree of any layout on any number of ranks; each rank reads what it will hold."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fzero.base import tree
from fzero.base.arguments import check_arguments
from fzero.base.dtypes import describe_form
from fzero.base.embeddings import is_embedding, mark_embedding
from fzero.base.errors import FzeroError
from fzero.base.frozen import freeze, is_frozen
from fzero.base.state import State
from fzero.checkpoint.folder import remove_leftovers_of_dead
from fzero.checkpoint.manifest import KINDS
from fzero.checkpoint.opening import Checkpoint, StoredLeaf, latest, open_checkpoint
from fzero.files import address_of
from fzero.ranks.live import find_ranks
from fzero.ranks.ranks import Ranks
from fzero.ranks.together import do_together, gather_words
from fzero.ranks.virtual import ALONE
from fzero.state.fill import CHUNK_NBYTES, chunk_numel
from fzero.state.partition import fill_leaves, partition
from fzero.state.sources import is_source, source_of
from fzero.values.sharded import Sharded

NONE_YET = -1
"""The step of a folder without a checkpoint."""


@check_arguments
def load(
    path: str | os.PathLike[str],
    like: tree.Tree,
    mesh: Any = None,
    *,
    step: int | None = None,
    strict: bool = True,
    verify: bool = True,
    donate: bool = False,
    chunk: int = CHUNK_NBYTES,
    **how: Any,
) -> tree.Tree:
    """The values of the checkpoint `step` of the folder `path`, by default the latest, in a tree like `like`.

    `like` is a tree with the structure of what was saved, and gives each leaf its shape, dtype and layout. Its values
    are not read, so it may lie on the meta device:

    * a `Sharded` leaf on `mesh`, or without `mesh` on any, gets the same layout, whatever layout and number of ranks
      the leaf was saved with;
    * any other tensor, a `Sharded` leaf on another mesh too, is partitioned on `mesh` as `fzero.partition(like, mesh,
      **how)` would, and without `mesh` whole on this process;
    * a number or a string is what was saved; a numpy array is one again, without `mesh`.

    All ranks of the mesh call `load` together. Each reads the elements that it will hold, once, from the files that
    have them, `chunk` bytes at a time. With `strict=False` leaves of the checkpoint that `like` lacks are skipped.

    Before, ranks share in reading all files, and compare them with their sums. With `verify=False` they do not: a
    changed byte of a tensor is then a wrong value. A file of another save is found in any case. What a save that was
    killed on this host left in the folder is removed.

    With `donate` the values are read into the memory of those leaves of `like` that keep their layout, and these leaves
    cannot be used afterwards: no second state is in memory. Where a file then turns out to be damaged, they are lost.

    Raises:
        FzeroError: with every leaf that one of the two lacks; for a leaf of another shape or dtype; for a file that is
            missing or damaged. On all ranks, where one rank fails.
    """
    if "source_rank" in how:
        raise FzeroError("source_rank", "is for values that one rank has", "leave it out: every rank reads its own")
    on = None if mesh is None else find_ranks(mesh)
    known = (leaf.ranks for leaf in tree.leaves(like) if isinstance(leaf, Sharded))
    ranks = on if on is not None else next(known, ALONE)
    # a rank may see an older folder than another
    found = ranks.find_largest(_latest_or_none(path) if step is None else step, "the checkpoint to load")
    chosen = None if step is None and found == NONE_YET else found
    opened: list[Checkpoint] = []
    result: list[tree.Tree] = []

    def begin() -> str:
        if step is not None and chosen != step:
            raise FzeroError("step", f"is {step}, another rank loads {chosen}", "give all ranks the same step")
        opened.append(open_checkpoint(path, chosen))
        if verify:
            opened[0].verify(ranks.number, len(ranks.members.ranks))
        return opened[0].fingerprint

    def read() -> None:
        place = functools.partial(partition, mesh=mesh, chunk=chunk, **how)
        result.append(_read(opened[0], like, on, strict, donate, chunk, place))

    gather = gather_words(ranks.members, "load", f"from {path}")
    way_out = "see to the file, or load another checkpoint"
    seen = do_together(gather, begin, str(path), "load", way_out)
    if len(set(seen)) > 1:
        problem = "ranks opened different checkpoints: " + "; ".join(dict.fromkeys(seen))
        raise FzeroError(str(path), problem, "give all ranks one folder; or load again, if the checkpoint was replaced")
    do_together(gather, read, str(path), "load", way_out)
    if ranks.number == 0:
        remove_leftovers_of_dead(Path(path))
    return result[0]


def _latest_or_none(path: str | os.PathLike[str]) -> int:
    """The latest step, `NONE_YET` also where this rank cannot look: it says so when it opens the checkpoint."""
    try:
        found = latest(path)
    except FzeroError:
        return NONE_YET
    return NONE_YET if found is None else found


def _read(
    checkpoint: Checkpoint,
    like: tree.Tree,
    on: Ranks | None,
    strict: bool,
    donate: bool,
    chunk: int,
    place: Callable[[tree.Tree], tree.Tree],
) -> tree.Tree:
    """The tree of a checkpoint. Leaves without a layout on the mesh get one by `place`."""
    leaves, treedef = tree.flatten(like)
    paths = tree.paths(like)
    _check_names(checkpoint, paths, strict)
    found = [_find(checkpoint, path, leaf) for path, leaf in zip(paths, leaves)]
    chunk_numel(chunk, torch.uint8, *(x.dtype for x in found if isinstance(x, StoredLeaf)))
    placed = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, Sharded) and on in (None, leaf.on)}
    for ranks in dict.fromkeys(leaf.ranks for leaf in placed.values()):
        mine = {i: leaf for i, leaf in placed.items() if leaf.on is ranks}
        planned = {i: (leaf.form.layout, leaf.index) for i, leaf in mine.items()}
        devices = {i: ranks.choose_device(_real_device(leaf)) for i, leaf in mine.items()}
        dtypes = {i: leaf.dtype for i, leaf in mine.items()}
        sources, memory = {i: found[i] for i in mine}, _take_memory(ranks, mine) if donate else {}
        places = {i: leaf.place for i, leaf in mine.items()}
        filled = fill_leaves(ranks, planned, sources, dtypes, devices, chunk, memory=memory, places=places)
        for i, value in filled.items():
            found[i] = value
    if on is None:
        return tree.unflatten(treedef, [_read_whole(x, leaf) for x, leaf in zip(found, leaves)])
    # `partition` takes no numbers, and leaves with a layout in a State alone, where others lie like them
    kinds = (StoredLeaf, Sharded) if isinstance(like, State) else StoredLeaf
    given = tree.unflatten(treedef, [x if isinstance(x, kinds) else None for x in found])
    others = tree.unflatten(treedef, [None if isinstance(x, kinds) else x for x in found])
    return tree.merge(place(given), others)


def _take_memory(ranks: Ranks, leaves: Mapping[int, Sharded]) -> dict[int, Tensor]:
    """The slices of leaves, which give them up. Of leaves that share memory only one gives it."""
    ranks.settle()  # another rank may be reading it
    given: dict[int, Tensor] = {}
    for i, leaf in leaves.items():
        if not leaf.is_donated and not leaf.local.is_meta and leaf.local.is_contiguous():
            given[i] = leaf.local
            leaf.give_up()
    taken, end = dict[int, Tensor](), ("", 0)
    for i, x in sorted(given.items(), key=lambda item: address_of(item[1])):
        where, start = address_of(x)
        if (where, start) >= end or not x.numel():
            taken[i], end = x, max(end, (where, start + x.nbytes))
    return taken


def _real_device(leaf: Sharded) -> torch.device:
    return torch.device("cpu") if leaf.device.type == "meta" else leaf.device


def _check_names(checkpoint: Checkpoint, paths: list[str], strict: bool) -> None:
    """Raise for leaves that the checkpoint lacks, and with `strict` for those that it has beside them."""
    stored = checkpoint.keys() | checkpoint.values_by_path.keys()
    missing, surplus = _order(set(paths) - stored), _order(stored - set(paths)) if strict else []
    problems = []
    if missing:
        problems.append(f"lacks {len(missing)} leaves of `like`: {_some(missing)}")
    if surplus:
        problems.append(f"has {len(surplus)} leaves that `like` lacks: {_some(surplus)}")
    if problems:
        way_out = "give the tree that was saved; strict=False skips leaves that `like` lacks"
        raise FzeroError(str(checkpoint.folder), "; ".join(problems), way_out)


def _order(paths: Iterable[str]) -> list[str]:
    """Paths by name, those of optimizer state last: an unknown layer shows in the parameters."""
    return sorted(paths, key=lambda path: (path.startswith("opt_state"), path))


def _some(paths: list[str]) -> str:
    return ", ".join(paths[:8]) + (", ..." if len(paths) > 8 else "")


def _find(checkpoint: Checkpoint, path: str, leaf: Any) -> Any:
    """What the checkpoint has for a leaf: a source, or the value of a leaf that is no tensor."""
    if type(leaf) in KINDS.values():
        if path not in checkpoint.values_by_path:
            problem = f"is a tensor in {checkpoint.folder}, a {type(leaf).__name__} in `like`"
            raise FzeroError(path, problem, "give the tree that was saved")
        value = checkpoint.values_by_path[path]
        if type(value) is not type(leaf):
            problem = f"is a {type(value).__name__} in {checkpoint.folder}, a {type(leaf).__name__} in `like`"
            raise FzeroError(path, problem, "give the tree that was saved")
        return value
    wanted: Any = leaf if isinstance(leaf, Tensor) else source_of(leaf, path)
    if path not in checkpoint:
        problem = f"is a {type(checkpoint.values_by_path[path]).__name__} in {checkpoint.folder}, a tensor in `like`"
        raise FzeroError(path, problem, "give the tree that was saved")
    source = checkpoint[path]
    shape = wanted.global_shape if isinstance(wanted, Sharded) else wanted.shape
    if (source.shape, source.dtype) != (shape, wanted.dtype):
        problem = f"is {describe_form(source)} in {checkpoint.folder}, {describe_form(wanted)} in `like`"
        raise FzeroError(path, problem, "give the tree that was saved, and cast what was loaded")
    source.is_frozen = is_frozen(leaf)
    return mark_embedding(source, is_embedding(leaf))


def _read_whole(found: Any, leaf: Any) -> Any:
    """A leaf that this process holds whole."""
    if not isinstance(found, StoredLeaf):
        return found
    values = torch.empty(found.shape, dtype=found.dtype, device="cpu")
    found.read(0, values.view(-1))
    if not isinstance(leaf, Tensor):
        return values if is_source(leaf) else values.numpy()
    return freeze(values if leaf.is_meta else values.to(leaf.device), leaf)
