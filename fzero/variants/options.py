"""The check of a variant's options."""

from __future__ import annotations

from fzero import FzeroError


def check_option(variant: str, option: str, value: object, is_good: bool, good: str) -> None:
    """Refuse the value of an option that is not `is_good`; `good` says in words what is.

    Raises:
        FzeroError: with the variant, the option and its value.
    """
    if not is_good:
        raise FzeroError(f"pass {variant!r}", f"has {option}={value!r}", f"give {good}")
