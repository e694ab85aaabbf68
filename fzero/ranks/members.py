"""Members: the host process group of all ranks of a mesh, and the timeouts of the mesh's process groups.

Four users need a process group of all ranks on the host (CPU), whatever carries the tensors of a step:

* agreement: before a step, ranks compare what they are about to run;
* messages of `partition`, `unpartition` and `save_safetensors`, plans and data of state outside of a step;
* failure: after a collective has failed, ranks find out who is missing;
* leave: a rank that an error takes out of a step tells the others at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from fzero.base.errors import FzeroError
from fzero.base.torch_private import group_timeouts
from fzero.ranks.failure import (
    LEFT,
    REFUSED,
    RESTART,
    RefusedError,
    call_roll,
    format_seconds,
    hang_up,
    name_ranks,
    roll_error,
)
from fzero.ranks.objects import gather_objects
from fzero.ranks.processes import Process, has_ended, this_process

PATIENCE = timedelta(seconds=30)
"""How long a roll call goes on after torch's timeout, or again torch's timeout where that is shorter: another rank may
notice later than this one that a collective has failed."""

FAREWELL = timedelta(seconds=5)
"""How long a rank that leaves waits for others to hear it."""
GLANCE = timedelta(seconds=1)
"""How often a rank that waits looks whether processes of other ranks have ended."""
TAG = 0x667A0000
"""The first tag of fzero's messages. In a process group of the user, messages of the user have other tags."""

Groups = Sequence[dist.ProcessGroup]


