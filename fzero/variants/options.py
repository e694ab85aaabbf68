"""Checks of a variant's options."""

from __future__ import annotations

from collections.abc import Collection

from fzero import FzeroError


def check_option(variant: str, option: str, value: object, is_good: bool, good: str) -> None:
    """Refuse the value of an option that is not `is_good`; `good` says in words what is.

    Raises:
        FzeroError: with the variant, the option and its value.
    """
    if not is_good:
        raise FzeroError(f"pass {variant!r}", f"has {option}={value!r}", f"give {good}")


def check_meetings(variant: str, rate: float, momentum: float) -> None:
    """Refuse a rate that is not above 0, and a momentum outside of [0, 1), of workers that meet now and then.

    Raises:
        FzeroError: as `check_option`.
    """
    check_option(variant, "rate", rate, 0 < rate < float("inf"), "a number above 0, as 0.7")
    check_option(variant, "momentum", momentum, 0 <= momentum < 1, "a number in [0, 1), as 0.9")


def check_fragments(variant: str, fragments: int, **numbers: Collection[int]) -> None:
    """Refuse a number of fragments below 1, and lists with numbers of fragments that there are not.

    Raises:
        FzeroError: as `check_option`.
    """
    is_number = isinstance(fragments, int) and fragments >= 1
    check_option(variant, "fragments", fragments, is_number, "a whole number from 1")
    for option, given in numbers.items():
        is_among = all(isinstance(x, int) and 0 <= x < fragments for x in given)
        check_option(variant, option, given, is_among, f"numbers of fragments, from 0 to {fragments - 1}")
