"""Lanes: the saves of one mesh, one after the other, and the thread that writes while training goes on."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from fzero.base.errors import FzeroError
from fzero.checkpoint.staging import Staging
from fzero.checkpoint.writing import AGAIN, Saving
from fzero.ranks.failure import hang_up
from fzero.ranks.objects import gather_objects
from fzero.ranks.ranks import Ranks
from fzero.ranks.together import Gather, gather_words


class Lane:
    """The saves of one mesh, one after the other, and what they use again."""

    def __init__(self) -> None:
        self.staging = Staging()
        self._last: Saving | None = None
        self._group: dist.ProcessGroup | None = None

    def finish(self) -> None:
        """Wait for the save that is under way."""
        if self._last is not None and not (self._last.is_done and self._last.is_told):
            self._last.wait()  # where this is interrupted, the thread still reads `staging`: the next call waits again
        self._last = None

    def start(self, saving: Saving) -> None:
        self._last = saving
        saving.start()

    def make_gather(self, on: Ranks) -> Gather:
        """A `Gather` of a process group of its own: a thread's messages do not meet those of the steps."""
        if on.members.group is None:
            return gather_words(on.members, "")
        if self._group is None:
            self._group = on.members.new_twin(on.members.group)
        return _gather_beside(on.members.ranks, self._group)


def _gather_beside(ranks: list[int], group: dist.ProcessGroup) -> Gather:
    def gather(word: Any) -> dict[int, Any]:
        try:
            words = gather_objects(word, group)
        except RuntimeError as error:  # the steps find out which rank is lost: this thread leaves it to them
            hang_up([group])  # or ranks that wait for this one wait until their timeout
            raise FzeroError("save", "ranks lost each other before the checkpoint was complete", AGAIN) from error
        return dict(zip(ranks, words))

    return gather


_LANES: WeakKeyDictionary[Ranks, Lane] = WeakKeyDictionary()


def find_lane(on: Ranks) -> Lane:
    """The lane of a mesh."""
    return _LANES.setdefault(on, Lane())
