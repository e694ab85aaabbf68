"""Saving: a tree of `Sharded` leaves as one safetensors file; each rank writes its own parts."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from fzero.base import tree
from fzero.base.arguments import check_arguments
from fzero.base.errors import FzeroError
from fzero.layout.parts import find_copy
from fzero.layout.strides import Copy, within
from fzero.ranks.ranks import Ranks
from fzero.state.fill import CHUNK_NBYTES
from fzero.state.publishing import find_common_ranks
from fzero.state.safetensors.header import Header, plan_header
from fzero.state.safetensors.writing import ITSELF, FilePiece, WritePlan, write
from fzero.state.sources import Source, TensorSource, source_of
from fzero.state.splits import list_positions
from fzero.values.origin import describe_state
from fzero.values.sharded import Sharded


@check_arguments
def save_safetensors(
    values: tree.Tree,
    path: str | os.PathLike[str],
    *,
    chunk: int = CHUNK_NBYTES,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a tree as one safetensors file. Leaves are whole in the file, whatever the number of ranks; a leaf's key is
    its dotted path.

    All ranks of the mesh call `save_safetensors` together. `path` is on a filesystem that all ranks share. Each rank
    writes the parts that it holds, and nothing is gathered. A leaf that is not on the CPU is copied `chunk` bytes at a
    time. The first rank writes the values that all ranks hold: replicated leaves, and the tensors, arrays and sources
    beside the `Sharded` leaves. Of several replicas of the state, the first writes. A tree without `Sharded` leaves, or
    on a `VirtualMesh`, is written by the calling process alone.

    The file appears at `path` when it is complete; before, it has another name in the same directory, and no header.
    Such a file of a process that was killed is removed by the next save into the directory.
    Hugging Face's transformers need `metadata={"format": "pt"}`, and `fzero.checkpoint.export_hf` writes a folder for
    them.

    Raises:
        FzeroError: for a leaf that the format cannot hold; on every rank, naming the rank that failed, when a rank
            cannot write, for example because `chunk` is smaller than one element. After an error the new file is
            removed, and an old file at `path` is unchanged.
    """
    leaves = tree.leaves(values)
    on = find_common_ranks(zip(tree.paths(values), leaves))

    def make_plan() -> WritePlan:
        paths = tree.paths(values)
        check_paths(paths)
        given = {path: name_value(path, leaf) for path, leaf in zip(paths, leaves)}
        header = plan_header(given, metadata or {})
        return WritePlan({ITSELF: header}, plan_pieces(given, header, on), list_origins(leaves))

    write(Path(path), make_plan, on, chunk, "save_safetensors")


def check_paths(paths: Iterable[str]) -> None:
    """Raise for several leaves of one path."""
    for path, count in Counter(paths).items():
        if count > 1:
            raise FzeroError(path, f"{count} leaves have this path", "a file has one tensor a key: rename an entry")


def name_value(path: str, leaf: Any) -> Sharded | Source:
    """A leaf as it is, or as a source.

    Raises:
        FzeroError: for a leaf that is no tensor.
    """
    return leaf if isinstance(leaf, Sharded) else source_of(leaf, path)


def list_origins(leaves: Iterable[Any]) -> list[str]:
    """Where the `Sharded` leaves came from, which is the same on all ranks."""
    return [describe_state(leaf.path, leaf.origin) for leaf in leaves if isinstance(leaf, Sharded)]


def plan_pieces(values: Mapping[str, Sharded | Source], header: Header, on: Ranks) -> list[FilePiece]:
    """The pieces that this process writes. All ranks of a mesh together write each byte once."""
    found = []
    for path, value in values.items():
        start, itemsize = header.entries[path].span.start, value.dtype.itemsize
        if not isinstance(value, Sharded) or value.form.layout.splits == 1:
            part = choose_part(value, on)
            if part is not None:
                source = TensorSource(value.local, path) if isinstance(value, Sharded) else value
                found.append(FilePiece(start + part.start * itemsize, source))
            continue
        for held, part, copy in list_parts(value, on):
            for mine in within(copy, part):
                adjoining = held[mine.source - part.start :][: mine.numel]
                places = mine._replace(source=0, target=0)
                found.append(FilePiece(start + mine.target * itemsize, TensorSource(adjoining, path), places=places))
    return found


def choose_part(value: Sharded | Source, on: Ranks) -> range | None:
    """The elements of a leaf, or of its part of a split one, that this process writes; None where other ranks do."""
    everything = range(value.shape.numel())
    if not isinstance(value, Sharded) or value.form.layout.replicated:
        return everything if on.number == 0 else None
    return None if any(map(on.along, value.form.layout.replica_axes)) else value.part


def list_parts(value: Sharded, on: Ranks) -> Iterator[tuple[Tensor, range, Copy]]:
    """For each part that this process has of a split leaf the elements that it writes, 1-d, which they are in the part,
    and which elements of the whole leaf are those of the part."""
    layout, part = value.form.layout, choose_part(value, on)
    if part:
        for held, place in list_positions(value.local.detach(), layout, on):
            yield held, part, find_copy(layout, value.index, place)
