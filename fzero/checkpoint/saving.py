"""Saving: a tree to a checkpoint, at once or while training goes on."""

from __future__ import annotations

import operator
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fzero.base import tree
from fzero.base.arguments import check_arguments, is_whole
from fzero.base.errors import FzeroError
from fzero.base.state import State
from fzero.checkpoint.lanes import find_lane
from fzero.checkpoint.writing import SaveArguments, Saving
from fzero.ranks.agreement import meet
from fzero.ranks.together import gather_words
from fzero.state.publishing import find_common_ranks
from fzero.values.sharded import Sharded


@check_arguments
def save(
    path: str | os.PathLike[str],
    state: tree.Tree,
    *,
    step: int | None = None,
    keep: int | None = None,
    wait: bool = True,
    overwrite: bool = False,
    sha256: bool = False,
    metadata: Mapping[str, Any] | None = None,
) -> Saving:
    """Write `state` as the checkpoint `step` of the folder `path`. `load` reads it on any number of ranks.

    `state` is any tree of `Sharded` leaves, tensors, numpy arrays, sources, numbers and strings. All ranks of the mesh
    call `save` together, and see one filesystem. Each rank writes what it holds, to one file. Of a leaf that all ranks
    hold, one rank writes. Leaves that are not `Sharded` are the same on all ranks: ranks compare some of the elements.

    * `step` is, without the argument, `state.step` of a `fzero.State`.
    * With `keep` only so many checkpoints stay in the folder: this one, and those of the largest steps.
    * With `wait=False` the call returns when this rank's values are copied to the memory of the host. A thread writes
      the copy while training goes on. The next `save` on the mesh waits for the thread first, and raises on all ranks
      where it failed; so does `wait()` of the result.
    * A checkpoint of the same step is an error, or with `overwrite` replaced, at the moment when the new one is
      complete.
    * `metadata` are values of JSON, which `open_checkpoint` gives back. With `sha256` the manifest has SHA-256 sums
      beside the CRC-32 sums.

    The checkpoint appears at `PATH/step-STEP` when all files are on the disk. A save that is killed at any moment
    leaves earlier checkpoints as they were, and the next save removes the rest of it.

    Raises:
        FzeroError: for a leaf that a checkpoint cannot hold; on all ranks, where a rank cannot write, where ranks hold
            different trees, or where another process writes into the folder.
    """
    step = _choose_step(state, step)
    check_keep(keep)
    on = find_common_ranks(zip(tree.paths(state), tree.leaves(state)))
    lane = find_lane(on)
    lane.finish()
    options = SaveArguments(Path(path), step, keep, overwrite, sha256, dict(metadata or {}))
    saving = Saving(options, on, gather_words(on.members, "save", f"of step {step}"))
    saving.prepare(state)
    if wait:
        saving.run()
        return saving
    meet(on.members, f"save of step {step} with wait=False", what="save")  # the lane's group takes all ranks
    saving.gather = lane.make_gather(on)
    saving.stage(lane.staging)
    lane.start(saving)
    return saving


def check_keep(keep: int | None) -> None:
    """Raise for a number of checkpoints that is not at least 1."""
    if keep is not None and keep < 1:
        raise FzeroError("keep", f"is {keep}", "keep at least 1 checkpoint")


def _choose_step(state: tree.Tree, step: Any) -> int:
    if step is None and isinstance(state, State):
        found = state.step
        step = found.local if isinstance(found, Sharded) else found
    if isinstance(step, torch.Tensor) and step.numel() == 1 and not step.dtype.is_floating_point:
        step = int(step)
    step = operator.index(step) if is_whole(step) else step
    if type(step) is not int or not 0 <= step < 2**63:  # a manifest has no larger numbers
        problem = f"is {step!r:.80}, not a whole number from 0 on, of 63 bits"
        raise FzeroError("step", problem, "give save(..., step=n), or a fzero.State with a step")
    return step
