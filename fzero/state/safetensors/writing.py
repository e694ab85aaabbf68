"""Writing: the ranks of a mesh write one file, or a folder of files, together: complete or not at all."""

from __future__ import annotations

import fcntl
import hashlib
import os
import secrets
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, TypeVar

from fzero.base.errors import FzeroError
from fzero.files.memory import memory_of
from fzero.layout.strides import Copy, Run, runs, within
from fzero.ranks.processes import find_end, name_process
from fzero.ranks.ranks import Ranks
from fzero.ranks.together import do_together, gather_words
from fzero.state.safetensors.header import Header, render_header
from fzero.state.safetensors.transfer import iter_parts, sync_directory, write_from
from fzero.state.sources import Source

T = TypeVar("T")
TEMPORARY = ".fzero-tmp"
"""The end of the name of a file or folder that is being written."""
MAX_NAME = 24
"""Characters of a target's name in its temporary name, which so is no longer than a filesystem takes."""
ITSELF = ""
"""The name of the one file of a plan that writes a file instead of a folder."""


class Piece(NamedTuple):
    """Values that a process writes: to `file`, from byte `offset` of its data on, side by side, or to the `places` that
    a copy from the row-major values to the elements from `offset` on says."""

    offset: int
    values: Source
    file: str = ITSELF
    places: Copy | None = None


class Plan(NamedTuple):
    """What the ranks of a mesh write together, and the `pieces` of this process.

    `headers` are the safetensors files by name. The one name `ITSELF` stands for the target itself; otherwise the
    target is a folder, in which the first rank also writes the `texts`. `origins` say where the values came from.
    """

    headers: Mapping[str, Header]
    pieces: list[Piece]
    origins: str = ""
    texts: Mapping[str, bytes] = {}

    @property
    def is_folder(self) -> bool:
        return ITSELF not in self.headers


def write(target: Path, make_plan: Callable[[], Plan], on: Ranks, chunk: int, caller: str) -> None:
    """Write a file or folder, which appears at `target` when it is complete. All ranks of `on` call `write` together.
    `make_plan` may raise. `caller` is the function's name in errors.

    Before, the file or folder has another name in the same directory, and files have no header. What a process that
    was killed left there is removed by the next `write` into the directory.

    Raises:
        FzeroError: on every rank, naming the rank that failed, when a rank cannot write; when ranks have other plans;
            for a folder that exists. After an error nothing new is there, and an old file is unchanged.
    """
    writer = _Writer(target, on, caller)
    try:
        writer.join(writer.on_all_ranks(lambda: writer.begin(make_plan())))
        writer.on_all_ranks(lambda: writer.write(chunk))
        writer.on_all_ranks(writer.commit)
    finally:
        writer.clean()


class _Announcement(NamedTuple):
    """The words of a rank to the other ranks before they write."""

    digest: str  # of headers and texts, and of where the state came from
    temporary: str  # the name of the file or folder that the first rank made; "" from the others


