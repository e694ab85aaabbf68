"""Failure: after a collective has failed, a rank hangs up on all ranks, calls the roll, and names who is missing.

hang up     closes this rank's connections, so that ranks that wait for this rank fail now and not at their timeout
roll call   each rank tells each other rank where it is, over a process group kept for this moment alone
error       names the ranks that did not answer and those that left by an error of their own; where there are none, it
            says where all ranks are
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fzero.base.errors import FzeroError

MOMENT = timedelta(milliseconds=1)
HANG_UP = 2**31 - 1  # a tag that no message has
GONE = "died or left"
RESTART = "mend it there, then start all ranks again, or make a new mesh on new process groups"
REFUSED = "may not read "  # the first words of a rank that the kernel keeps from the memory of another one
READABLE = (
    "the kernel let ranks read each other's memory when they met: leave their user, their dumpable flag and "
    "kernel.yama.ptrace_scope as they are during a run, and start all ranks again"
)
LEFT = "left "  # the first word of a rank that leaves the others by an error of its own
OF_CONNECTIONS = ("gloo", "nccl", "socket", "connection", "timed out", "timeout", "peer", "of the group")
"""Words in the errors, of torch and of transports, of a collective that other ranks did not take part in."""
WORD = 256  # bytes of a rank's answer in a roll call


class RefusedError(RuntimeError):
    """The kernel keeps this process from the memory of another rank's."""


def hang_up(groups: Iterable[dist.ProcessGroup]) -> None:
    """Close this rank's connections in these gloo groups; otherwise ranks wait for this rank until their timeout.

    gloo closes all connections of a group when a wait in the group times out. So this rank waits a moment for a message
    that nobody sends.
    """
    for group in groups:
        for peer in _peers(group):
            with suppress(RuntimeError):
                _wait_until(
                    dist.irecv(torch.empty(1, device="cpu"), group=group, tag=HANG_UP, group_src=peer), deadline=0
                )


def call_roll(
    group: dist.ProcessGroup,
    ranks: Sequence[int],
    word: str,
    deadline: float,
    timeout: timedelta,
    ended: Collection[int] = (),
) -> tuple[dict[int, str], dict[int, str]]:
    """Tell all ranks of a group this rank's word, and hear theirs. Return `(words, absent)`, both by global rank.

    `ranks` are the global ranks of the group. `words` has the word of each rank that answered before `deadline`, in
    seconds of `time.monotonic`; `absent` says of each other rank what is wrong: gone, or late, beyond `timeout`. Ranks
    whose processes have `ended` are gone.
    """
    said = _encode(word)
    heard = {peer: torch.empty_like(said) for peer in _peers(group)}
    receives: dict[int, Any] = {}
    sends: list[Any] = []
    for peer, buffer in heard.items():
        if ranks[peer] in ended:
            continue
        with suppress(RuntimeError):
            receives[peer] = dist.irecv(buffer, group=group, group_src=peer)
            sends.append(dist.isend(said, group=group, group_dst=peer))
    words, absent = {ranks[dist.get_rank(group)]: word}, dict[int, str]()
    for peer, buffer in heard.items():
        if peer in receives and _wait_until(receives[peer], deadline):
            words[ranks[peer]] = _decode(buffer)
        else:
            late = time.monotonic() >= deadline and ranks[peer] not in ended
            absent[ranks[peer]] = f"did not take part within {format_seconds(timeout)}" if late else GONE
    for send in sends:
        _wait_until(send, deadline)  # a rank that is here may hear this one still
    return words, absent


def roll_error(what: str, words: Mapping[int, str], absent: Mapping[int, str], cause: str = "") -> FzeroError:
    """The error of the failed collective `what`, after a roll call that found these words and these absent ranks. Where
    every rank answers, and `cause`, torch's error, is not about a connection, the error is about the cause."""
    if absent:
        problem = ", ".join(f"{name_ranks(ranks)} {fate}" for fate, ranks in group_by_word(absent).items())
        way_out = "their own output says why; start all ranks again, with a longer timeout if they were only slow"
        return FzeroError(what, problem, way_out)
    left = {rank: word for rank, word in words.items() if word.startswith(LEFT)}
    if left:
        problem = ", ".join(f"{name_ranks(ranks)} {word}" for word, ranks in group_by_word(left).items())
        return FzeroError(what, problem, RESTART)
    refused = {rank: word for rank, word in words.items() if word.startswith(REFUSED)}
    if refused:
        problem = ", ".join(f"{name_ranks(ranks)} {word}" for word, ranks in group_by_word(refused).items())
        return FzeroError(what, problem, READABLE)
    if cause and not any(word in cause.lower() for word in OF_CONNECTIONS):
        return FzeroError(what, f"failed on this rank: {cause}", RESTART)
    places = ", ".join(f"{name_ranks(ranks)} {place}" for place, ranks in group_by_word(words).items())
    problem = f"failed, though every rank answers: {places}"
    way_out = "let ranks take the same steps in equal time, or set a longer timeout"
    if len({word.rpartition(" s in ")[2] for word in words.values()}) > 1:
        way_out = "let all ranks call the same functions together: none may save, evaluate or generate alone"
    return FzeroError(what, problem, way_out)


def name_ranks(ranks: Sequence[int]) -> str:
    """`[2] -> "rank 2"`, `[0, 1] -> "ranks 0, 1"`. Shows at most eight ranks, and how many more there are."""
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:8]))}{more}"


def group_by_word(words: Mapping[int, str]) -> dict[str, list[int]]:
    """Ranks by the word that they say: `{0: "a", 1: "b", 2: "a"} -> {"a": [0, 2], "b": [1]}`."""
    ranks: dict[str, list[int]] = {}
    for rank in sorted(words):
        ranks.setdefault(words[rank], []).append(rank)
    return ranks


def format_seconds(duration: timedelta) -> str:
    """`timedelta(seconds=3) -> "3 s"`."""
    return f"{duration.total_seconds():g} s"


def _peers(group: dist.ProcessGroup) -> list[int]:
    """The other ranks of a group, counted within the group."""
    return [peer for peer in range(dist.get_world_size(group)) if peer != dist.get_rank(group)]


def _wait_until(work: Any, deadline: float) -> bool:
    """Wait until a torch work succeeds (True), or fails, or the deadline passes (False)."""
    left = math.ceil(1000 * (deadline - time.monotonic()))  # torch drops fractions of a millisecond
    try:
        work.wait(max(timedelta(milliseconds=left), MOMENT))
    except RuntimeError:
        return False
    return True


def _encode(word: str) -> Tensor:
    return torch.tensor(list(word.encode()[:WORD].ljust(WORD)), dtype=torch.uint8, device="cpu")


def _decode(said: Tensor) -> str:
    return bytes(said.tolist()).decode(errors="replace").rstrip()
