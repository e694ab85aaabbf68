"""Store: the files of one process below a path, and two threads that move bytes between the files and memory.

A law orders reads and writes of one extent: a read that starts after a write has started returns what was written. A
write waits for earlier reads and writes of the extent, and a read for earlier writes.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple
from urllib.parse import quote
from weakref import WeakValueDictionary

from fzero.base.errors import FzeroError
from fzero.base.placement import check_folder
from fzero.files.extents import ALIGN, align_down, align_up
from fzero.files.file import File
from fzero.files.memory import BLOCK_NBYTES, Blocks

DEPTH = 8
"""Blocks of all threads together, in bytes 8 MiB."""
THREADS = 2
"""Threads of a store. While one copies its blocks, the other one's are read or written. Two threads with 4 blocks each
moved 2.7 GB/s to a disk and 2.0 from it, one thread with 8 blocks 1.6 and 1.2, and four with 2 blocks no more."""
MAX_NAME = 120


class Extent:
    """Some bytes of a file, free again when nothing refers to the extent. `leaf` is for errors."""

    def __init__(self, store: FileStore, file: File, nbytes: int, leaf: str) -> None:
        self.store, self.file, self.nbytes, self.leaf = store, file, nbytes, leaf
        self.start = 0
        self.writes: list[Future[None]] = []  # those that a read must wait for
        self.reads: list[Future[None]] = []  # since the last write
        if nbytes:
            where = file.take(nbytes, leaf)
            self.start = where.start
            weakref.finalize(self, file.unused.append, where).atexit = False


class Move(NamedTuple):
    """Bytes of an extent and as many bytes of memory, which one is to be copied to the other.

    `owner` keeps the memory alive.
    """

    extent: Extent
    start: int
    nbytes: int
    address: int
    owner: Any


class Counts(NamedTuple):
    """Bytes that values have that were read and written. What the disk moves is rounded up to borders of 4 KiB."""

    read: int = 0
    written: int = 0


class FileStore:
    """The files of one process below a path: one for each rank and bucket."""

    def __init__(self, path: Path) -> None:
        check_folder(path)
        self.path = path
        self.counts = Counts()
        self._owner = os.getpid()
        self._files: dict[str, File] = {}
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="fzero disk")
        self._blocks: SimpleQueue[Blocks] = SimpleQueue()
        for _ in range(THREADS):
            self._blocks.put(Blocks(DEPTH // THREADS))

    def open_file(self, rank: int | None, bucket: str) -> File:
        """The file of a rank and bucket. `rank` None stands for all virtual ranks together."""
        owner = "all-ranks" if rank is None else f"rank-{rank}"
        # A name of a file is short: buckets with long names that begin alike share a file.
        name = f"{owner}.{quote(bucket, safe='')[:MAX_NAME]}"
        with self._lock:
            if name not in self._files:
                self._files[name] = File(self.path, name)
            return self._files[name]

    def allocate(self, nbytes: int, file: File, leaf: str) -> Extent:
        """Room in a file of this store.

        Raises:
            FzeroError: naming the leaf, where the disk has no room.
        """
        self._check_process(leaf)
        with self._lock:
            return Extent(self, file, nbytes, leaf)

    def read(self, moves: Sequence[Move]) -> list[Future[None]]:
        """Start to copy bytes of files to memory."""
        with self._lock:
            self.counts = self.counts._replace(read=self.counts.read + sum(move.nbytes for move in moves))
            return [future for move in moves for future in self._start_read(move)]

    def write(self, moves: Sequence[Move]) -> list[Future[None]]:
        """Start to copy bytes of memory to files. The memory may change when the futures are done."""
        with self._lock:
            self.counts = self.counts._replace(written=self.counts.written + sum(move.nbytes for move in moves))
            return [future for move in moves for future in self._start_write(move)]

    def _start_read(self, move: Move) -> list[Future[None]]:
        self._check_process(move.extent.leaf)
        extent = move.extent
        earlier = list(extent.writes)
        started = [self._threads.submit(self._read, move, span, earlier) for span in _cut(move)]
        extent.reads = [future for future in extent.reads if not future.done()] + started
        return started

    def _start_write(self, move: Move) -> list[Future[None]]:
        self._check_process(move.extent.leaf)
        extent = move.extent
        earlier = extent.writes + extent.reads
        started = [self._threads.submit(self._write, move, span, earlier) for span in _cut(move)]
        # A write that failed is kept until all is written again: a read would return what was there before it.
        is_whole = move.nbytes == extent.nbytes
        extent.writes = [x for x in extent.writes if not is_whole and not _has_succeeded(x)] + started
        extent.reads = []
        return started

    # A thread that waits for earlier moves waits for moves that left the queue before its own: the first of all those
    # under way waits for none.

    def _read(self, move: Move, span: range, earlier: list[Future[None]]) -> None:
        for future in earlier:
            future.result()
        blocks = self._blocks.get()
        try:
            whole = range(align_down(span.start), align_up(span.stop))
            move.extent.file.read(blocks.view[: len(whole)], whole.start, move.extent.leaf)
            first = span.start - move.extent.start - move.start
            blocks.copy_out(span.start - whole.start, move.address + first, len(span))
        finally:
            self._blocks.put(blocks)

    def _write(self, move: Move, span: range, earlier: list[Future[None]]) -> None:
        wait_for(earlier)
        extent, blocks = move.extent, self._blocks.get()
        try:
            whole = range(align_down(span.start), align_up(span.stop))
            if span.start > whole.start:  # keep what lies in front of the span
                extent.file.read(blocks.view[:ALIGN], whole.start, extent.leaf)
            if span.stop < whole.stop and span.stop < extent.start + extent.nbytes:  # and behind it
                extent.file.read(blocks.view[len(whole) - ALIGN : len(whole)], whole.stop - ALIGN, extent.leaf)
            first = span.start - extent.start - move.start
            blocks.copy_in(span.start - whole.start, move.address + first, len(span))
            extent.file.write(blocks.view[: len(whole)], whole.start, extent.leaf)
        finally:
            self._blocks.put(blocks)

    def _check_process(self, leaf: str) -> None:
        if os.getpid() != self._owner:
            problem = f"lies in a file of process {self._owner}, and this is its child {os.getpid()}"
            raise FzeroError(
                leaf, problem, "use the value in the process that made it: a child has none of its threads"
            )


def _cut(move: Move) -> Iterator[range]:
    """The bytes of a file that a move reads or writes, cut so that each part fits a thread's blocks and that no two
    parts have bytes between the same two borders."""
    step = DEPTH // THREADS * BLOCK_NBYTES
    start = move.extent.start + move.start
    stop = start + move.nbytes
    borders = range(align_down(start), stop, step)
    return (range(max(start, border), min(stop, border + step)) for border in borders)


def _has_succeeded(future: Future[None]) -> bool:
    return future.done() and future.exception() is None


_STORES: WeakValueDictionary[tuple[int, Path], FileStore] = WeakValueDictionary()
"""The stores of this process, and in a child process those of its parent."""
_opening = threading.Lock()


def open_store(path: Path) -> FileStore:
    """The store of this process below a path. The store lives as long as an extent of it."""
    with _opening:
        store = _STORES.get((os.getpid(), path))
        if store is None:
            store = _STORES[(os.getpid(), path)] = FileStore(path)
        return store
