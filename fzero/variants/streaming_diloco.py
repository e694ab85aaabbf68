"""Workers that meet fragment by fragment, while they train: Streaming DiLoCo (Douillard et al., 2025,
arXiv:2501.18512). A step that sends a fragment starts the mean of its weights where it first computes with them. The
mean is taken behind this step or a later one: see `plan_step`. The mesh, the workers and their state are `diloco`'s.
Over the axis: an all-reduce of each rank's slices, with the padding of their buckets.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from fzero import Program
from fzero.variants.fragments import average, number_fragments
from fzero.variants.nesterov import step_towards
from fzero.variants.options import check_fragments, check_meetings, check_option
from fzero.variants.origins import list_weights, return_instead
from fzero.variants.workers import train_apart


def plan_step(number: int, *, every: int, fragments: int, delay: int) -> dict[str, Any]:
    """The options of step `number`, from 0: each fragment is sent once in `every` steps, as the step before it left the
    fragment, and taken behind the last of the `delay` steps from there on."""
    check_option("streaming_diloco", "delay", delay, 1 <= delay <= every, f"a number of steps from 1 to every={every}")
    check_fragments("streaming_diloco", fragments)
    since = [(number - fragment * every // fragments) % every for fragment in range(fragments)]
    sends, takes = ([i for i, x in enumerate(since) if x == at < number] for at in (0, delay - 1))
    return {"sends": sends, "takes": takes, "fragments": fragments}


def streaming_diloco(
    program: Program, *, sends: Collection[int], takes: Collection[int], fragments: int, rate: float = 0.7,
    momentum: float = 0.9, mix: float = 0.5, axis: str = "replica",
) -> Program:  # fmt: skip
    """A step as `diloco`'s that sends weights of fragments, and moves those of others by the mean that was sent last.
    A worker goes on from `mix` times its own weights and 1 - mix times those that workers share.

    Raises:
        FzeroError: as `diloco`; for a mix outside of [0, 1]; where workers change other state.
    """
    check_meetings("streaming_diloco", rate, momentum)
    check_fragments("streaming_diloco", fragments, sends=sends, takes=takes)
    check_option("streaming_diloco", "mix", mix, 0 <= mix <= 1, "a part of a worker's own weights, as 0.5")
    program, states = train_apart(program, "streaming_diloco", axis)
    weights, shared = list_weights(states), dict[int, Any]()
    parts = number_fragments(weights, fragments)
    means = average(program, [x for x in weights if parts[x.at] in sends], axis)
    for argument, at, old, new, *_ in weights:
        path = f"streaming_diloco.{argument.path}"
        program, before = program.add_state(f"{path}.momentum", like=old)
        program, mean = program.add_state(f"{path}.mean", like=old)
        with program.graph.inserting_before(program.output):
            if at in means:
                program.return_state(f"{path}.mean", mean := means[at])
            if parts[at] in takes:
                after, shared[at] = step_towards(program, old, mean, before, rate, momentum)
                program.return_state(f"{path}.momentum", after)
                program.return_state(path, program.emit(torch.ops.aten.lerp.Scalar, shared[at], new, mix))
    return return_instead(program, shared)
