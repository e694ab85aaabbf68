"""Turns: ranks that each run programs in an order of their own, and yet all run the same program at a time.

A program gathers slices, so all ranks take part in it. Ranks that generate text need programs of other lengths, or end
earlier. So before each program every rank says which one it wants. The one that most ranks want is run: by the others
with zeros, whose results nobody reads. It goes on until no rank wants one.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from fzero import tree
from fzero.base.errors import FzeroError
from fzero.ranks.agreement import Everyone, digest
from fzero.ranks.failure import name_ranks
from fzero.ranks.members import Members
from fzero.ranks.together import gather_words

WHAT = "generate"
DONE, FAILED = -1, -2
"""What a rank says that wants no program: it has its results, or an error."""


class Request(NamedTuple):
    """A program by name, and its arguments: the program of one signature."""

    program: str
    arguments: tree.Tree

    def number(self) -> int:
        """The same on ranks that want the same program."""
        leaves, treedef = tree.flatten(self.arguments)
        return digest([self.program, str(treedef), *map(_describe, leaves)])

    def forget_values(self) -> Request:
        return Request(self.program, tree.map(lambda x: x.to("meta") if isinstance(x, Tensor) else x, self.arguments))

    def fill(self, device: torch.device) -> Request:
        """Values in the place of those that were forgotten. Masks hide nothing: attention to nothing is NaN."""

        def make(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return device if isinstance(x, torch.device) else x
            return torch.full_like(x, x.dtype == torch.bool, device=device)

        return Request(self.program, tree.map(make, self.arguments))


def _describe(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        return f"{leaf.dtype} {tuple(leaf.shape)} {leaf.stride()}"
    return leaf.type if isinstance(leaf, torch.device) else repr(leaf)


def choose(members: Members, device: torch.device, wanted: Request | None) -> tuple[Request | None, bool]:
    """`(the request to run now, whether it is this rank's own)`, None where no rank wants one. Collective.

    Raises:
        FzeroError: where another rank has failed.
    """
    mine = DONE if wanted is None else wanted.number()
    said = _say(members, mine)
    if FAILED in said:
        _refuse(members)
    if set(said) == {mine}:
        return wanted, wanted is not None
    counts = Counter(number for number in said if number != DONE)
    chosen = max(counts, key=lambda number: (counts[number], -said.index(number)))
    forms = gather_words(members, WHAT)(None if wanted is None else wanted.forget_values())
    if mine == chosen:
        return wanted, True
    return forms[members.ranks[said.index(chosen)]].fill(device), False


def fail(members: Members, error: Exception) -> None:
    """Tell all ranks, which wait in `choose`, that this one leaves by an error. Collective."""
    _say(members, FAILED)
    gather_words(members, WHAT)(f"{type(error).__name__}: {error}".rstrip(": "))


def _say(members: Members, number: int) -> list[int]:
    with members.begin(WHAT):
        return [numbers[0] for numbers in Everyone((number,)).run(members)]


def _refuse(members: Members) -> NoReturn:
    words = gather_words(members, WHAT)(None)
    failed = [rank for rank, word in words.items() if word is not None]
    problem = f"could not go on: {words[failed[0]]}"
    raise FzeroError(f"{WHAT}, {name_ranks(failed)}", problem, "mend it there; this rank is fine")
