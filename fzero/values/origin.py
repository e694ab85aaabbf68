"""Origin: where the elements of a `Sharded` value came from. Slices of one value have one origin on all ranks.

Slices of one value differ, so ranks cannot compare slices. Ranks compare origins, whenever they communicate about state,
and so find a rank that kept old state, read another file, drew from another seed or took another of several results.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Origin(NamedTuple):
    """`number` is a hash of what the value was computed from; `steps` counts the computations since it was read."""

    steps: int
    number: int

    def __str__(self) -> str:
        return f"{self.steps} steps after {self.number & 0xFFFFFFFFFFFF:012x}"


UNKNOWN = Origin(0, 0)
"""The origin of zeros, and of values inside of a trace. Equal on all ranks."""


def follow(origins: Iterable[Origin], what: int = 0) -> Origin:
    """The origin of values that `what`, a number, computed from values of these origins."""
    given = tuple(origins)
    # Python hashes integers, and tuples of integers, alike in every process
    return Origin(1 + max(given, default=UNKNOWN).steps, hash((what, given)))


def number_values(count: int) -> list[int]:
    """A number for each of `count` values that are made together, by which `tell_apart` makes their origins differ."""
    return [hash((i, count)) for i in range(count)]


def tell_apart(origin: Origin, numbers: Iterable[int]) -> list[Origin]:
    """The origins of values that are made together, from the `origin` of all and from `number_values`. A step does this
    for each of its results, so it takes the shortest way."""
    if origin is UNKNOWN:
        return [UNKNOWN for _ in numbers]
    steps, number = origin
    return [_new(Origin, (steps, number ^ own)) for own in numbers]


_new = tuple.__new__
