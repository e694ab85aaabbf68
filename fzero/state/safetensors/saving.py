"""Saving: a tree of sharded leaves as one safetensors file, which every rank writes its own parts of."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fzero.base import tree
from fzero.base.errors import FzeroError
from fzero.ranks.failure import group_by_word, name_ranks
from fzero.ranks.live import Live
from fzero.state.fill import CHUNK, elements
from fzero.state.safetensors.header import Header, planned, rendered
from fzero.state.safetensors.transfer import memory, write_from
from fzero.state.sources import Source, TensorSource, source_of
from fzero.values.sharded import Sharded

T = TypeVar("T")


def save_safetensors(
    values: tree.Tree,
    path: str | os.PathLike[str],
    *,
    chunk: int = CHUNK,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a tree as one safetensors file: each leaf whole, its dotted path the key, whatever the number of ranks.

    All ranks of the mesh call it together, on a filesystem that all of them see at `path`. Each writes what it holds,
    nothing is gathered: `chunk` bytes of a leaf are copied at a time where it is not on the CPU. What all ranks hold
    (replicated leaves, replicas, and tensors, arrays and sources beside the `Sharded` leaves) is written by the first.
    A tree without `Sharded` leaves, or on a `VirtualMesh`, is written whole by the process that calls.

    The file appears when it is complete: until then it has another name in the same directory, and no header. Hugging
    Face's transformers want `metadata={"format": "pt"}`.

    Raises:
        FzeroError: for what the format cannot hold; and on every rank, naming the one that failed, when any cannot
            write, as with a chunk without an element. Then nothing of this file is left, and what was at `path` before
            is as it was.
    """
    leaves = tree.leaves(values)
    save = _Save(tree.paths(values), leaves, _place(leaves), Path(path), dict(metadata or {}))
    try:
        save.join(save.together(save.begin))
        save.together(lambda: save.write(chunk))
        save.together(save.commit)
    finally:
        save.clean()


class _Begun(NamedTuple):
    """What a rank tells the others before they write."""

    digest: str  # of the header
    temporary: str  # the name of the file that the first rank made; "" from the others


class _Save:
    """One save, as one process takes part in it. `on` is its place in a mesh, None where it is alone."""

    def __init__(
        self, paths: list[str], leaves: list[Any], on: Live | None, target: Path, metadata: dict[str, str]
    ) -> None:
        self.paths, self.leaves, self.on, self.target, self.metadata = paths, leaves, on, target, metadata
        self.is_first = on is None or on.number == 0
        self.temporary = ""
        self.head = b""
        self.pieces: list[Piece] = []

    def together(self, do: Callable[[], T]) -> list[T]:
        """`do()` of every rank.

        Raises:
            FzeroError: on all of them, when it raised on any.
        """
        value, error = None, None
        try:
            value = do()
        except Exception as caught:
            error = caught
        told = self._told((value, None if error is None else _cause(error)))
        failed = {rank: cause for rank, (_, cause) in told.items() if cause is not None}
        if failed:
            if len(told) == 1 and isinstance(error, FzeroError):
                raise error
            problem = ", ".join(
                f"{name_ranks(ranks)} could not write it: {cause}" for cause, ranks in group_by_word(failed).items()
            )
            raise FzeroError(str(self.target), problem, "what was there before is as it was; save again") from error
        return [value for value, _ in told.values()]

    def _told(self, word: Any) -> dict[int, Any]:
        """What each rank says."""
        if self.on is None or self.on.members.group is None:
            return {0: word}
        members, words = self.on.members, [None] * len(self.on.members.ranks)
        with members.begin(f"save_safetensors of {self.target}"):
            dist.all_gather_object(words, word, group=members.group)
        return dict(zip(members.ranks, words))

    def begin(self) -> _Begun:
        """Plan the file; the first rank makes it, of its final size and all zeros: no safetensors file yet."""
        header = self._planned()
        self.head = rendered(header)
        if self.is_first:
            if self.target.is_dir():
                raise FzeroError(str(self.target), "is a directory", "give the path of a file")
            self.temporary = f".{self.target.name}.{secrets.token_hex(4)}.tmp"
            with open(self.target.with_name(self.temporary), "xb") as file:
                file.truncate(len(self.head) + header.nbytes)
        return _Begun(hashlib.sha256(self.head).hexdigest(), self.temporary)

    def _planned(self) -> Header:
        """The header of the file. Finds this process's pieces."""
        for path, count in Counter(self.paths).items():
            if count > 1:
                raise FzeroError(path, f"{count} leaves have this path", "a file has one tensor a key: rename an entry")
        values = {path: _value(leaf, path) for path, leaf in zip(self.paths, self.leaves)}
        header = planned(values, self.metadata)
        self.pieces = pieces(values, header, self.on)
        return header

    def join(self, begun: list[_Begun]) -> None:
        """Go on with the first rank's file.

        Raises:
            FzeroError: on every rank, when their trees differ.
        """
        digests = len({digest for digest, _ in begun})
        if digests > 1:
            problem = f"{len(begun)} ranks save {digests} different trees: of other leaves, shapes, dtypes or metadata"
            raise FzeroError(str(self.target), problem, "give save_safetensors the same tree on every rank")
        self.temporary = next(name for _, name in begun if name)

    def write(self, chunk: int) -> None:
        """Write this process's pieces."""
        with self._opened() as fd:
            for offset, values in self.pieces:
                position = len(self.head) + offset
                for part in _parts(values, chunk):
                    write_from(fd, memory(part), position)
                    position += part.nbytes

    def commit(self) -> None:
        """The first rank writes the header and gives the file its name."""
        if self.is_first:
            with self._opened() as fd:
                write_from(fd, memoryview(self.head), 0)
            os.replace(self.target.with_name(self.temporary), self.target)
            _sync_directory(self.target.parent)

    @contextmanager
    def _opened(self) -> Iterator[int]:
        """The file, for writing only: else a client of NFS may read whole pages, and later write back as they were
        bytes that another rank has written meanwhile. On the disk at the end of the block."""
        fd = os.open(self.target.with_name(self.temporary), os.O_WRONLY)
        try:
            yield fd
            os.fsync(fd)
        finally:
            os.close(fd)

    def clean(self) -> None:
        """The first rank removes what did not get its name."""
        if self.is_first and self.temporary:
            self.target.with_name(self.temporary).unlink(missing_ok=True)


