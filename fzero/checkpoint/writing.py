"""Writing: one save, from a plan to a checkpoint that appears all at once (`fzero.state.publishing` says how).

Each rank writes its file. The first rank writes the manifest, which has the size and checksum of each file, renames the
folder, and removes what is too old.
"""

from __future__ import annotations

import contextvars
import hashlib
import os
import secrets
import threading
import time
import warnings
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fzero import __version__
from fzero.base import tree
from fzero.base.errors import FzeroError
from fzero.base.progress import Progress
from fzero.checkpoint.folder import (
    check_free,
    list_steps,
    open_partial,
    partial_folder,
    remove,
    step_folder,
)
from fzero.checkpoint.manifest import (
    MANIFEST,
    FileEntry,
    Manifest,
    check_metadata,
    name_file,
    render_crc,
    render_manifest,
    tag_file,
)
from fzero.checkpoint.pieces import CheckpointPlan, describe_mesh, plan
from fzero.checkpoint.staging import Staging
from fzero.files.memory import memory_of
from fzero.ranks.ranks import Ranks
from fzero.ranks.together import Gather
from fzero.ranks.virtual import ALONE
from fzero.state.fill import CHUNK_NBYTES
from fzero.state.publishing import Publication, give_name, sync_directory
from fzero.state.safetensors.header import plan_header, render_header
from fzero.state.safetensors.transfer import begin_writeback, iter_parts
from fzero.state.sources import Source
from fzero.values.sharded import Sharded

AGAIN = "older checkpoints are as they were; mend it and save again"
PIECE_NBYTES = 256 << 10
"""Bytes that are summed and then written at a time: few enough that the processor's cache holds them between."""
BEHIND_NBYTES = 16 << 20
"""Bytes after which the disk begins to take what was written. So it works while the next bytes are summed, and the sync
at the end finds little to do: a save of 512 MiB takes 0.53 seconds and not 0.65."""


class SaveArguments(NamedTuple):
    """What a save was asked for: the arguments of `save`."""

    path: Path
    step: int
    keep: int | None
    overwrite: bool
    sha256: bool
    metadata: dict[str, Any]


