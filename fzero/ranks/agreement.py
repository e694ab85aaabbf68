"""Agreement: before ranks communicate, they make sure that all of them are about to do the same.

    each rank has     a number: a hash of lines that describe what the rank is about to do
    ranks compare     the largest and the smallest number, in one all-reduce
    if these differ   ranks search for the first line that differs, by halves, and tell each other this line alone

A disagreement costs a rank some kilobytes: log2 of the lines all-reduces of two numbers, two numbers of each rank, and
the texts of at most `SHOWN` ranks.

`compare` is a generator: it yields what it asks all ranks for, and is sent the answer. So one description serves a live
rank, which `agree` runs, and members without processes, whose answers `join` computes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from fzero.base.errors import FzeroError
from fzero.ranks.failure import name_ranks
from fzero.ranks.members import Members
from fzero.ranks.objects import gather_tensors

WIDTH = 240  # characters of a line, or of an error, that a message shows
SHOWN = 4  # different lines that a message shows
LONGEST = 1 << 16  # bytes of a line that a rank tells others
BEFORE = "agreement before a step"

Lines = Callable[[], Sequence[str]]
"""A function that returns the lines of a rank: they are needed only where ranks disagree."""


class Largest(NamedTuple):
    """Numbers of each member -> the largest at each position."""

    numbers: tuple[int, ...]

    def run(self, members: Members) -> list[int]:
        x = torch.tensor(self.numbers, device="cpu")
        members.wait(dist.all_reduce(x, dist.ReduceOp.MAX, group=members.group, async_op=True))
        return x.tolist()

    @staticmethod
    def join(row: Sequence[Largest]) -> list[int]:
        return [max(column) for column in zip(*(each.numbers for each in row))]


class Everyone(NamedTuple):
    """Numbers of each member -> those of all members, in their order."""

    numbers: tuple[int, ...]

    def run(self, members: Members) -> list[list[int]]:
        mine = torch.tensor(self.numbers, device="cpu")
        return [x.tolist() for x in gather_tensors(mine, members.group, members.wait)]

    @staticmethod
    def join(row: Sequence[Everyone]) -> list[list[int]]:
        return [list(each.numbers) for each in row]


class Text(NamedTuple):
    """The text of one member, of `nbytes` bytes -> that text. The texts of others do not count."""

    text: bytes
    member: int
    nbytes: int

    def run(self, members: Members) -> bytes:
        x = torch.tensor(list(self.text[: self.nbytes].ljust(self.nbytes)), dtype=torch.uint8, device="cpu")
        members.wait(dist.broadcast(x, group=members.group, group_src=self.member, async_op=True))
        return bytes(x.tolist())

    @staticmethod
    def join(row: Sequence[Text]) -> bytes:
        return row[row[0].member].text


Question = Largest | Everyone | Text


class Word(NamedTuple):
    """What one or more members say: a line, or their error."""

    members: list[int]
    text: str


class Disagreement(NamedTuple):
    """Why members cannot go on: `words` of members that say different things. Where some failed, their errors alone.
    `is_of_steps`: all of them are about to run a step."""

    words: list[Word]
    is_error: bool
    more: int  # words beyond `SHOWN`
    is_of_steps: bool = False


def digest(lines: Sequence[str]) -> int:
    """Hash lines to a 62-bit number, the same in every process."""
    return _number(hashlib.sha256("\n".join(lines).encode()))


def _number(hashed: Any) -> int:
    return int.from_bytes(hashed.digest()[:8], "big") >> 2


def agree(
    members: Members,
    number: int,
    lines: Lines,
    error: BaseException | None = None,
    vote: int = 0,
    what: str = BEFORE,
    is_step: bool = False,
) -> int:
    """Return once all ranks of `members` have called with one `number`. The result is the largest `vote` of any rank.

    Costs one all-reduce of 24 bytes. `lines` describe what `number` stands for. Errors call the agreement `what`.
    `is_step` says that the rank is about to run a step. `members.is_between_steps` says whether all ranks were, when
    their numbers differed.

    Raises:
        FzeroError: on every rank, with the first line that differs and its ranks, when numbers differ; on all
            ranks without an `error` when some ranks give the `error` that they failed with, which those ranks raise; on
            the remaining ranks when a rank does not take part within torch's timeout.
    """
    if members.is_alone:
        if error is not None:
            raise error
        return vote
    members.agreements += 1
    found: Any = None
    steps, answer = compare(number, lines, error, vote, is_step), None
    with members.begin(what):
        try:
            while True:
                answer = steps.send(answer).run(members)
        except StopIteration as end:
            found = end.value
    members.told = error  # of which the other ranks know now
    if error is not None:
        raise error
    if not isinstance(found, Disagreement):
        return int(found)
    members.told, members.is_between_steps = _disagreement(found, members.ranks, what), found.is_of_steps
    raise members.told


def meet(members: Members, call: str, vote: int = 0, what: str | None = None) -> int:
    """Return once all ranks of `members` are in the same `call`. The result is the largest `vote` of any rank.

    A rank meets the others before it sends anything of another size outside of a step. Messages of different sizes end
    the process of a rank; an agreement has one size. Errors call the agreement `what`, by default `call`.

    Raises:
        FzeroError: as `agree`; on all ranks, when a rank is in another call.
    """
    if members.is_alone:
        return vote
    lines = [f"call of {call}"]
    return agree(members, digest(lines), lambda: lines, vote=vote, what=what or call)


def compare(
    number: int, lines: Lines, error: BaseException | None = None, vote: int = 0, is_step: bool = False
) -> Generator[Question, Any, int | Disagreement]:
    """The largest vote of any member, if all numbers are equal and no member has an error. Otherwise the difference."""
    mine = -1 if error is not None else number
    largest, smallest, voted = yield Largest((mine, -mine, int(vote)))  # one maximum gives the smallest number too
    if largest == -smallest != -1:
        return int(voted)
    is_error = -smallest == -1
    if is_error:
        word = "" if error is None else f"{type(error).__name__}: {error}"
    else:
        word = yield from _find_line(lines())
    found = yield from _share(word, is_error)
    if is_error:
        return found
    (others,) = yield Largest((int(not is_step),))
    return found._replace(is_of_steps=not others)


def _find_line(lines: Sequence[str]) -> Generator[Question, Any, str]:
    """This member's line at the first position where lines of members differ."""
    hashed, prefixes = hashlib.sha256(), [0]
    for line in lines:
        hashed.update(f"{line}\n".encode())
        prefixes.append(_number(hashed))
    (count,) = yield Largest((len(lines),))
    equal, different = 0, count  # so many first lines are equal, and not equal
    while different - equal > 1:
        middle = (equal + different) // 2
        here = prefixes[middle] if middle < len(prefixes) else -middle
        largest, smallest = yield Largest((here, -here))
        equal, different = (middle, different) if largest == -smallest else (equal, middle)
    return lines[equal] if equal < len(lines) else "nothing more"


