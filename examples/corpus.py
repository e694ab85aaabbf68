"""The text: bytes of Python's own standard library, which every Python has, cut into batches.

Whole files are held out, chosen by a hash of their name. Batches depend on the seed and the step alone: every rank
takes its rows of one global batch, so a run sees the same bytes on any number of ranks.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

Batch = dict[str, Tensor]

HELDOUT_PERCENT = 10
# Not the library itself, and not on every machine: Debian leaves the tests out.
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test"}


class Corpus(NamedTuple):
    """Two texts from disjoint sets of files."""

    train: Tensor  # [bytes] uint8
    heldout: Tensor  # [bytes] uint8


class Cut(NamedTuple):
    """How text becomes batches: `size` windows of `seq` bytes, of which each rank takes an equal part."""

    size: int
    seq: int
    rank: int = 0
    world: int = 1


def stdlib(device: torch.device | None = None) -> Corpus:
    """The standard library of the running Python."""
    return Corpus(*(text.to(device) for text in read(Path(sysconfig.get_paths()["stdlib"]))))


def read(root: Path) -> Corpus:
    """The `.py` files under `root`, in order of their names, each in the half that `is_heldout` says."""
    train, heldout = bytearray(), bytearray()
    for name in names(root):
        (heldout if is_heldout(name) else train).extend((root / name).read_bytes())
    return Corpus(torch.frombuffer(train, dtype=torch.uint8), torch.frombuffer(heldout, dtype=torch.uint8))


def names(root: Path) -> list[str]:
    """Names relative to `root`, with slashes, sorted, of the `.py` files that `SKIPPED` leaves."""
    found = list[Path]()
    for folder, inner, files in os.walk(root):
        inner[:] = (name for name in inner if name not in SKIPPED)  # site-packages alone may hold 10,000 files
        found += (Path(folder, name) for name in files if name.endswith(".py"))
    return sorted(path.relative_to(root).as_posix() for path in found)


def is_heldout(name: str) -> bool:
    """Whether a file is held out: true for `HELDOUT_PERCENT` of all names, the same ones everywhere."""
    return digest(name) % 100 < HELDOUT_PERCENT


def train_batch(text: Tensor, cut: Cut, *, seed: int, step: int) -> Batch:
    """This rank's rows of the global batch of random windows that belongs to `(seed, step)`."""
    generator = torch.Generator().manual_seed(digest(f"{seed} {step}"))
    return windows(text, torch.randint(len(text) - cut.seq, (cut.size,), generator=generator), cut)


def heldout_batches(text: Tensor, cut: Cut, count: int) -> Iterator[Batch]:
    """This rank's rows of `count` global batches, whose windows lie evenly over the text."""
    starts = torch.arange(cut.size * count) * (len(text) - cut.seq) // (cut.size * count)
    return (windows(text, part, cut) for part in starts.split(cut.size))


def windows(text: Tensor, starts: Tensor, cut: Cut) -> Batch:
    """`inputs` and `targets` of this rank's windows, [B, T] int64 each: the bytes, and the byte after each.

    Raises:
        ValueError: where the windows do not divide among the ranks.
    """
    if len(starts) % cut.world:
        raise ValueError(f"batch: {len(starts)} windows do not divide among {cut.world} ranks; give a multiple")
    mine = starts.chunk(cut.world)[cut.rank]
    span = text[(mine[:, None] + torch.arange(cut.seq + 1)).to(text.device)].long()  # [B, T + 1]
    return {"inputs": span[:, :-1].contiguous(), "targets": span[:, 1:].contiguous()}


def digest(text: str) -> int:
    """A hash of `text` that is the same in every process, in [0, 2**56)."""
    return int.from_bytes(blake2b(text.encode(), digest_size=7).digest(), "big")