class Saving:
    """A save, done or under way. `seconds` says how long this rank took to plan, copy, write, checksum and sync."""

    def __init__(self, options: SaveArguments, on: Ranks, gather: Gather) -> None:
        self.path, self.step = options.path, options.step
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.gather = gather
        self._options, self._on = options, on
        self._plan: CheckpointPlan | None = None
        self._files: dict[int, dict[str, Source]] = {}
        self._lines: list[str] = []  # what ranks must have alike, as it was at the call
        self._save = ""  # the first rank's number, which no other save has
        self._failure: Exception | None = None
        self._staged: Callable[[], None] = lambda: None
        # Not `Thread.join`: where Python 3.11 is interrupted in it, it takes the thread for ended
        self._ended = threading.Event()
        self._ended.set()
        self.is_told = False  # whether the caller has heard of the outcome

    def wait(self) -> None:
        """Return when the checkpoint is there.

        Raises:
            FzeroError: on all ranks, where a rank failed.
        """
        self._ended.wait()
        self.is_told = True
        if self._failure is not None:
            raise self._failure

    @property
    def is_done(self) -> bool:
        """Whether `wait` would return or raise at once."""
        return self._ended.is_set()

    def __repr__(self) -> str:
        state = "under way" if not self.is_done else "failed" if self._failure else "done"
        return f"Saving({step_folder(self.path, self.step)}: {state})"

    def prepare(self, state: tree.Tree) -> None:
        """Plan this rank's files. An error is kept: the other ranks hear of it where they wait for this one."""
        with self._time("plan"):
            try:
                self._plan = plan(state, self._on)
                self._files = {number: self._plan.pick(number) for number in self._on.numbers}  # virtual ranks: all
                self._lines = [f"step {self.step}", *self._plan.list_lines()]
            except Exception as error:
                self._failure = error

    def stage(self, staging: Staging) -> None:
        """Copy what this rank writes to the memory of the host."""
        with self._time("copy"):
            try:
                if self._plan is not None:
                    state = {path for path, leaf in self._plan.leaves.items() if isinstance(leaf, Sharded)}
                    self._files = staging.copy(self._files, self._on, state.__contains__)
                    self._staged = staging.wait
            except Exception as error:
                self._failure = self._failure or error

    def start(self) -> None:
        """Run in a thread; in this one, where the process may have no further thread."""
        self._ended.clear()
        try:
            within = contextvars.copy_context()  # of this thread, whose progress is watched
            threading.Thread(target=within.run, args=(self._run_kept,), name=f"fzero save of step {self.step}").start()
        except RuntimeError:
            self._run_kept()  # the threads of other ranks wait for this rank

    def _run_kept(self) -> None:
        try:
            self.run()
        except Exception as error:
            self._failure = error
            warnings.warn(str(error), RuntimeWarning, stacklevel=1)  # there may be no next call that raises it
        finally:
            self._ended.set()

    def run(self) -> None:
        """Write, and make the checkpoint appear. Collective."""
        on, where = self._on, step_folder(self.path, self.step)
        try:
            publication = Publication(where, "save", self.gather, on.number == 0, "save", AGAIN)
            publication.run(self._list_lines, self._take, self._write, self._commit)
        finally:
            # which hold the memory of the tree, and its mesh
            self._files, self._plan, self._lines, self._on = {}, None, [], ALONE

    def _list_lines(self) -> list[str]:
        if self._failure is not None:
            raise self._failure
        return self._lines

    @contextmanager
    def _take(self) -> Iterator[str]:
        """Take the folder. Yields the number of the save."""
        check_metadata(self._options.metadata)
        with open_partial(self.path, self.step):
            check_free(self.path, self.step, self._options.overwrite)
            yield secrets.token_hex(16)

    def _write(self, save: str) -> dict[int, FileEntry]:
        """Write this process's files. What is written of each, by number."""
        self._save = save
        self._staged()
        folder = partial_folder(self.path, self.step)
        folder.mkdir(parents=True, exist_ok=True)  # a client of a network filesystem may not know it yet
        written = {number: self._write_file(folder, number, values) for number, values in self._files.items()}
        with self._time("sync"):
            sync_directory(folder)
        return written

    def _write_file(self, folder: Path, number: int, values: Mapping[str, Source]) -> FileEntry:
        """Write one file and put it on the disk. Values lie in the order of the header, without gaps."""
        header = plan_header(values, tag_file(self._save, number))
        sums, begun, head = _Sums(self._options.sha256), 0, render_header(header)
        progress = Progress("writing", str(folder), "bytes", len(head) + header.nbytes)
        with open(
            folder / name_file(number), "xb", buffering=PIECE_NBYTES // 4
        ) as out:  # x: another job's file would be an error
            for data in _iter_data(head, [values[key] for key in header.entries]):
                with self._time("checksum"):
                    sums.add(data)
                with self._time("write"):
                    out.write(data)
                    if sums.nbytes - begun >= BEHIND_NBYTES:
                        begin_writeback(out.fileno())
                        begun = sums.nbytes
                progress.count(name_file(number), len(data))
            with self._time("sync"):
                out.flush()
                os.fsync(out.fileno())
        return sums.describe()

    def _commit(self, written: list[dict[int, FileEntry]]) -> None:
        """Write the manifest, and give the checkpoint its name."""
        assert self._plan is not None
        files = {number: file for each in written for number, file in each.items()}
        grid, places, values, _ = self._plan
        sizes, axis = describe_mesh(self._on)
        listed = [files[number] for number in range(grid.files)]
        known = Manifest(
            self.step, self._save, sizes, axis, grid, places, values, listed, self._options.metadata, _versions()
        )
        folder, target = partial_folder(self.path, self.step), step_folder(self.path, self.step)
        self._check_files(grid.files)
        with self._time("sync"):
            with open(folder / MANIFEST, "xb") as out:
                out.write(render_manifest(known))
                out.flush()
                os.fsync(out.fileno())
            give_name(folder, target, replaces=self._options.overwrite and target.exists())
        if self._options.keep is not None:
            others = [step for step in list_steps(self.path) if step != self.step]
            for step in others[: max(len(others) - self._options.keep + 1, 0)]:
                remove(self.path, step)

    def _check_files(self, count: int) -> None:
        """Raise for files that ranks wrote, and that are not where this rank looks."""
        folder = partial_folder(self.path, self.step)
        missing = sorted({name_file(number) for number in range(count)} - set(os.listdir(folder)))
        if missing:
            problem = f"lacks {', '.join(missing[:8])}, which other ranks wrote: they see another folder of this name"
            raise FzeroError(str(folder), problem, "give a folder that all ranks share, by its whole path")

    @contextmanager
    def _time(self, what: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[what] += time.perf_counter() - start


class _Sums:
    """Size and sums of the bytes of a file, as they are written."""

    def __init__(self, sha256: bool) -> None:
        self.nbytes, self.crc, self.sha = 0, 0, hashlib.sha256() if sha256 else None

    def add(self, data: Any) -> None:
        self.nbytes, self.crc = self.nbytes + len(data), zlib.crc32(data, self.crc)
        if self.sha is not None:
            self.sha.update(data)

    def describe(self) -> FileEntry:
        return FileEntry(self.nbytes, render_crc(self.crc), self.sha.hexdigest() if self.sha else "")


def _iter_data(head: bytes, values: list[Source]) -> Iterator[Any]:
    yield head
    for source in values:
        for part in iter_parts(source, CHUNK_NBYTES):
            data = memory_of(part)
            yield from (data[start : start + PIECE_NBYTES] for start in range(0, len(data), PIECE_NBYTES))


def _versions() -> dict[str, str]:
    return {"fzero": __version__, "torch": torch.__version__}
