"""Workers that meet fragment by fragment, and take what they sent some steps later: Streaming DiLoCo (Douillard et al.,
2025, arXiv:2501.18512). The mesh, the workers and their state are those of `diloco`.

A fragment is every `fragments`-th bucket. The workers' weights of a fragment are averaged behind step t, and move by
this mean behind step t + delay: `plan_step` says when. Over the axis: an all-reduce of a fragment's slices, no more.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from fzero import Program, ops
from fzero.variants.options import check_fragments, check_meetings, check_option
from fzero.variants.origins import list_weights, return_instead
from fzero.variants.workers import train_apart


def plan_step(number: int, *, every: int, fragments: int, delay: int) -> dict[str, Any]:
    """The options of step `number`, from 0: each fragment is sent once in `every` steps, and taken `delay` later."""
    check_option("streaming_diloco", "delay", delay, 0 <= delay < every, f"a number of steps below every={every}")
    check_fragments("streaming_diloco", fragments)
    since = [(number + 1 - fragment * every // fragments) % every for fragment in range(fragments)]
    takes = [i for i, x in enumerate(since) if x == delay and number >= delay]
    return {"sends": [i for i, x in enumerate(since) if x == 0], "takes": takes, "fragments": fragments}


def streaming_diloco(
    program: Program, *, sends: Collection[int], takes: Collection[int], fragments: int, rate: float = 0.7,
    momentum: float = 0.9, mix: float = 0.5, axis: str = "replica",
) -> Program:  # fmt: skip
    """A step as `diloco`'s that averages weights of fragments, and moves those of others by an earlier step's means.
    A worker goes on from `mix` times its own weights and 1 - mix times those that workers share.

    Raises:
        FzeroError: as `diloco`; for a mix outside of [0, 1]; where workers change other state.
    """
    check_meetings("streaming_diloco", rate, momentum)
    check_fragments("streaming_diloco", fragments, sends=sends, takes=takes)
    check_option("streaming_diloco", "mix", mix, 0 <= mix <= 1, "a part of a worker's own weights, as 0.5")
    program, states = train_apart(program, "streaming_diloco", axis)
    weights, shared = list_weights(states), dict[int, Any]()
    buckets = list(dict.fromkeys(x.argument.bucket for x in weights))
    for argument, at, old, new, _ in weights:
        path, fragment = f"streaming_diloco.{argument.path}", buckets.index(argument.bucket) % fragments
        program, before = program.add_state(f"{path}.momentum", like=old)
        program, mean = program.add_state(f"{path}.mean", like=old)
        with program.graph.inserting_before(program.output):
            if fragment in sends:
                program.return_state(f"{path}.mean", mean := program.emit(ops.all_reduce, new, "avg", axis))
            if fragment in takes:
                distance = program.emit(torch.ops.aten.sub.Tensor, old, mean)
                after = program.emit(torch.ops.aten.add.Tensor, distance, before, alpha=momentum)
                step = program.emit(torch.ops.aten.add.Tensor, distance, after, alpha=momentum)
                shared[at] = program.emit(torch.ops.aten.sub.Tensor, old, step, alpha=rate)
                program.return_state(f"{path}.momentum", after)
                program.return_state(path, program.emit(torch.ops.aten.lerp.Scalar, shared[at], new, mix))
    return return_instead(program, shared)
