"""Writing: one save, from a plan to a checkpoint that appears all at once.

    each rank        writes its file, and puts it on the disk
    all ranks        tell each other the size and checksum of their files, or their errors: one all-gather
    the first rank   writes the manifest, renames the folder, removes what is too old
    all ranks        hear that it is done: one all-gather, as a barrier

To plan takes no message.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
import warnings
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from importlib import metadata as packages
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fzero.base import tree
from fzero.base.errors import FzeroError
from fzero.checkpoint.folder import hold, list_steps, partial_folder, publish, remove, remove_leftovers, step_folder
from fzero.checkpoint.manifest import MANIFEST, File, Manifest, name_file, render_crc, render_manifest
from fzero.checkpoint.pieces import Plan, hash_lines, plan
from fzero.checkpoint.staging import Staging
from fzero.ranks.homes import Home
from fzero.ranks.together import Gather, do_together
from fzero.ranks.virtual import Virtual
from fzero.state.fill import CHUNK_NBYTES
from fzero.state.safetensors.header import plan_header, render_header
from fzero.state.safetensors.transfer import begin_writeback, iter_parts, memory_of, sync_directory
from fzero.state.sources import Source
from fzero.values.sharded import Sharded

AGAIN = "older checkpoints are as they were; mend it and save again"
PIECE_NBYTES = 256 << 10
"""Bytes that are summed and then written at a time: few enough that the processor's cache holds them between."""
BEHIND_NBYTES = 16 << 20
"""Bytes after which the disk begins to take what was written. So it works while the next bytes are summed, and the sync
at the end finds little to do: a save takes a quarter less time."""


class Options(NamedTuple):
    """What a save was asked for: the arguments of `save`."""

    path: Path
    step: int
    keep: int | None
    overwrite: bool
    sha256: bool
    metadata: dict[str, Any]


class _Record(NamedTuple):
    """What a rank tells the others of its part: a hash of its plan, and its files by number."""

    plan: str
    files: dict[int, File]