class Members:
    """All ranks of one mesh as one group on the host. All ranks make their `Members` together, from the mesh's groups.

    `ranks` are the global ranks in order. `group` is a gloo process group of all ranks, None for a process that is
    alone: it has one rank, or all ranks of a virtual mesh.
    `timeout` is the shortest of torch's timeouts of `groups` and of the default group. `at_failure` holds functions to
    call when ranks lose each other. `agreements` counts the agreements that the ranks have come to, and `told` is the
    error that the last one raised on this rank, if any: all ranks know of it. `is_between_steps` says of such an error
    that all ranks were about to run steps.

    Raises:
        FzeroError: when another rank does not come within `timeout`.
    """

    def __init__(self, ranks: Sequence[int] = (0,), groups: Groups = ()) -> None:
        self.ranks = sorted(ranks)
        known = (group for group in (*groups, dist.group.WORLD) if group is not None)
        self.timeout = min((timeout for group in known for timeout in group_timeouts(group)), default=timedelta.max)
        self.group: dist.ProcessGroup | None = None
        self._lost: FzeroError | None = None
        self._made: list[dist.ProcessGroup] = []
        self.at_failure: list[Callable[[], None]] = []
        self.agreements = 0
        self.told: BaseException | None = None
        self.is_between_steps = False
        self._processes: list[Process | None] = []
        if len(ranks) > 1:
            usable = [group for group in groups if _is_host_group(group, len(ranks), self.timeout)]
            self.group = usable[0] if usable else self._new_group()
            # the roll call has a group of its own: hanging up closes the connections of all others
            self._groups, self._roll = [*groups, self.group], self._new_group()
            self._processes = self._meet()

    @property
    def is_alone(self) -> bool:
        """Whether no other process has ranks of the mesh."""
        return self.group is None

    def new_twin(self, group: dist.ProcessGroup) -> dist.ProcessGroup:
        """Make another process group of a group's ranks, on the group's backend. All ranks of the group call together.

        Collectives in the twin do not wait for collectives in the group.
        """
        return self.new_group(dist.get_process_group_ranks(group), dist.get_backend(group))

    def new_group(self, ranks: Sequence[int], backend: str) -> dist.ProcessGroup:
        """Make a process group of some ranks. All of these call together."""
        made = self._new_group(ranks, backend)
        self._groups.append(made)
        return made

    def _new_group(self, ranks: Sequence[int] = (), backend: str = "gloo") -> dist.ProcessGroup:
        ranks = list(ranks or self.ranks)
        some = len(ranks) < dist.get_world_size()  # then ranks outside of the group do not take part
        try:
            made = dist.new_group(ranks, self.timeout, backend, use_local_synchronization=some)
        except RuntimeError as error:
            problem = f"not all of {name_ranks(ranks)} came to it within {format_seconds(self.timeout)}"
            raise FzeroError("mesh", problem, "let every rank of a mesh partition and shard on it") from error
        assert made is not None  # it is of this rank
        self._made.append(made)
        return made

    def begin(self, what: str) -> Attempt:
        """Begin a collective that errors call `what`. Its calls to torch stand in a `with` of the result."""
        if self._lost is not None:
            raise self._lost
        return Attempt(self, what)

    def wait(self, work: Any) -> None:
        """Wait for a collective in `group`.

        Raises:
            RuntimeError: when the collective fails, or does not end within `timeout`, or when another rank's process
                has ended.
        """
        deadline = time.monotonic() + self.timeout.total_seconds()
        while True:
            try:
                work.wait(min(GLANCE, self.timeout))
                return
            except RuntimeError:
                if work.is_completed() or time.monotonic() > deadline or self._find_ended():
                    raise

    def _meet(self) -> list[Process | None]:
        """The process of each rank, None for one that this process cannot see."""
        assert self.group is not None
        with self.begin("the first word of ranks to each other"):
            found = gather_objects(this_process(), self.group)
        return [None if has_ended(process) else process for process in found]

    def _find_ended(self) -> list[int]:
        """The ranks whose processes have ended, as far as this host can tell."""
        return [rank for rank, process in zip(self.ranks, self._processes) if process and has_ended(process)]

    def diagnose(self, what: str, since: float, error: BaseException | None = None) -> FzeroError:
        """Hang up on every rank, call the roll, and return the error that names the missing ranks.

        `what` names the failed collective, which this rank began at `since`, in seconds of `time.monotonic`; `error` is
        what torch raised. Later calls return the same error, because the connections are gone.
        """
        if self._lost is None:
            now = time.monotonic()
            deadline = max(since + self.timeout.total_seconds(), now) + min(self.timeout, PATIENCE).total_seconds()
            word = f"waited {now - since:.0f} s in {what}"
            if isinstance(error, RefusedError):
                word = f"{REFUSED}the memory of another rank in {what}: {error}"
            words, absent = self._part(word, deadline)
            self._lost = roll_error(what, words, absent, "" if error is None else str(error))
        return self._lost

    def leave(self, what: str, error: BaseException) -> None:
        """Tell all ranks that `error` takes this rank out of `what`, which other ranks go on with, and hang up.

        Later collectives raise, because the connections are gone.
        """
        if self.is_alone or self._lost is not None:
            return
        cause = f"{type(error).__name__}: {error}".rstrip(": ")
        self._lost = FzeroError(what, f"this rank left it by {cause}", RESTART)
        self._part(f"{LEFT}{what} by {cause}", time.monotonic() + min(self.timeout, FAREWELL).total_seconds())

    def _part(self, word: str, deadline: float) -> tuple[dict[int, str], dict[int, str]]:
        """Hang up on every rank, and call the roll with this rank's word."""
        for act in self.at_failure:
            act()
        hang_up(self._groups)
        return call_roll(self._roll, self.ranks, word, deadline, self.timeout, self._find_ended())

    def close(self) -> None:
        """Free the process groups that fzero made. No collective."""
        own, self._made = self._made, []
        for group in own:
            with suppress(ValueError, AssertionError):  # destroyed already, with all groups
                dist.destroy_process_group(group)


class Attempt:
    """One collective that this rank has begun. The collective's calls to torch stand in a `with` of the attempt.

    Within the `with`, an error of torch becomes an `FzeroError` that names the collective and the missing ranks. Any
    other error, such as an interrupt, takes this rank out of the collective: the other ranks are told.
    """

    __slots__ = ("members", "since", "what")

    def __init__(self, members: Members, what: str) -> None:
        self.members, self.what, self.since = members, what, time.monotonic()

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        # while a CUDA graph is captured nothing runs, so no rank can fail: torch's error is about the capture
        if error is None or isinstance(error, FzeroError) or self.members.is_alone or _is_capturing():
            return
        if isinstance(error, RuntimeError):
            raise self.members.diagnose(self.what, self.since, error) from error
        self.members.leave(self.what, error)


def _is_capturing() -> bool:
    """Whether operations are being captured into a CUDA graph, instead of run."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _is_host_group(group: dist.ProcessGroup, world: int, timeout: timedelta) -> bool:
    """Whether a group of the mesh can be the group of all its ranks: gloo, of `world` ranks, with this one timeout."""
    if dist.get_backend(group) != "gloo" or dist.get_world_size(group) != world:
        return False
    return set(group_timeouts(group)) == {timeout}
