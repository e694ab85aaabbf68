"""Running: a training loop that goes on where it was stopped, on as many ranks as there are."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from fzero.base.arguments import check_arguments
from fzero.base.errors import FzeroError
from fzero.base.state import State
from fzero.checkpoint.lanes import find_lane
from fzero.checkpoint.loading import load
from fzero.checkpoint.opening import latest
from fzero.checkpoint.saving import check_keep, save
from fzero.checkpoint.stopping import Stop
from fzero.ranks.live import find_ranks
from fzero.ranks.together import do_together, gather_words


@check_arguments
def run(
    step: Callable[[State, Any], tuple[State, Any]],
    state: State,
    loader: Any,
    path: str | os.PathLike[str],
    *,
    steps: int,
    every: int,
    keep: int | None = 3,
    wait: bool = True,
    after: Callable[[int, Any], Any] | None = None,
    signals: Sequence[int] = (signal.SIGTERM,),
) -> State:
    """Take steps until the run has `steps` of them, and return the last state. Saves every `every` steps, and at last.

    Where the folder `path` has a checkpoint, the run goes on from the latest: with its state, its number of steps and
    its position in the data. `state` gives shapes, dtypes and layout, so the checkpoint may be of another number of
    ranks. All ranks of the mesh call `run` together. The values of `state` cannot be used afterwards: the first step
    updates them in place, and a load reads into their memory.

    * `step` maps a state and a batch to the next state and a result, such as the loss: a function of `fzero.shard`.
    * `loader` is a `fzero.data.loader`. It is read epoch after epoch.
    * `keep` and `wait` are those of `save`. `run` returns when the last checkpoint is complete.
    * `after(number, result)` is called after each step, the first of which has the number 1.
    * A signal of `signals` to any rank ends the run: all ranks finish their step, save, and exit (`Stop.leave`).

    Raises:
        FzeroError: for a state that is no `fzero.State`; as `load`, `save` and the step do.
    """
    if not isinstance(state, State):
        raise FzeroError("state", f"is a {type(state).__name__}", "give a fzero.State, which has a place for `data`")
    if every < 1:
        raise FzeroError("every", f"is {every}", "save every 1 steps or more")
    if steps < 0:
        raise FzeroError("steps", f"is {steps}", "take 0 steps or more")
    check_keep(keep)
    with Stop(loader.mesh, signals) as stop:
        state, number = _restore(path, state, loader)
        saving, saved, batches = None, number, _iter_epochs(loader)
        while number < steps and not stop.is_asked():
            state, result = step(state, next(batches))
            number += 1
            if number % every == 0:
                saving = save(path, state._replace(data=loader.position), step=number, keep=keep, wait=wait)
                saved = number
            if after is not None:
                after(number, result)
        if saved != number:
            saving = save(path, state._replace(data=loader.position), step=number, keep=keep)
        if saving is not None:
            saving.wait()
        if number < steps:
            stop.leave()
    return state


def _restore(path: str | os.PathLike[str], state: State, loader: Any) -> tuple[State, int]:
    """The state of the latest checkpoint, and its step; without a checkpoint `state` as it is, and 0. The loader goes
    on from the checkpoint's position."""
    on = find_ranks(loader.mesh)
    find_lane(on).finish()  # a save of a run before, which an error ended in this process
    gather = gather_words(on.members, "a look into", str(path))
    found = do_together(gather, lambda: latest(path), str(path), "find the latest checkpoint", "see to the folder")
    steps = [step for step in found if step is not None]  # of each rank: one may see an older folder than another
    if not steps:
        return state, 0
    state = load(path, state._replace(data=loader.position), step=max(steps), donate=True)
    loader.resume(state.data)
    return state._replace(data=None), max(steps)


def _iter_epochs(loader: Any) -> Iterator[Any]:
    """The batches of a loader, epoch after epoch."""
    empty = 0  # epochs in a row: the rest of an epoch that a run goes on with may be empty
    while empty < 2:
        empty += 1
        for batch in loader:
            empty = 0
            yield batch
    raise FzeroError("loader", "has no batch in an epoch", "give a dataset with examples")
