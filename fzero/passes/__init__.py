"""Passes: functions of a `Program` to a `Program`. One file a pass; the pass's docstring states its guarantee.

In: a traced program, which gathers each leaf where the step uses the leaf. Out: the program that ranks run.
`defaults` lists the passes of a stage, `insert` puts another pass among them; docs/passes.md shows how to write one.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial

import torch

from fzero.base.errors import FzeroError
from fzero.base.sizes import parse_size
from fzero.passes.accumulate import accumulate
from fzero.passes.bucket import bucket
from fzero.passes.cast_gradients import cast_gradients, check_reduce_dtype
from fzero.passes.coalesce import coalesce
from fzero.passes.donate import donate
from fzero.passes.fuse import fuse
from fzero.passes.hoist import hoist
from fzero.passes.offload import offload
from fzero.passes.prefetch import prefetch
from fzero.passes.release import check_stage, release
from fzero.passes.relieve import relieve
from fzero.passes.rematerialize import rematerialize
from fzero.passes.resolve import resolve
from fzero.passes.reuse import reuse
from fzero.passes.run import Pass, insert, run_passes
from fzero.passes.skip import defer, skip
from fzero.passes.split import split
from fzero.passes.stream import stream
from fzero.passes.verify import verify

__all__ = [
    "accumulate",
    "bucket",
    "cast_gradients",
    "coalesce",
    "defaults",
    "defer",
    "donate",
    "fuse",
    "hoist",
    "insert",
    "offload",
    "prefetch",
    "release",
    "relieve",
    "rematerialize",
    "resolve",
    "reuse",
    "run_passes",
    "skip",
    "split",
    "stream",
    "verify",
]


def defaults(
    *,
    stage: int,
    in_place: bool = True,
    reduce_dtype: torch.dtype | None = None,
    chunk: int | str | None = None,
    keep: Collection[str] = (),
    ahead: int | None = None,
) -> tuple[Pass, ...]:
    """The passes of `shard` at a stage, in order. With `in_place` steps update state in place. `reduce_dtype` and
    `chunk` are as in `shard`. At stage 3 the buckets that `keep` names stay gathered from their first to their last
    use. `ahead` is the `memory` of `prefetch`.

    `dequantize`, `roll` and `resolve` run before these passes, also before those that a user gives.

    Raises:
        FzeroError: for a number that is no stage; for a `reduce_dtype` that is no real floating dtype of at least 16
            bits; for a `chunk` that is no size.
    """
    check_stage(stage)
    check_reduce_dtype(reduce_dtype)
    stays: tuple[Pass, ...] = (hoist,) if stage in (1, 2) else (partial(hoist, keep=keep),) if keep else ()
    streams = () if chunk is None else (partial(stream, chunk=parse_size("chunk", chunk)),)
    early: Pass = prefetch if ahead is None else partial(prefetch, memory=ahead)
    last = (donate,) if in_place else ()
    return (
        rematerialize,  # before release, which decides whether the copies in the backward pass gather again
        *streams,  # before hoist, and behind rematerialize, whose copies use leaves again
        *stays,
        partial(accumulate, stage=stage),
        partial(cast_gradients, dtype=reduce_dtype),
        bucket,
        coalesce,
        partial(release, stage=stage, keep=keep),
        defer,
        fuse,
        skip,
        relieve,  # looks at bytes, which depend on sizes, as the passes behind it do
        split,  # cuts the calls of fuse, by the order of the nodes so far
        offload,  # takes the calls of split, by the buckets whose state lies on the host
        early,  # schedules by the costs of nodes, so behind the passes that change nodes
        reuse,
        *last,  # the passes before move nodes freely, and in-place writes tie nodes to their order
        partial(verify, stage=stage, keep=keep),
    )


def choose_passes(
    given: Sequence[Pass] | None,
    *,
    stage: int | None,
    in_place: bool,
    reduce_dtype: torch.dtype | None,
    chunk: int | str | None = None,
) -> tuple[Pass, ...]:
    """The passes of a step: those that a user gave, and `verify`; without any, `defaults` of the other arguments.

    Raises:
        FzeroError: as `defaults`; beside passes, which leave no place for them, for a `stage`, a `reduce_dtype` or a
            `chunk`, and where `in_place` is false.
    """
    if given is None:
        return defaults(stage=3 if stage is None else stage, in_place=in_place, reduce_dtype=reduce_dtype, chunk=chunk)
    asked = {"stage": stage, "reduce_dtype": reduce_dtype, "chunk": chunk, "donate": None if in_place else False}
    options = {option: value for option, value in asked.items() if value is not None}
    for option, value in options.items():
        written = {"stage": 3, **options}
        written |= {"in_place": written.pop("donate")} if not in_place else {}
        inside = ", ".join(f"{name}={x!r}" for name, x in written.items())
        way_out = f"give it to the passes: passes=fzero.passes.defaults({inside})"
        raise FzeroError(option, f"is {value!r}, and passes are given", way_out)
    return (*given, verify)
