"""Saving: a tree of `Sharded` leaves as one safetensors file; each rank writes its own parts."""

from __future__ import annotations

import fcntl
import hashlib
import os
import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

from fzero.base import tree
from fzero.base.errors import FzeroError
from fzero.ranks.live import Live
from fzero.ranks.together import do_together, gather_words
from fzero.state.fill import CHUNK_NBYTES
from fzero.state.safetensors.header import Header, plan_header, render_header
from fzero.state.safetensors.transfer import iter_parts, memory_of, sync_directory, write_from
from fzero.state.sources import Source, TensorSource, source_of
from fzero.values.sharded import Sharded

T = TypeVar("T")
TEMPORARY = ".fzero-tmp"
"""The end of the name of a file that is being written."""


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
    Hugging Face's transformers need `metadata={"format": "pt"}`.

    Raises:
        FzeroError: for a leaf that the format cannot hold; on every rank, naming the rank that failed, when a rank
            cannot write, for example because `chunk` is smaller than one element. After an error the new file is
            removed, and an old file at `path` is unchanged.
    """
    leaves = tree.leaves(values)
    save = _Save(tree.paths(values), leaves, _find_live(leaves), Path(path), dict(metadata or {}))
    try:
        save.join(save.on_all_ranks(save.begin))
        save.on_all_ranks(lambda: save.write(chunk))
        save.on_all_ranks(save.commit)
    finally:
        save.clean()


class _Announcement(NamedTuple):
    """The words of a rank to the other ranks before they write."""

    digest: str  # of the header, and of where the state came from
    temporary: str  # the name of the file that the first rank made; "" from the others


class _Save:
    """One process's share of a save. `on` is this rank of the mesh, None for a process that saves alone."""

    def __init__(
        self, paths: list[str], leaves: list[Any], on: Live | None, target: Path, metadata: dict[str, str]
    ) -> None:
        self.paths, self.leaves, self.on, self.target, self.metadata = paths, leaves, on, target, metadata
        self.is_first = on is None or on.number == 0
        self.temporary = ""
        self.lock: BinaryIO | None = None
        self.head = b""
        self.pieces: list[Piece] = []

    def on_all_ranks(self, do: Callable[[], T]) -> list[T]:
        """The result of `do()` on each rank, in rank order; an error on all ranks, when `do` raised on any."""
        gather = gather_words(None if self.on is None else self.on.members, f"save_safetensors of {self.target}")
        return do_together(gather, do, str(self.target), "write it", "what was there before is as it was; save again")

    def begin(self) -> _Announcement:
        """Plan the file. The first rank creates it in its final size, all zeros, which no reader takes for a
        safetensors file."""
        header = self._plan()
        self.head = render_header(header)
        if self.is_first:
            if self.target.is_dir():
                raise FzeroError(str(self.target), "is a directory", "give the path of a file")
            _remove_leftovers(self.target.parent)
            self.temporary = f".{self.target.name}.{secrets.token_hex(4)}{TEMPORARY}"
            self.lock = open(self.target.with_name(self.temporary), "xb")  # noqa: SIM115  `clean` closes it
            _lock(self.lock)
            self.lock.truncate(len(self.head) + header.nbytes)
        origins = "".join(f"{leaf.origin}\n" for leaf in self.leaves if isinstance(leaf, Sharded))
        return _Announcement(hashlib.sha256(self.head + origins.encode()).hexdigest(), self.temporary)

    def _plan(self) -> Header:
        """The header of the file. Sets `self.pieces`."""
        for path, count in Counter(self.paths).items():
            if count > 1:
                raise FzeroError(path, f"{count} leaves have this path", "a file has one tensor a key: rename an entry")
        values = {
            path: leaf if isinstance(leaf, Sharded) else source_of(leaf, path)
            for path, leaf in zip(self.paths, self.leaves)
        }
        header = plan_header(values, self.metadata)
        self.pieces = plan_pieces(values, header, self.on)
        return header

    def join(self, announcements: list[_Announcement]) -> None:
        """Adopt the first rank's file.

        Raises:
            FzeroError: on every rank, when the trees of ranks differ.
        """
        digests = len({digest for digest, _ in announcements})
        if digests > 1:
            ranks = len(announcements)
            problem = f"{ranks} ranks save {digests} different trees: other leaves, shapes, dtypes, metadata or steps"
            raise FzeroError(str(self.target), problem, "give save_safetensors the same tree on every rank")
        self.temporary = next(name for _, name in announcements if name)

    def write(self, chunk: int) -> None:
        """Write this process's pieces."""
        with self._open() as fd:
            for offset, values in self.pieces:
                position = len(self.head) + offset
                for part in iter_parts(values, chunk):
                    write_from(fd, memory_of(part), position)
                    position += part.nbytes

    def commit(self) -> None:
        """The first rank writes the header and gives the file its name."""
        if self.is_first:
            with self._open() as fd:
                write_from(fd, memoryview(self.head), 0)
            os.replace(self.target.with_name(self.temporary), self.target)
            sync_directory(self.target.parent)

    @contextmanager
    def _open(self) -> Iterator[int]:
        """The file descriptor for writing; at the end of the block, the bytes are on the disk."""
        # Write-only: a file open for reading too lets an NFS client read whole pages and write them back later, with
        # old bytes in place of those that another rank has written meanwhile.
        fd = os.open(self.target.with_name(self.temporary), os.O_WRONLY)
        try:
            yield fd
            os.fsync(fd)
        finally:
            os.close(fd)

    def clean(self) -> None:
        """The first rank removes a file that did not get its final name, and ends its lock."""
        if self.lock is not None:
            self.lock.close()
        if self.is_first and self.temporary:
            self.target.with_name(self.temporary).unlink(missing_ok=True)


