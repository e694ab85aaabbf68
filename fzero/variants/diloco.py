"""Workers that train apart and meet now and then: DiLoCo (Douillard et al., 2023, arXiv:2311.08105), local SGD (Stich,
2018, arXiv:1805.09767). Each position along an axis is a worker, with ZeRO inside. Two steps take the same state:

    apart, together = (fzero.shard(step, mesh, passes=[..., partial(diloco, syncs=x), ...]) for x in (False, True))

Over the axis a step apart moves no gradient: 4 bytes for each flag in its state, and means that the step returns. One
together moves also an all-reduce of each rank's slices of the weights: their bytes, once.
"""

from __future__ import annotations

from typing import Any

from fzero import FzeroError, Program, ops
from fzero.variants.nesterov import step_towards
from fzero.variants.options import check_meetings
from fzero.variants.origins import return_instead
from fzero.variants.workers import train_apart


def diloco(
    program: Program, *, syncs: bool, rate: float = 0.7, momentum: float = 0.9, axis: str = "replica"
) -> Program:
    """Let each worker train weights and optimizer state of its own, which the pass keeps. The step's weights are those
    that workers share: a step that `syncs` moves them, by Nesterov's momentum, by the mean of the workers' distances,
    and workers go on from there. The step's optimizer state stays as it is. A rate of 1 without momentum is local SGD.

    Raises:
        FzeroError: for a rate not above 0, or a momentum not in [0, 1); behind the pass bucket; on a mesh
            without the axis or with model axes; where the step has a loop, trains a leaf that every rank holds,
            returns nothing in the place of a leaf that it trains, or has other state of integers that workers change.
    """
    check_meetings("diloco", rate, momentum)
    program, states = train_apart(program, "diloco", axis)
    shared = dict[int, Any]()
    for argument, at, old, new, role, _ in states:
        path = f"diloco.{argument.path}"
        if role == "beside" and not old.meta["val"].is_floating_point():
            problem = f"finds {old.meta['val'].dtype} numbers that differ between workers, of which there is no mean"
            raise FzeroError(argument.path, problem, "make them the same along the axis first, or float32")
        if role == "weight":
            program, before = program.add_state(f"{path}.momentum", like=old)
        if role == "optimizer" or not syncs:
            continue
        with program.graph.inserting_before(program.output):
            shared[at] = program.emit(ops.all_reduce, new, "avg", axis)
            if role == "weight":
                after, shared[at] = step_towards(program, old, shared[at], before, rate, momentum)
                program.return_state(f"{path}.momentum", after)
        program.return_state(path, shared[at])
    return return_instead(program, shared)
