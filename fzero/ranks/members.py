"""Members: the ranks of a mesh beside their data, to agree before a step and to find out who is missing after one."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fzero.base.errors import FzeroError

PATIENCE = timedelta(seconds=30)
"""How much later than this rank another may find out that a collective failed, where torch's timeout is longer."""
MOMENT = timedelta(milliseconds=1)
HANG_UP = 2**31 - 1  # a tag that nobody sends with
GONE = "died or left"
WORD = 128  # bytes of what a rank says in a roll call

Groups = Sequence[dist.ProcessGroup]


class Members:
    """The ranks of one mesh, made by all of them together. `groups` are those that they communicate in.

    `group` is a CPU process group of them all, None for one rank alone; `ranks` are its members, `timeout` is the
    shortest of torch's timeouts of `groups` and of the default group.

    Raises:
        FzeroError: when another rank does not come within `timeout`.
    """

    def __init__(self, ranks: Sequence[int], groups: Groups) -> None:
        self.ranks = sorted(ranks)
        self.timeout = min(_timeouts([*groups, dist.group.WORLD]))
        self.group: dist.ProcessGroup | None = None
        self._lost: FzeroError | None = None
        self.at_failure: list[Callable[[], None]] = []  # what else is to be done when ranks lose each other
        if len(ranks) > 1:
            gloo = [group for group in groups if _is_control(group, len(ranks), self.timeout)]
            self.group = gloo[0] if gloo else self._made()
            self._groups, self._roll = [*groups, self.group], self._made()

    def twin(self, group: dist.ProcessGroup) -> dist.ProcessGroup:
        """Another process group of a group's ranks, on its backend, made by all of them together: collectives in one do
        not wait for those in the other."""
        made = self._made(dist.get_process_group_ranks(group), dist.get_backend(group))
        self._groups.append(made)
        return made

    def _made(self, ranks: Sequence[int] = (), backend: str = "gloo") -> dist.ProcessGroup:
        ranks = list(ranks or self.ranks)
        some = len(ranks) < dist.get_world_size()
        try:
            return dist.new_group(ranks, self.timeout, backend, use_local_synchronization=some)
        except RuntimeError as error:
            problem = f"not all of {named(ranks)} came to it within {seconds(self.timeout)}"
            raise FzeroError("mesh", problem, "let every rank of a mesh partition and shard on it") from error

    def begin(self, what: str) -> Begun:
        """A collective that this rank begins: within it, torch's error becomes an `FzeroError` that names `what`."""
        return Begun(self, what)

    def failure(self, what: str, since: float) -> FzeroError:
        """Hang up on every rank, call the roll, and say who is missing; what was said the first time after that, for
        the ranks have lost each other then. `since` is when this rank began, in seconds of `time.monotonic`."""
        if self._lost is None:
            self._hang_up()
            now = time.monotonic()
            deadline = max(since + self.timeout.total_seconds(), now) + min(self.timeout, PATIENCE).total_seconds()
            words, absent = self._call_roll(f"waited {now - since:.0f} s in {what}", deadline)
            self._lost = _failure(what, words, absent)
        return self._lost

    def _hang_up(self) -> None:
        """Close this rank's connections, or ranks that wait for this one would do so until their timeout. gloo closes
        all of a group's when a wait times out, so each of them waits a moment for what nobody sends."""
        for act in self.at_failure:
            act()
        for group in self._groups:
            for peer in _peers(group):
                with suppress(RuntimeError):
                    _done(dist.irecv(torch.empty(1), group=group, tag=HANG_UP, group_src=peer), deadline=0)

    def _call_roll(self, word: str, deadline: float) -> tuple[dict[int, str], dict[int, str]]:
        """Rank -> what it says, and rank -> what is wrong with it. Ranks wait for each other until the deadline."""
        said = _encoded(word)
        heard = {peer: torch.empty_like(said) for peer in _peers(self._roll)}
        receives: dict[int, Any] = {}
        sends: list[Any] = []
        for peer, buffer in heard.items():
            with suppress(RuntimeError):
                receives[peer] = dist.irecv(buffer, group=self._roll, group_src=peer)
                sends.append(dist.isend(said, group=self._roll, group_dst=peer))
        words, absent = {self.ranks[dist.get_rank(self._roll)]: word}, dict[int, str]()
        for peer, buffer in heard.items():
            if peer in receives and _done(receives[peer], deadline):
                words[self.ranks[peer]] = _decoded(buffer)
            else:
                late = time.monotonic() >= deadline
                absent[self.ranks[peer]] = f"did not take part within {seconds(self.timeout)}" if late else GONE
        for send in sends:
            _done(send, deadline)  # who is here may hear it still
        return words, absent


class Begun:
    """A collective that was begun. Each use of torch for it stands inside of a `with` of it."""

    __slots__ = ("members", "since", "what")

    def __init__(self, members: Members, what: str) -> None:
        self.members, self.what, self.since = members, what, time.monotonic()

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(error, RuntimeError) and not _is_recorded():
            raise self.members.failure(self.what, self.since) from error


def _is_recorded() -> bool:
    """Whether what is done now goes into a CUDA graph, and is not done: then no rank can fail in it."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def named(ranks: Sequence[int]) -> str:
    """`[2] -> "rank 2"`, `[0, 1] -> "ranks 0, 1"`; no more than eight of them."""
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:8]))}{more}"


def alike(words: Mapping[int, str]) -> dict[str, list[int]]:
    """`{0: "a", 1: "b", 2: "a"} -> {"a": [0, 2], "b": [1]}`."""
    ranks: dict[str, list[int]] = {}
    for rank in sorted(words):
        ranks.setdefault(words[rank], []).append(rank)
    return ranks


def seconds(duration: timedelta) -> str:
    """`timedelta(seconds=3) -> "3 s"`."""
    return f"{duration.total_seconds():g} s"


def _failure(what: str, words: Mapping[int, str], absent: Mapping[int, str]) -> FzeroError:
    if absent:
        problem = ", ".join(f"{named(ranks)} {fate}" for fate, ranks in alike(absent).items())
        way_out = "their own output says why; start all ranks again, with a longer timeout if they were only slow"
        return FzeroError(what, problem, way_out)
    places = ", ".join(f"{named(ranks)} {place}" for place, ranks in alike(words).items())
    problem = f"failed, though every rank answers: {places}"
    return FzeroError(what, problem, "let ranks take the same steps in equal time, or set a longer timeout")


def _timeouts(groups: Sequence[dist.ProcessGroup | None]) -> list[timedelta]:
    return [group._get_backend(on).options._timeout for group in groups if group for on in group._device_types]


def _is_control(group: dist.ProcessGroup, world: int, timeout: timedelta) -> bool:
    if dist.get_backend(group) != "gloo" or dist.get_world_size(group) != world:
        return False
    return set(_timeouts([group])) == {timeout}


def _peers(group: dist.ProcessGroup) -> list[int]:
    """The other ranks of a group, counted within it."""
    return [peer for peer in range(dist.get_world_size(group)) if peer != dist.get_rank(group)]


def _done(work: Any, deadline: float) -> bool:
    """Wait until a work succeeds (True), fails, or the deadline passes."""
    try:
        work.wait(max(timedelta(seconds=deadline - time.monotonic()), MOMENT))
    except RuntimeError:
        return False
    return True


def _encoded(word: str) -> Tensor:
    return torch.tensor(list(word.encode()[:WORD].ljust(WORD)), dtype=torch.uint8)


def _decoded(said: Tensor) -> str:
    return bytes(said.tolist()).decode(errors="replace").rstrip()