class Piece(NamedTuple):
    """The share of a leaf that a process writes: all of `values`, from byte `offset` of the data on."""

    offset: int
    values: Source


def plan_pieces(values: Mapping[str, Sharded | Source], header: Header, on: Live | None) -> list[Piece]:
    """The pieces that this process writes. All ranks of a mesh together write each byte once."""
    found = []
    for path, value in values.items():
        part = _choose_part(value, on)
        if part is not None:
            held = TensorSource(value.local, path) if isinstance(value, Sharded) else value
            found.append(Piece(header.entries[path].span.start + part.start * value.dtype.itemsize, held))
    return found


def _choose_part(value: Sharded | Source, on: Live | None) -> range | None:
    """The elements of a leaf that this process writes; None where other ranks write the leaf."""
    everything = range(value.shape.numel())
    if on is None:
        return everything
    if not isinstance(value, Sharded) or value.form.layout.replicated:
        return everything if on.number == 0 else None
    copies = (axis for axis in on.mesh.names if axis != on.mesh.shard_axis)
    return None if any(on.transports[axis].rank for axis in copies) else value.part


def _find_live(leaves: list[Any]) -> Live | None:
    """This rank of the mesh that the `Sharded` leaves lie on; None for a process that saves alone.

    Raises:
        FzeroError: for leaves on several meshes, and for leaves inside of a step.
    """
    sharded = [leaf for leaf in leaves if isinstance(leaf, Sharded)]
    for leaf in sharded:
        if leaf.on.is_tracing:
            raise FzeroError(
                leaf.path, "is saved inside of a step, where it has no values", "save what the step returns"
            )
        if leaf.on is not sharded[0].on:
            first = sharded[0]
            problem = f"lies on {leaf.on.mesh}, {first.path} on {first.on.mesh}: other process groups"
            raise FzeroError(leaf.path, problem, "save the leaves of one mesh in one file")
    on = sharded[0].on if sharded else None
    return on if isinstance(on, Live) else None


def _lock(file: BinaryIO) -> bool:
    """Lock a file for this process, until the file is closed. False where another process has locked the file, or where
    the filesystem has no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _remove_leftovers(directory: Path) -> None:
    """Remove files that a killed save left in a directory. A save that goes on holds a lock of its file."""
    for path in directory.glob(f".*{TEMPORARY}"):
        with suppress(OSError), open(path, "rb") as file:
            if _lock(file):
                path.unlink()