class Saving:
    """A save, done or under way. `seconds` says how long this rank took to plan, copy, write, checksum and sync."""

    def __init__(self, options: Options, on: Home | None, gather: Gather) -> None:
        self.path, self.step = options.path, options.step
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.gather = gather
        self._options, self._on = options, on
        self._plan: Plan | None = None
        self._files: dict[int, dict[str, Source]] = {}
        self._failure: Exception | None = None
        self._staged: Callable[[], None] = lambda: None
        self._thread: threading.Thread | None = None
        self.is_told = False  # whether the caller has heard of the outcome

    def wait(self) -> None:
        """Return when the checkpoint is there.

        Raises:
            FzeroError: on all ranks, where a rank failed.
        """
        if self._thread is not None:
            self._thread.join()
        self.is_told = True
        if self._failure is not None:
            raise self._failure

    @property
    def is_done(self) -> bool:
        """Whether `wait` would return or raise at once."""
        return self._thread is None or not self._thread.is_alive()

    def __repr__(self) -> str:
        state = "under way" if not self.is_done else "failed" if self._failure else "done"
        return f"Saving({step_folder(self.path, self.step)}: {state})"

    def prepare(self, state: tree.Tree) -> None:
        """Plan this rank's files. An error is kept: the other ranks hear of it where they wait for this one."""
        with self._time("plan"):
            try:
                self._plan = plan(state, None if self._on is None else self._on.mesh)
                self._files = {number: self._plan.pick(number) for number in self._list_numbers()}
            except Exception as error:
                self._failure = error

    def _list_numbers(self) -> list[int]:
        """The files that this process writes. Virtual ranks of one process write all."""
        if isinstance(self._on, Virtual):
            return list(range(self._on.mesh.size()))
        return [0 if self._on is None else self._on.number]

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
        """Run in a thread."""
        self._thread = threading.Thread(target=self._run_kept, name=f"fzero save of step {self.step}")
        self._thread.start()

    def _run_kept(self) -> None:
        try:
            self.run()
        except Exception as error:
            self._failure = error
            warnings.warn(str(error), RuntimeWarning, stacklevel=1)  # there may be no next call that raises it

    def run(self) -> None:
        """Write, and make the checkpoint appear. Collective."""
        where = str(step_folder(self.path, self.step))
        try:
            with ExitStack() as stack:
                records = do_together(self.gather, lambda: self._write(stack), where, "save", AGAIN)
                self._compare(records)
                do_together(self.gather, lambda: self._commit(records), where, "save", AGAIN)
        except BaseException:
            self._clean()
            raise
        finally:
            self._files, self._plan = {}, None  # which hold the tree's memory

    def _clean(self) -> None:
        """Remove this process's files, and no others: another rank may be in its next save."""
        for number in self._files:
            with suppress(OSError):
                (partial_folder(self.path, self.step) / name_file(number)).unlink(missing_ok=True)

    @property
    def _is_first(self) -> bool:
        return 0 in self._list_numbers()

    def _write(self, stack: ExitStack) -> _Record:
        """Write this process's files."""
        if self._failure is not None:
            raise self._failure
        assert self._plan is not None
        self._staged()
        options, folder = self._options, partial_folder(self.path, self.step)
        self._check(options)
        folder.mkdir(parents=True, exist_ok=True)
        if self._is_first:
            stack.enter_context(hold(self.path))
            remove_leftovers(self.path, self.step, {name_file(number) for number in range(self._plan.grid.files)})
        files = {number: self._write_file(folder / name_file(number), self._files[number]) for number in self._files}
        with self._time("sync"):
            sync_directory(folder)
        return _Record(hash_lines(self._plan.list_lines()), files)

    def _check(self, options: Options) -> None:
        target = step_folder(self.path, self.step)
        if target.exists() and not options.overwrite:
            raise FzeroError(str(target), "is there already", "give another step, or overwrite=True")
        try:
            json.dumps(options.metadata)
        except (TypeError, ValueError) as error:
            raise FzeroError("metadata", f"are not values of JSON: {error}", "give numbers, strings, lists") from error

    def _write_file(self, file: Path, values: Mapping[str, Source]) -> File:
        """Write one file and put it on the disk. Values lie in the order of the header, without gaps."""
        header = plan_header(values, {})
        file.unlink(missing_ok=True)  # a process of a killed job may still write to the old file
        sums, begun = _Sums(self._options.sha256), 0
        with open(file, "xb", buffering=PIECE_NBYTES // 4) as out:
            for data in _iter_data(render_header(header), [values[key] for key in header.entries]):
                with self._time("checksum"):
                    sums.add(data)
                with self._time("write"):
                    out.write(data)
                    if sums.nbytes - begun >= BEHIND_NBYTES:
                        begin_writeback(out.fileno())
                        begun = sums.nbytes
            with self._time("sync"):
                out.flush()
                os.fsync(out.fileno())
        return sums.describe()

    def _compare(self, records: list[_Record]) -> None:
        """Raise on all ranks, naming the first leaf that differs, where ranks hold different trees."""
        hashes = list(dict.fromkeys(record.plan for record in records))
        if len(hashes) == 1:
            return
        assert self._plan is not None
        lines = self._plan.list_lines()
        mine = hash_lines(lines)
        shown = [records.index(next(record for record in records if record.plan == each)) for each in hashes[:2]]
        told = list(self.gather(lines if mine in hashes[:2] else None).values())
        pairs = zip(*(told[rank] for rank in shown))
        first, second = next(((a, b) for a, b in pairs if a != b), (f"{len(told[rank])} leaves" for rank in shown))
        problem = f"ranks save different trees: rank {shown[0]} has {first:.200}, rank {shown[1]} has {second:.200}"
        raise FzeroError(str(step_folder(self.path, self.step)), problem, "give save the same tree on every rank")

    def _commit(self, records: list[_Record]) -> None:
        """Write the manifest and publish the checkpoint, on the first rank."""
        if not self._is_first:
            return
        assert self._plan is not None
        files = {number: file for record in records for number, file in record.files.items()}
        grid, places, values, _ = self._plan
        sizes, axis = ({}, "") if self._on is None else (self._on.mesh.sizes, self._on.mesh.shard_axis)
        listed = [files[number] for number in range(grid.files)]
        known = Manifest(self.step, sizes, axis, grid, places, values, listed, self._options.metadata, _versions())
        with self._time("sync"):
            with open(partial_folder(self.path, self.step) / MANIFEST, "wb") as out:
                out.write(render_manifest(known))
                out.flush()
                os.fsync(out.fileno())
            publish(self.path, self.step)
        if self._options.keep is not None:
            others = [step for step in list_steps(self.path) if step != self.step]
            for step in others[: max(len(others) - self._options.keep + 1, 0)]:
                remove(self.path, step)

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

    def describe(self) -> File:
        return File(self.nbytes, render_crc(self.crc), self.sha.hexdigest() if self.sha else "")


def _iter_data(head: bytes, values: list[Source]) -> Iterator[Any]:
    yield head
    for source in values:
        for part in iter_parts(source, CHUNK_NBYTES):
            data = memory_of(part)
            yield from (data[start : start + PIECE_NBYTES] for start in range(0, len(data), PIECE_NBYTES))


def _versions() -> dict[str, str]:
    return {"fzero": packages.version("fzero"), "torch": torch.__version__}
