"""Passes: functions of a `Program` to a `Program`. One file a pass; the pass's docstring states its guarantee.

In: a traced program, which gathers each leaf where the step uses the leaf. Out: the program that ranks run.
`defaults` lists the passes of a stage, `insert` puts another pass among them; docs/passes.md shows how to write one.
"""

from __future__ import annotations

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
from fzero.passes.run import Pass, insert, run_passes
from fzero.passes.split import split
from fzero.passes.verify import verify

__all__ = [
    "accumulate",
    "bucket",
    "coalesce",
    "defaults",
    "donate",
    "fuse",
    "insert",
    "prefetch",
    "release",
    "rematerialize",
    "resolve",
    "run_passes",
    "split",
    "verify",
]


def defaults(*, stage: int, in_place: bool = True) -> tuple[Pass, ...]:
    """The passes of `shard` at a stage, in order. With `in_place` steps update state in place.

    `resolve` runs before these passes, also before those that a user gives.
    """
    first = (accumulate,) if stage == 1 else ()
    last = (donate,) if in_place else ()
    return (
        rematerialize,  # before release, which decides whether the copies in the backward pass gather again
        *first,
        bucket,
        coalesce,
        partial(release, stage=stage),
        fuse,
        split,  # cuts the calls of fuse, by the order of the nodes so far
        prefetch,  # schedules by the costs of nodes, so behind the passes that change nodes
        *last,  # the passes before move nodes freely, and in-place writes tie nodes to their order
        partial(verify, stage=stage),
    )
