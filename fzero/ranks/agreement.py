"""Agreement: before a step communicates, its ranks make sure that they are about to run the same program."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from fzero.base.errors import FzeroError
from fzero.ranks.members import Members, alike, named

WIDTH = 240  # characters of a line, or of an error, that a message shows
SHOWN = 4  # different lines that it shows


class Told(NamedTuple):
    """What a rank says to the others: its lines, or the error that it failed with."""

    error: str
    lines: list[str]


def digest(lines: Sequence[str]) -> int:
    """A 62-bit number that stands for these lines, the same in every process."""
    return int.from_bytes(hashlib.sha256("\n".join(lines).encode()).digest()[:8], "big") >> 2


def agree(
    members: Members, number: int, lines: Sequence[str], error: BaseException | None = None, vote: bool = False
) -> bool:
    """Return when all ranks of `members` called this with one `number`: whether any of them gave a `vote`.

    Costs one all-reduce of 24 bytes. `lines` describe what `number` stands for, and are exchanged when ranks differ.

    Raises:
        FzeroError: on every rank when numbers differ, with the first line that does and its ranks; on the other ranks
            when some give the `error` that they failed with, which those raise; on the ranks that are left when one
            does not take part within torch's timeout.
    """
    told = _told(members, number, lines, error, vote)
    if error is not None:
        raise error
    if isinstance(told, bool):
        return told
    raise _difference(dict(zip(members.ranks, told)))


def _told(
    members: Members, number: int, lines: Sequence[str], error: BaseException | None, vote: bool
) -> list[Told] | bool:
    """What each rank has to say; where all numbers are equal and no rank has an error, whether there was a vote."""
    if members.group is None:
        return vote
    mine = -1 if error is not None else number
    ends = torch.tensor([mine, -mine, int(vote)])
    told: list[Any] = [None] * len(members.ranks)
    with members.begin("agreement before a step"):
        dist.all_reduce(ends, dist.ReduceOp.MAX, group=members.group)
        if int(ends[0]) == -int(ends[1]) != -1:
            return bool(ends[2])
        text = "" if error is None else f"{type(error).__name__}: {error}"
        dist.all_gather_object(told, Told(text, list(lines)), group=members.group)
    return told


def _difference(told: dict[int, Told]) -> FzeroError:
    failed = {rank: error for rank, (error, _) in told.items() if error}
    if failed:
        return _of_errors(failed)
    for row in zip_longest(*(lines for _, lines in told.values()), fillvalue="nothing more"):
        if len(set(row)) > 1:
            return FzeroError(
                row[0].partition(":")[0],
                f"ranks are about to run different steps: {_listed(dict(zip(told, row)))}",
                "give every rank arguments of the same shapes and the same step",
            )
    raise AssertionError("ranks disagree about equal lines")  # digests of equal lines are equal


def _of_errors(failed: dict[int, str]) -> FzeroError:
    same = len(set(failed.values())) == 1
    what = _cut(next(iter(failed.values()))) if same else _listed(failed)
    return FzeroError(named(list(failed)), f"could not make the step: {what}", "mend it there; this rank is fine")


def _listed(words: dict[int, str]) -> str:
    """`{0: "a", 1: "b", 2: "a"} -> "ranks 0, 2 have 'a', rank 1 has 'b'"`, each from shortly before they differ."""
    differ = next((i for i, row in enumerate(zip(*words.values())) if len(set(row)) > 1), 0)
    start = max(differ - WIDTH // 2, 0)
    groups = [
        f"{named(ranks)} {'have' if len(ranks) > 1 else 'has'} {_cut(word, start)!r}"
        for word, ranks in alike(words).items()
    ]
    more = f" and {len(groups) - SHOWN} more" if len(groups) > SHOWN else ""
    return ", ".join(groups[:SHOWN]) + more


def _cut(word: str, start: int = 0) -> str:
    """What a message shows of a word, from `start` on."""
    rest = word[start:]
    return ("..." if start else "") + (rest if len(rest) <= WIDTH else f"{rest[:WIDTH]}...")
