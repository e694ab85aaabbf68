"""Fragments of the weights that workers train apart, and their means."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from fzero import Program, ops
from fzero.variants.means import start_mean
from fzero.variants.origins import StateChange


def average(program: Program, sent: Collection[StateChange], axis: str) -> dict[int, Any]:
    """The means over an axis of what workers begin with, by their places among the step's results. Those of a bucket
    and a dtype go in one collective. It starts where the step first computes with them, so that collectives do not
    all start at once, and is waited for where a mean is used."""
    means, groups = dict[int, Any](), dict[Any, list[StateChange]]()
    for each in sorted(sent, key=lambda x: x.argument.leaf):
        groups.setdefault((each.argument.bucket, each.own.meta["val"].dtype), []).append(each)
    for (bucket, _), group in groups.items():
        leaves = [x.argument.leaf for x in group]
        gathers = [user for x in group for user in x.own.users if ops.is_call(user, ops.gather)]
        with program.graph.inserting_before(min(user for gather in gathers for user in gather.users)):
            numel = program.wire(bucket, leaves).stride
            start = program.emit(start_mean, [x.own for x in group], bucket, leaves, numel, axis)
        with program.graph.inserting_before(program.output):
            block = program.emit(ops.wait, start)
            for position, each in enumerate(group):
                size = each.own.meta["val"].numel()
                means[each.at] = program.emit(ops.part, block, bucket, leaves, position, size)
    return means


def number_fragments(weights: Collection[StateChange], fragments: int) -> dict[int, int]:
    """The fragment of each weight, by its place among the step's results: every `fragments`-th bucket is of one."""
    buckets = list(dict.fromkeys(x.argument.bucket for x in weights))
    return {x.at: buckets.index(x.argument.bucket) % fragments for x in weights}
