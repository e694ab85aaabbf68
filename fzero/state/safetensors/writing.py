"""Writing: the ranks of a mesh write one file, or a folder of files, together: complete or not at all."""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from fzero.base.errors import FzeroError
from fzero.base.progress import Progress
from fzero.files.memory import memory_of
from fzero.layout.strides import Copy, Run, runs, within
from fzero.ranks.ranks import Ranks
from fzero.ranks.together import gather_words
from fzero.state.publishing import Publication, give_name, open_temporary
from fzero.state.safetensors.header import NAMES, Header, render_header
from fzero.state.safetensors.transfer import iter_parts, write_from
from fzero.state.sources import Source

ITSELF = ""
"""The name of the one file of a plan that writes a file instead of a folder."""


class FilePiece(NamedTuple):
    """Values that a process writes: to `file`, from byte `offset` of its data on, side by side, or to the `places` that
    a copy from the row-major values to the elements from `offset` on says."""

    offset: int
    values: Source
    file: str = ITSELF
    places: Copy | None = None


class WritePlan(NamedTuple):
    """What the ranks of a mesh write together, and the `pieces` of this process.

    `headers` are the safetensors files by name. The one name `ITSELF` stands for the target itself; otherwise the
    target is a folder, in which the first rank also writes the `texts`. `origins` say where the values came from.
    """

    headers: Mapping[str, Header]
    pieces: list[FilePiece]
    origins: Sequence[str] = ()
    texts: Mapping[str, bytes] = {}

    @property
    def is_folder(self) -> bool:
        return ITSELF not in self.headers

    def list_lines(self) -> list[str]:
        """What all ranks must have alike, a line for each leaf, tensor and text."""
        found = list(self.origins)
        for file, header in self.headers.items():
            for key, (dtype, shape, span) in header.entries.items():
                found.append(f"{key}: {NAMES[dtype]}{list(shape)} at byte {span.start} {file}".rstrip())
            found += [f"metadata {key}: {text} {file}".rstrip() for key, text in header.metadata.items()]
        return [*found, *(f"{file}: {hashlib.sha256(text).hexdigest()}" for file, text in self.texts.items())]


def write(target: Path, make_plan: Callable[[], WritePlan], on: Ranks, chunk: int, caller: str) -> None:
    """Write a file or folder, which appears at `target` when it is complete. All ranks of `on` call `write` together.
    `make_plan` may raise.

    Before, the file or folder has another name in the same directory, and files have no header. What a process that
    was killed left there is removed by the next `write` into the directory.

    Raises:
        FzeroError: on every rank, naming the rank that failed, when a rank cannot write; when ranks have other plans;
            for a folder that exists. After an error nothing new is there, and an old file is unchanged.
    """
    files = _Files(target, chunk)
    publication = Publication(target, caller, gather_words(on.members, caller, f"of {target}"), on.number == 0)
    publication.run(lambda: files.adopt(make_plan()), files.create, files.write, files.commit)


class _Files:
    """The files of a plan, while they have a temporary name."""

    plan: WritePlan
    path: Path
    heads: Mapping[str, bytes]

    def __init__(self, target: Path, chunk: int) -> None:
        self.target, self.chunk = target, chunk

    def adopt(self, plan: WritePlan) -> list[str]:
        """The plan's lines."""
        self.plan, self.heads = plan, {name: render_header(header) for name, header in plan.headers.items()}
        return plan.list_lines()

    @contextmanager
    def create(self) -> Iterator[str]:
        """Create the files in their final sizes, all zeros, which no reader takes for safetensors files."""
        if self.plan.is_folder and os.path.lexists(self.target):
            raise FzeroError(str(self.target), "exists", "give the path of a new folder, or remove the old one first")
        if os.path.isdir(self.target):
            raise FzeroError(str(self.target), "is a directory", "give the path of a file")
        if os.path.exists(self.target) and not os.path.isfile(self.target):  # a rename would remove it
            raise FzeroError(str(self.target), "is a FIFO, a socket or a device", "give the path of a file")
        with open_temporary(self.target, is_folder=self.plan.is_folder) as name:
            for file, head in self.heads.items():
                with open(self.target.parent / name / file, "ab") as opened:
                    opened.truncate(len(head) + self.plan.headers[file].nbytes)
            yield name

    def write(self, name: str) -> None:
        """Write this process's pieces, file by file."""
        self.path = self.target.parent / name
        files: dict[str, list[FilePiece]] = defaultdict(list)
        for piece in self.plan.pieces:
            files[piece.file].append(piece)
        progress = Progress("writing", str(self.target), "pieces", len(self.plan.pieces))
        for file, pieces in files.items():
            with self._open(file) as fd:
                for piece in pieces:
                    _write_piece(fd, len(self.heads[file]), piece, self.chunk)
                    progress.count(file)

    def commit(self, _: object) -> None:
        """Write headers and texts, and give the file or folder its name."""
        for file, content in [*self.heads.items(), *self.plan.texts.items()]:
            with self._open(file) as fd:
                write_from(fd, memoryview(content), 0)
        give_name(self.path, self.target, replaces=not self.plan.is_folder and os.path.lexists(self.target))

    @contextmanager
    def _open(self, file: str) -> Iterator[int]:
        """The file descriptor for writing; at the end of the block, the bytes are on the disk."""
        # Write-only: a file open for reading too lets an NFS client read whole pages and write them back later, with
        # old bytes in place of those that another rank has written meanwhile.
        fd = os.open(self.path / file, os.O_WRONLY | os.O_CREAT * (file in self.plan.texts), 0o666)
        try:
            yield fd
            os.fsync(fd)
        finally:
            os.close(fd)


def _write_piece(fd: int, start: int, piece: FilePiece, chunk: int) -> None:
    """Write a piece into a file whose data starts at byte `start`."""
    done, itemsize = 0, piece.values.dtype.itemsize
    for part in iter_parts(piece.values, chunk):
        memory = memory_of(part)
        for source, target, numel in _find_runs(piece.places, range(done, done + part.numel())):
            values = memory[(source - done) * itemsize :][: numel * itemsize]
            write_from(fd, values, start + piece.offset + target * itemsize)
        done += part.numel()


def _find_runs(places: Copy | None, flat: range) -> Iterator[Run]:
    """Where elements of a piece go: runs of elements."""
    if places is None:
        yield Run(flat.start, flat.start, len(flat))
        return
    for part in within(places, flat):
        yield from runs(part)
