"""Passes: each a function of a `Program` to a `Program`, one file a pass, its guarantee in its docstring."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from fzero.passes.accumulate import accumulate
from fzero.passes.bucket import bucket
from fzero.passes.coalesce import coalesce
from fzero.passes.donate import donate
from fzero.passes.fuse import fuse
from fzero.passes.prefetch import prefetch
from fzero.passes.release import release
from fzero.passes.rematerialize import rematerialize
from fzero.passes.resolve import resolve
from fzero.passes.split import split
from fzero.passes.verify import verify
from fzero.program.program import Program

__all__ = [
    "accumulate",
    "bucket",
    "coalesce",
    "defaults",
    "donate",
    "fuse",
    "prefetch",
    "release",
    "rematerialize",
    "resolve",
    "split",
    "verify",
]


def defaults(*, stage: int, in_place: bool) -> tuple[Callable[[Program], Program], ...]:
    """The passes of `shard`, in order. `resolve` comes before them all."""
    first = (accumulate,) if stage == 1 else ()
    last = (donate,) if in_place else ()
    return (
        rematerialize,
        *first,
        bucket,
        coalesce,
        partial(release, stage=stage),
        fuse,
        split,
        prefetch,
        *last,
        partial(verify, stage=stage),
    )
