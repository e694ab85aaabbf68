"""Passes: functions of a `Program` to a `Program`. One file a pass; the pass's docstring states its guarantee.

In: a traced program, which gathers each leaf where the step uses the leaf. Out: the program that ranks run.
`defaults` lists the passes of a `Plan`, `insert` puts another pass among them; docs/passes.md shows how to write one.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

from fzero.base.errors import FzeroError
from fzero.passes.accumulate import accumulate
from fzero.passes.bucket import bucket
from fzero.passes.cast_gradients import cast_gradients
from fzero.passes.coalesce import coalesce
from fzero.passes.donate import donate
from fzero.passes.fuse import fuse
from fzero.passes.hoist import hoist
from fzero.passes.offload import offload
from fzero.passes.place import place
from fzero.passes.prefetch import prefetch
from fzero.passes.release import release
from fzero.passes.relieve import relieve
from fzero.passes.rematerialize import rematerialize
from fzero.passes.resolve import resolve
from fzero.passes.reuse import reuse
from fzero.passes.run import Pass, insert, run_passes
from fzero.passes.skip import defer, skip
from fzero.passes.split import split
from fzero.passes.stream import stream
from fzero.passes.verify import verify
from fzero.program.plan import Plan, check_names

__all__ = [
    "Plan",
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
    "place",
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


def defaults(plan: Plan = Plan(), **fields: Any) -> tuple[Pass, ...]:  # noqa: B008  a plan is frozen
    """The passes of a plan with these `fields`, in order: `defaults(stage=2, in_place=False)`. Without any those of
    `fzero.shard`.

    `dequantize`, `roll` and `resolve` run before these passes, also before those that a user gives.

    Raises:
        FzeroError: as `Plan`; for a name that is no field; for a plan that computes values `again` or has them
            `on_host`, or has a `mesh` or `rates`, which count before any pass runs.
    """
    if not isinstance(plan, Plan):
        raise FzeroError("plan", f"is {plan!r:.80}", "give a Plan, and its fields by name: defaults(stage=2)")
    check_names("defaults", fields, (field.name for field in dataclasses.fields(Plan)), "a plan")
    plan = dataclasses.replace(plan, **fields)
    for name in ("again", "on_host", "mesh", "rates"):
        if getattr(plan, name):
            raise FzeroError(name, "counts before any pass runs", "give shard(..., plan=plan) in place of passes")
    return list_passes(plan)


def list_passes(plan: Plan) -> tuple[Pass, ...]:
    """The passes of a plan, in order, for a trace that is marked with what the plan computes again."""
    stage, keep = plan.stage, plan.keep
    stays: tuple[Pass, ...] = (hoist,) if stage in (1, 2) else (partial(hoist, keep=keep),) if keep else ()
    streams = () if plan.chunk is None else (partial(stream, chunk=plan.chunk),)
    places = () if plan.to is None else (partial(place, to=plan.to, away=plan.away),)
    early: Pass = prefetch if plan.ahead is None else partial(prefetch, memory=plan.ahead)
    last = (donate,) if plan.in_place else ()
    return (
        rematerialize,  # before release, which decides whether the copies in the backward pass gather again
        *streams,  # before hoist, and behind rematerialize, whose copies use leaves again
        *stays,
        partial(accumulate, stage=stage),
        partial(cast_gradients, dtype=plan.reduce_dtype),
        bucket,
        coalesce,
        partial(release, stage=stage, keep=keep),
        defer,
        *places,  # which fuse looks at, and the passes behind it
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