def _share(word: str, is_error: bool) -> Generator[Question, Any, Disagreement]:
    """The words of all members. The first member of those that say the same tells its word."""
    text = word.encode()[:LONGEST]
    said = yield Everyone((_number(hashlib.sha256(word.encode())), len(text)))
    holders: dict[int, list[int]] = {}
    for member, (number, nbytes) in enumerate(said):
        if nbytes or not is_error:
            holders.setdefault(number, []).append(member)
    words = []
    for group in list(holders.values())[:SHOWN]:
        told = yield Text(text, group[0], said[group[0]][1])
        words.append(Word(group, told.decode(errors="replace")))
    return Disagreement(words, is_error, len(holders) - len(words))


PROBLEMS = {
    "state": (
        "ranks hold state that was not made alike",
        "give every rank the values of the same step, file and seed, or partition with source_rank=0",
    ),
    "data": ("ranks take different data", "make the loader alike on every rank, and resume it at one position"),
    "configuration": ("ranks have different configurations", "give every rank the same configuration and optimizer"),
    "control": ("callbacks of ranks ask for different things", "let callbacks decide alike on every rank"),
    "leaf": ("ranks give different leaves", "give every rank the same tree"),
    "call": (
        "ranks call different functions",
        "let all ranks call the same functions together: none may save, evaluate or generate alone",
    ),
    "collective": (
        "ranks are about to communicate about different things",
        "outside of a step let all ranks use the same values in the same order",
    ),
}
"""The first word of a line -> the problem where this line differs, and the way out."""
STEPS = (
    "ranks are about to run different steps",
    "give every rank the same step, and batches that differ in sizes alone",
)


def _disagreement(found: Disagreement, ranks: Sequence[int], what: str) -> FzeroError:
    """The error for words that differ."""
    words = [(name_ranks([ranks[member] for member in word.members]), word) for word in found.words]
    if found.is_error:
        failed = [rank for _, word in words for rank in word.members]
        told = _shorten(words[0][1].text) if len(words) == 1 else _list_words(words, found.more)
        where = name_ranks(sorted(ranks[member] for member in failed))
        does = "make the step" if what == BEFORE else "go on"
        return FzeroError(where, f"could not {does}: {told}", "mend it there; this rank is fine")
    kinds = [word.text.partition(" ")[0] for word in found.words]
    first = found.words[kinds.index("call") if "call" in kinds else 0].text  # a call may meet a step
    problem, way_out = PROBLEMS.get(first.partition(" ")[0], STEPS)
    return FzeroError(first.partition(": ")[0], f"{problem}: {_list_words(words, found.more)}", way_out)


def _list_words(words: Sequence[tuple[str, Word]], more: int) -> str:
    """`"ranks 0, 2 have 'a', rank 1 has 'b'"`, from shortly before words differ."""
    texts = [word.text for _, word in words]
    differ = next((i for i, row in enumerate(zip(*texts)) if len(set(row)) > 1), 0)
    start = max(differ - WIDTH // 2, 0)
    shown = [
        f"{names} {'have' if len(word.members) > 1 else 'has'} {_shorten(word.text, start)!r}" for names, word in words
    ]
    return ", ".join(shown) + (f" and {more} more" if more else "")


def _shorten(word: str, start: int = 0) -> str:
    """At most WIDTH characters of a word, from `start` on, with dots where some are left out."""
    rest = word[start:]
    return ("..." if start else "") + (rest if len(rest) <= WIDTH else f"{rest[:WIDTH]}...")
