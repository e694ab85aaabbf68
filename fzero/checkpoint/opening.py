"""Opening: a checkpoint as sources, which are read by ranges from the files that have them."""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fzero.base.arguments import check_arguments
from fzero.base.dtypes import describe_form
from fzero.base.errors import FzeroError
from fzero.checkpoint.folder import find_folder, list_steps
from fzero.checkpoint.manifest import OTHERS, TAGS, Value, name_file, read_manifest, render_crc, tag_file
from fzero.checkpoint.places import Place
from fzero.layout.splits import run_of, runs_in_parts
from fzero.state.safetensors.header import DAMAGED, Entry
from fzero.state.safetensors.reading import TensorFile
from fzero.state.sources import check_range

VERIFY_NBYTES = 1 << 20
"""Bytes that `Checkpoint.verify` reads at a time: few enough that the processor's cache holds them while they are
summed."""
REPLACED = "load again: the checkpoint was replaced while it was read, or files of two checkpoints changed places"


@check_arguments
def latest(path: str | os.PathLike[str]) -> int | None:
    """The largest step of the checkpoints in a folder. None for a folder that has none, or that is not there.

    Raises:
        FzeroError: for a folder that cannot be read.
    """
    return max(list_steps(Path(path)), default=None)


@check_arguments
def open_checkpoint(path: str | os.PathLike[str], step: int | None = None) -> Checkpoint:
    """The checkpoint `step` of a folder, by default the latest. Reads the manifest only.

    Raises:
        FzeroError: for a folder without such a checkpoint, and for a damaged manifest.
    """
    steps = list_steps(Path(path))
    if step is None and steps:
        step = steps[-1]
    if step is None or step not in steps:
        some = ", ".join(map(str, steps[-8:]))
        problem = f"has {f'no checkpoint {step}, only {some}' if steps else 'no checkpoint'}"
        raise FzeroError(str(path), problem, "give a folder that fzero.checkpoint.save wrote to")
    return Checkpoint(find_folder(Path(path), step))


@check_arguments
def verify(path: str | os.PathLike[str], step: int | None = None) -> int:
    """Read all of the checkpoint `step`, by default the latest, and compare with the sums of its manifest. Returns the
    step.

    Raises:
        FzeroError: naming each file that is missing, truncated or changed.
    """
    checkpoint = open_checkpoint(path, step)
    checkpoint.verify()
    return checkpoint.manifest.step