class Piece(NamedTuple):
    """What a process writes of a leaf: all of `values`, from byte `offset` of the data on."""

    offset: int
    values: Source


def pieces(values: Mapping[str, Sharded | Source], header: Header, on: Live | None) -> list[Piece]:
    """What the process at this place writes. Over all ranks of a mesh that is each byte once."""
    found = []
    for path, value in values.items():
        part = _part(value, on)
        if part is not None:
            held = TensorSource(value.local, path) if isinstance(value, Sharded) else value
            found.append(Piece(header.entries[path].span.start + part.start * value.dtype.itemsize, held))
    return found


def _part(value: Sharded | Source, on: Live | None) -> range | None:
    """The elements of a leaf that a process writes; None where it leaves the leaf to others."""
    whole = range(value.shape.numel())
    if on is None:
        return whole
    if not isinstance(value, Sharded) or value.layout.replicated:
        return whole if on.number == 0 else None
    copies = (axis for axis in on.mesh.names if axis != on.mesh.shard_axis)
    return None if any(on.transports[axis].rank for axis in copies) else value.part


def _place(leaves: list[Any]) -> Live | None:
    """The place of this process among the ranks that save these leaves together; None where it is alone.

    Raises:
        FzeroError: for leaves on several meshes, and inside of a step.
    """
    sharded = [leaf for leaf in leaves if isinstance(leaf, Sharded)]
    for leaf in sharded:
        if leaf.on.is_tracing:
            raise FzeroError(
                leaf.path, "is saved inside of a step, where it has no values", "save what the step returns"
            )
        if leaf.on is not sharded[0].on:
            problem = f"lies on {leaf.layout.mesh}, {sharded[0].path} on {sharded[0].layout.mesh}: other process groups"
            raise FzeroError(leaf.path, problem, "save the leaves of one mesh in one file")
    on = sharded[0].on if sharded else None
    return on if isinstance(on, Live) else None


def _value(leaf: Any, path: str) -> Sharded | Source:
    return leaf if isinstance(leaf, Sharded) else source_of(leaf, path)


def _cause(error: Exception) -> str:
    if isinstance(error, FzeroError):
        return str(error)
    return f"{type(error).__name__}: {error}"


def _parts(values: Source, chunk: int) -> Iterator[Tensor]:
    """All elements in order, as contiguous CPU tensors: views of what is one already, else copies in one buffer of
    `chunk` bytes, each valid until the next."""
    numel, step = values.shape.numel(), elements(chunk, values.dtype)
    if isinstance(values, TensorSource) and _is_plain(values):
        yield from values.tensor.reshape(-1).split(step)
        return
    buffer = torch.empty(min(step, numel), dtype=values.dtype)
    for start in range(0, numel, step):
        part = buffer[: min(step, numel - start)]
        values.read(start, part)
        yield part


def _is_plain(values: TensorSource) -> bool:
    """Whether the tensor's memory, read from its start, is its values in order."""
    tensor = values.tensor
    lazy = tensor.is_conj() or tensor.is_neg()
    return tensor.is_cpu and tensor.is_contiguous() and not lazy and tensor.dtype == values.dtype


def _sync_directory(directory: Path) -> None:
    with suppress(OSError):  # the file has its name; some filesystems cannot sync a directory
        fd = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
