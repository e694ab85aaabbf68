"""Agreement: before a step communicates, its ranks make sure that they are about to run the same program."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from fzero.errors import FzeroError


def digest(lines: Sequence[str]) -> int:
    """A 62-bit number that stands for these lines, the same in every process."""
    return int.from_bytes(hashlib.sha256("\n".join(lines).encode()).digest()[:8], "big") >> 2


def agree(group: Any, number: int, lines: Sequence[str], error: BaseException | None = None) -> None:
    """Return when all ranks of `group` (a CPU process group; None is one rank alone) called this with one `number`.

    Costs one all-reduce of 16 bytes. `lines` describe what `number` stands for, and are exchanged when ranks differ.

    Raises:
        FzeroError: on every rank when numbers differ, with the first line that does and its ranks; on the other ranks
            when one of them gives the `error` that it failed with. That rank raises its own error.
    """
    if group is None:
        if error is not None:
            raise error
        return
    mine = -1 if error is not None else number
    ends = torch.tensor([mine, -mine])
    dist.all_reduce(ends, dist.ReduceOp.MAX, group=group)
    highest, lowest = int(ends[0]), -int(ends[1])
    if highest == lowest != -1:
        return
    told: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(
        told, (None if error is None else f"{type(error).__name__}: {error}", list(lines)), group=group
    )
    if error is not None:
        raise error
    raise _difference(told)


def _difference(told: list[tuple[str | None, list[str]]]) -> FzeroError:
    for rank, (error, _) in enumerate(told):
        if error is not None:
            return FzeroError(f"rank {rank}", f"could not make its step: {error}", "mend it there; this rank is fine")
    first = told[0][1]
    for rank, (_, lines) in enumerate(told):
        for ours, theirs in zip([*first, "nothing more"], [*lines, "nothing more"]):
            if ours != theirs:
                return FzeroError(
                    ours.partition(":")[0],
                    f"ranks are about to run different steps: rank 0 has {ours!r}, rank {rank} has {theirs!r}",
                    "give every rank arguments of the same shapes and the same step",
                )
    raise AssertionError("ranks disagree about equal lines")  # digests of equal lines are equal