class Checkpoint(Mapping[str, "StoredLeaf"]):
    """The tensors of a checkpoint by path, as sources that `fzero.partition` takes. `step` and
    `metadata` are what `save` was given. Files are opened when they are read.

    Raises:
        FzeroError: for a damaged manifest.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.manifest = folder, read_manifest(folder)
        self._opened: dict[int, TensorFile] = {}

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def values_by_path(self) -> dict[str, Value]:
        """The leaves that are no tensors."""
        return self.manifest.values

    @property
    def metadata(self) -> dict[str, Any]:
        return self.manifest.metadata

    @property
    def fingerprint(self) -> str:
        """What tells this checkpoint from others: the save, and the sums of all files."""
        sums = " ".join(file.crc32 for file in self.manifest.files)
        return f"step {self.step}, save {self.manifest.save} {zlib.crc32(sums.encode()):08x}"

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(file.nbytes for file in self.manifest.files)

    @property
    def nbytes_read(self) -> int:
        """Bytes of tensors that were read through this object."""
        return sum(file.nbytes_read for file in self._opened.values())

    def __getitem__(self, path: str) -> StoredLeaf:
        return StoredLeaf(self, self.manifest.places[path])

    def __contains__(self, path: object) -> bool:
        return path in self.manifest.places

    def __iter__(self) -> Iterator[str]:
        return iter(self.manifest.places)

    def __len__(self) -> int:
        return len(self.manifest.places)

    def open_file(self, number: int, leaf: str) -> TensorFile:
        """File number `number`, which `leaf` lies in.

        Raises:
            FzeroError: for a file that is missing, not of the size that the manifest says, of another save, or in the
                place of another file.
        """
        if number not in self._opened:
            file = self.folder / name_file(number)
            try:
                nbytes = file.stat().st_size
            except OSError as error:
                problem = f"{file} cannot be read: {error.strerror}"
                raise FzeroError(leaf, problem, "load another checkpoint, or put the file back") from error
            expected = self.manifest.files[number].nbytes
            if nbytes != expected:
                raise FzeroError(leaf, f"{file} has {nbytes} bytes, {expected} were written", DAMAGED)
            opened = TensorFile(file)
            found, wanted = opened.header.metadata, tag_file(self.manifest.save, number)
            if {key: found[key] for key in TAGS if key in found} != wanted:
                is_moved = wanted and found.get("save") == wanted["save"]
                what = (
                    f"file {found.get('file', '?'):.20}, not {number}"
                    if is_moved
                    else "of another save than the manifest"
                )
                raise FzeroError(leaf, f"{file} is {what}", REPLACED)
            self._opened[number] = opened
        return self._opened[number]

    def verify(self, first: int = 0, every: int = 1) -> None:
        """Read all files, or of every `every` files the one after `first`, and compare with the sums of the manifest.

        Raises:
            FzeroError: naming each file that is missing, truncated or changed.
        """
        numbers = range(first, len(self.manifest.files), every)
        problems = [problem for number in numbers if (problem := self._find_damage(number))]
        if problems:
            raise FzeroError(str(self.folder), "; ".join(problems), "load another checkpoint")

    def _find_damage(self, number: int) -> str:
        """What is wrong with a file, "" where nothing is."""
        expected, name = self.manifest.files[number], name_file(number)
        crc, sha = 0, hashlib.sha256()
        try:
            nbytes = (self.folder / name).stat().st_size
            if nbytes != expected.nbytes:  # a FIFO has none: to open one may wait for ever
                return f"{name} has {nbytes} bytes, {expected.nbytes} were written"
            with open(self.folder / name, "rb", buffering=0) as file:
                buffer = memoryview(bytearray(VERIFY_NBYTES))
                while count := file.readinto(buffer):
                    crc = zlib.crc32(buffer[:count], crc)
                    if expected.sha256:
                        sha.update(buffer[:count])
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
        if render_crc(crc) != expected.crc32:
            return f"{name} has the CRC-32 {render_crc(crc)}, {expected.crc32} was written"
        if expected.sha256 and sha.hexdigest() != expected.sha256:
            return f"{name} has the SHA-256 {sha.hexdigest()}, {expected.sha256} was written"
        return ""

    def __repr__(self) -> str:
        return f"Checkpoint({self.folder}: {len(self)} tensors in {len(self.manifest.files)} files)"


class StoredLeaf:
    """A tensor of a checkpoint: a `Source`. Its elements lie in one file or in several."""

    def __init__(self, checkpoint: Checkpoint, place: Place) -> None:
        self.path, self.dtype, self.shape = place.path, place.dtype, torch.Size(place.whole)
        self.is_frozen = False
        self._checkpoint, self._place, self._parts = checkpoint, place, place.list_parts()

    def read(self, start: int, out: Tensor) -> None:
        elements = check_range(self, start, out)
        if not self._place.firsts:
            return self._read_elements(self._place, start, out)
        run, done = run_of(self._place.shape, self._place.dim, self._place.parts), 0
        for position, begin, size in runs_in_parts(run, len(self._parts), elements):
            self._read_elements(self._parts[position], begin, out[done : done + size])
            done += size

    def _read_elements(self, place: Place, start: int, out: Tensor) -> None:
        grid = self._checkpoint.manifest.grid
        for number, elements in grid.iter_files(place, range(start, start + out.numel())):
            file = self._checkpoint.open_file(number, self.path)
            part = grid.find_part(place, number)
            here = out[elements.start - start : elements.stop - start]
            self._read_part(file, part, elements.start - part.start, here)

    def _read_part(self, file: TensorFile, part: range, start: int, out: Tensor) -> None:
        """Fill `out` from the elements of a part of the leaf that a file has."""
        entry, scale = file.header.entries.get(self.path), 1
        if self.dtype in OTHERS.values():
            whole = out if out.dtype == self.dtype else torch.empty(out.shape, dtype=self.dtype, device="cpu")
            out, scale, target = whole.view(torch.uint8), self.dtype.itemsize, out
        self._check(entry, len(part) * scale, torch.uint8 if scale > 1 else self.dtype, file)
        assert entry is not None
        file.read(entry, start * scale, out, self.path)
        if scale > 1 and target is not whole:
            target.copy_(whole)

    def _check(self, entry: Entry | None, numel: int, dtype: torch.dtype, file: TensorFile) -> None:
        found = None if entry is None else (torch.Size(entry.shape).numel(), entry.dtype)
        if found != (numel, dtype):
            has = "nothing" if found is None else f"{found[0]} elements of {found[1]}"
            raise FzeroError(self.path, f"{file.path} has {has} of it, the manifest says {numel} of {dtype}", DAMAGED)

    def fingerprint(self) -> bytes:
        """What tells these values from others: the sums of the files, without reading them."""
        return self._checkpoint.fingerprint.encode()

    def __repr__(self) -> str:
        return f"StoredLeaf({self.path}: {describe_form(self)} in {self._checkpoint.folder})"
