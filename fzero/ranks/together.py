"""Together: ranks do something that may fail on any of them, and then all of them return, or all of them raise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any, TypeVar

from fzero.base.errors import FzeroError
from fzero.ranks.agreement import agree, meet
from fzero.ranks.failure import group_by_word, name_ranks
from fzero.ranks.members import Members
from fzero.ranks.objects import gather_objects

T = TypeVar("T")
Gather = Callable[[Any], dict[int, Any]]
"""Takes the word of this rank. Returns the word of every rank by its global rank, on every rank. Collective."""
_is_within: ContextVar[bool] = ContextVar("fzero_do_together", default=False)
"""Whether this rank is in a `do_together`, whose end tells the ranks of each error within."""


def gather_words(members: Members, call: str, about: str = "") -> Gather:
    """The `Gather` of all ranks of a mesh, or of a process that is alone. All ranks are in the same `call`, or it is an
    error on all of them. `about` are further words for errors, such as a path, which may differ."""
    if members.is_alone:
        return lambda word: {0: word}

    def gather(word: Any) -> dict[int, Any]:
        assert members.group is not None
        what = f"{call} {about}".rstrip()
        meet(members, call, what=what)
        with members.begin(what):
            words = gather_objects(word, members.group)
        return dict(zip(members.ranks, words))

    return gather


def do_together(gather: Gather, do: Callable[[], T], where: str, what: str, way_out: str) -> list[T]:
    """The results of `do()` on each rank, in the order of ranks. Collective.

    Raises:
        FzeroError: on all ranks, when `do` raised on any. The error is about `where` and says that these ranks "could
            not `what`". A process that is alone raises the `FzeroError` of `do` itself, and an interrupted rank its
            interrupt.
    """
    value: T | None = None
    error: BaseException | None = None
    token = _is_within.set(True)
    try:
        value = do()
    except BaseException as caught:  # an interrupt too: the other ranks would wait for this one
        error = caught
    finally:
        _is_within.reset(token)
    try:
        outcomes = gather((value, None if error is None else _describe_error(error)))
    finally:
        if error is not None and not isinstance(error, Exception):
            raise error
    failed = {rank: cause for rank, (_, cause) in outcomes.items() if cause is not None}
    if failed:
        if len(outcomes) == 1 and isinstance(error, FzeroError):
            raise error
        causes = group_by_word(failed).items()
        problem = ", ".join(f"{name_ranks(ranks)} could not {what}: {cause}" for cause, ranks in causes)
        raise FzeroError(where, problem, way_out) from error
    return [value for value, _ in outcomes.values()]


@contextmanager
def tell_others(members: Members, what: str) -> Iterator[None]:
    """Let an error of this rank alone take part in the agreement that the other ranks come to next. All of them then
    raise. An error that an agreement raised is known to all. Errors call the agreement `what`."""
    try:
        yield
    except Exception as error:
        if not members.is_alone and error is not members.told:
            with suppress(Exception):  # it raises the error, or says that ranks have lost each other
                agree(members, 0, list, error, what=what)
        raise


def write_together(members: Members, do: Callable[[], T], call: str) -> T:
    """`do()` of this rank, which writes slices to a disk. All ranks are in the same `call`.

    Within a `do_together` there is no collective: the ranks hear of an error at the end of that.

    Raises:
        FzeroError: on all ranks, as `do_together`.
    """
    if members.is_alone or _is_within.get():
        return do()
    done: list[T] = []
    way_out = "see to that rank, or give it another disk"
    do_together(gather_words(members, call), lambda: done.append(do()), call, "write its slices", way_out)
    return done[0]


def _describe_error(error: BaseException) -> str:
    if isinstance(error, FzeroError):
        return str(error)
    return f"{type(error).__name__}: {error}".removesuffix(": ")
