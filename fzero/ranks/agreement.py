"""Agreement: before a step communicates, its ranks make sure that all of them are about to run the same program."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from fzero.base.errors import FzeroError
from fzero.ranks.failure import group_by_word, name_ranks
from fzero.ranks.members import Members

WIDTH = 240  # characters of a line, or of an error, that a message shows
SHOWN = 4  # different lines that a message shows


class Report(NamedTuple):
    """What a rank tells the others: the lines that describe its step, and the error that it failed with, "" if none."""

    error: str
    lines: list[str]


def digest(lines: Sequence[str]) -> int:
    """Hash lines to a 62-bit number, the same in every process."""
    return int.from_bytes(hashlib.sha256("\n".join(lines).encode()).digest()[:8], "big") >> 2


def agree(
    members: Members, number: int, lines: Sequence[str], error: BaseException | None = None, vote: bool = False
) -> bool:
    """Return once all ranks of `members` have called with one `number`. The result says whether any rank gave a `vote`.

    Costs one all-reduce of 24 bytes. `lines` describe what `number` stands for; ranks exchange lines only if their
    numbers differ.

    Raises:
        FzeroError: on every rank, with the first line that differs and its ranks, when numbers differ; on all ranks
            without an `error` when some ranks give the `error` that they failed with, which those ranks raise; on the
            remaining ranks when a rank does not take part within torch's timeout.
    """
    found = _exchange(members, number, lines, error, vote)
    if error is not None:
        raise error
    if isinstance(found, bool):
        return found
    raise _disagreement(dict(zip(members.ranks, found)))


def _exchange(
    members: Members, number: int, lines: Sequence[str], error: BaseException | None, vote: bool
) -> list[Report] | bool:
    """Whether any rank gave a vote, if all numbers are equal and no rank has an error. Otherwise each rank's report."""
    if members.group is None:
        return vote
    mine = -1 if error is not None else number
    ends = torch.tensor([mine, -mine, int(vote)], device="cpu")  # one MAX gives the largest and the smallest number
    reports: list[Any] = [None] * len(members.ranks)
    with members.begin("agreement before a step"):
        dist.all_reduce(ends, dist.ReduceOp.MAX, group=members.group)
        if int(ends[0]) == -int(ends[1]) != -1:
            return bool(ends[2])
        text = "" if error is None else f"{type(error).__name__}: {error}"
        dist.all_gather_object(reports, Report(text, list(lines)), group=members.group)
    return reports


def _disagreement(reports: dict[int, Report]) -> FzeroError:
    """The error for reports that differ: ranks that failed if there are any, else the first line that differs."""
    failed = {rank: error for rank, (error, _) in reports.items() if error}
    if failed:
        same = len(set(failed.values())) == 1
        what = _shorten(next(iter(failed.values()))) if same else _list_words(failed)
        return FzeroError(
            name_ranks(list(failed)), f"could not make the step: {what}", "mend it there; this rank is fine"
        )
    for row in zip_longest(*(lines for _, lines in reports.values()), fillvalue="nothing more"):
        if len(set(row)) > 1:
            return FzeroError(
                row[0].partition(":")[0],
                f"ranks are about to run different steps: {_list_words(dict(zip(reports, row)))}",
                "give every rank arguments of the same shapes and the same step",
            )
    raise AssertionError("ranks disagree about equal lines")  # digests of equal lines are equal


def _list_words(words: dict[int, str]) -> str:
    """`{0: "a", 1: "b", 2: "a"} -> "ranks 0, 2 have 'a', rank 1 has 'b'"`, from shortly before words differ."""
    differ = next((i for i, row in enumerate(zip(*words.values())) if len(set(row)) > 1), 0)
    start = max(differ - WIDTH // 2, 0)
    groups = [
        f"{name_ranks(ranks)} {'have' if len(ranks) > 1 else 'has'} {_shorten(word, start)!r}"
        for word, ranks in group_by_word(words).items()
    ]
    more = f" and {len(groups) - SHOWN} more" if len(groups) > SHOWN else ""
    return ", ".join(groups[:SHOWN]) + more


def _shorten(word: str, start: int = 0) -> str:
    """At most WIDTH characters of a word, from `start` on, with dots where some are left out."""
    rest = word[start:]
    return ("..." if start else "") + (rest if len(rest) <= WIDTH else f"{rest[:WIDTH]}...")
