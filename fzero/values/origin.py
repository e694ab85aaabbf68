"""Origin: where the elements of a `Sharded` value came from. Slices of one value have one origin on all ranks.

Slices of one value differ, so ranks cannot compare slices. Ranks compare origins whenever they communicate about state.
So they find a rank that kept old state, read another file, drew from another seed or took another of several results.

An origin is one integer, because a step makes one for each of its results and hashes those of its arguments:

    | computations since the value was read | a hash of what the value was computed from, BITS wide |
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NewType

Origin = NewType("Origin", int)
BITS = 62
MASK = 2**BITS - 1

UNKNOWN = Origin(0)
"""The origin of zeros, and of values inside of a trace. Equal on all ranks."""


def make_origin(number: int, steps: int = 0) -> Origin:
    """The origin that a number stands for, `steps` computations after that value was read."""
    return Origin(steps << BITS | number & MASK)


def describe_origin(origin: Origin) -> str:
    """An origin, as errors show it."""
    return f"{origin >> BITS} steps after {origin & 0xFFFFFFFFFFFF:012x}"


def describe_state(path: str, origin: Origin) -> str:
    """The line by which ranks compare the state at a path."""
    return f"state {path}: made {describe_origin(origin)}"


def follow(origins: Iterable[Origin], what: int = 0) -> Origin:
    """The origin of values that `what`, a number, computed from values of these origins."""
    given = tuple(origins)
    # Python hashes integers, and tuples of integers, alike in every process
    return make_origin(hash((what, given)), 1 + (max(given, default=UNKNOWN) >> BITS))


def number_values(count: int) -> list[int]:
    """A number for each of `count` values that are made together, by which `tell_apart` makes their origins differ."""
    return [hash((i, count)) & MASK for i in range(count)]


def tell_apart(origin: Origin, numbers: Iterable[int]) -> list[Origin]:
    """The origins of values that are made together, from the `origin` of all and from `number_values`."""
    # without a call of `Origin`, because a step does this for each of its results
    return [origin ^ own for own in numbers] if origin else [UNKNOWN for _ in numbers]  # type: ignore[misc]