class _Writer:
    """One process's share of a write."""

    plan: Plan

    def __init__(self, target: Path, on: Ranks, caller: str) -> None:
        self.target, self.on, self.caller = target, on, caller
        self.is_first = on.number == 0
        self.temporary = ""
        self.lock: int | None = None
        self.heads: dict[str, bytes] = {}

    def on_all_ranks(self, do: Callable[[], T]) -> list[T]:
        """The result of `do()` on each rank, in rank order; an error on all ranks, when `do` raised on any."""
        gather = gather_words(self.on.members, self.caller, f"of {self.target}")
        return do_together(gather, do, str(self.target), "write it", "what was there before is as it was; save again")

    def begin(self, plan: Plan) -> _Announcement:
        """Adopt a plan. The first rank creates the files in their final sizes, all zeros, which no reader takes for
        safetensors files."""
        self.plan = plan
        self.heads = {name: render_header(header) for name, header in plan.headers.items()}
        if self.is_first:
            self._create()
        digest = hashlib.sha256(plan.origins.encode())
        for name, content in sorted([*self.heads.items(), *plan.texts.items()]):
            digest.update(f"\n{name}: {hashlib.sha256(content).hexdigest()}".encode())
        return _Announcement(digest.hexdigest(), self.temporary)

    def _create(self) -> None:
        """Create the files under a temporary name, and lock it."""
        if self.plan.is_folder and os.path.lexists(self.target):
            raise FzeroError(str(self.target), "exists", "give the path of a new folder, or remove the old one first")
        if os.path.isdir(self.target):
            raise FzeroError(str(self.target), "is a directory", "give the path of a file")
        if os.path.exists(self.target) and not os.path.isfile(self.target):  # a rename would remove it
            raise FzeroError(str(self.target), "is a FIFO, a socket or a device", "give the path of a file")
        remove_leftovers(self.target.parent)
        self.temporary = name_temporary(self.target)
        if self.plan.is_folder:
            self._path(ITSELF).mkdir()
            self.lock = open_and_lock(self._path(ITSELF))
        for name, head in self.heads.items():
            with open(self._path(name), "xb") as file:
                if name == ITSELF:
                    self.lock = open_and_lock(self._path(name))
                file.truncate(len(head) + self.plan.headers[name].nbytes)

    def _path(self, name: str) -> Path:
        """The path of a file while it is written."""
        return self.target.with_name(self.temporary) / name

    def join(self, announcements: list[_Announcement]) -> None:
        """Adopt the first rank's files.

        Raises:
            FzeroError: on every rank, when the plans of ranks differ.
        """
        digests = len({digest for digest, _ in announcements})
        if digests > 1:
            ranks = len(announcements)
            problem = f"{ranks} ranks save {digests} different trees: other leaves, shapes, dtypes, metadata or steps"
            raise FzeroError(str(self.target), problem, f"give {self.caller} the same tree on every rank")
        self.temporary = next(name for _, name in announcements if name)

    def write(self, chunk: int) -> None:
        """Write this process's pieces, file by file."""
        files: dict[str, list[Piece]] = defaultdict(list)
        for piece in self.plan.pieces:
            files[piece.file].append(piece)
        for name, pieces in files.items():
            with self._open(name) as fd:
                for piece in pieces:
                    _write_piece(fd, len(self.heads[name]), piece, chunk)

    def commit(self) -> None:
        """The first rank writes headers and texts, and gives the file or folder its name."""
        if not self.is_first:
            return
        for name, content in [*self.heads.items(), *self.plan.texts.items()]:
            with self._open(name) as fd:
                write_from(fd, memoryview(content), 0)
        if self.plan.is_folder:
            sync_directory(self._path(ITSELF))
            os.rename(self._path(ITSELF), self.target)  # fails where a folder with files appeared meanwhile
        else:
            os.replace(self._path(ITSELF), self.target)
        sync_directory(self.target.parent)

    @contextmanager
    def _open(self, name: str) -> Iterator[int]:
        """The file descriptor for writing; at the end of the block, the bytes are on the disk."""
        # Write-only: a file open for reading too lets an NFS client read whole pages and write them back later, with
        # old bytes in place of those that another rank has written meanwhile.
        fd = os.open(self._path(name), os.O_WRONLY | os.O_CREAT * (name in self.plan.texts), 0o666)
        try:
            yield fd
            os.fsync(fd)
        finally:
            os.close(fd)

    def clean(self) -> None:
        """The first rank removes what did not get its final name, and ends its lock."""
        if self.lock is not None:
            os.close(self.lock)
        if self.is_first and self.temporary:
            with suppress(OSError):  # the next save tries again, and an error that is on its way says more
                _remove(self._path(ITSELF))


def _write_piece(fd: int, start: int, piece: Piece, chunk: int) -> None:
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


def open_and_lock(path: Path) -> int | None:
    """A descriptor of a file or folder that this process has locked until the descriptor is closed. None where another
    process has locked it, or where the filesystem has no locks."""
    fd = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        return None
    return fd


def name_temporary(target: Path) -> str:
    """A new name, beside the target, of a file or folder that this process writes."""
    return f".{target.name[:MAX_NAME]}.{name_process()}.{secrets.token_hex(4)}{TEMPORARY}"


def remove_leftovers(directory: Path, *, is_reader: bool = False) -> None:
    """Remove what killed writers left in a directory. A writer that goes on holds a lock. A reader removes only what a
    process of this host left: the locks of another host may be unknown here."""
    with suppress(OSError):
        for path in directory.glob(f".*{TEMPORARY}"):
            _remove_leftover(path, is_reader)


def _remove_leftover(path: Path, is_reader: bool) -> None:
    has_ended = find_end(path.name.removesuffix(TEMPORARY).rpartition(".")[0].rpartition(".")[2])
    if has_ended is False or (is_reader and not has_ended):
        return
    with suppress(OSError):
        fd = None if has_ended else open_and_lock(path)
        if has_ended or fd is not None:
            _remove(path)
        if fd is not None:
            os.close(fd)


def _remove(path: Path) -> None:
    """Remove a file or a folder, if it is there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
