"""Randomness: what a random operation draws is a function of the step's seed, the rank and the operation's number.

So it depends neither on when the operation runs nor on what else draws: passes may move, drop and repeat it. After the
keys of JAX and its `fold_in`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


def fold(seed: int, *keys: int | str) -> int:
    """A well mixed 63-bit number of `seed` and `keys`, the same in every process."""
    digest = hashlib.blake2b(repr((seed, *keys)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def drawn(seed: int, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`target(*args, **kwargs)` with the default generators seeded. Leaves them used: call it within `step_seed`.

    torch's generator on CPU takes the lower 32 bits of a seed, those on a GPU all.
    """
    for generator in (torch.default_generator, *torch.cuda.default_generators):
        generator.manual_seed(seed)
    return target(*args, **kwargs)


@contextmanager
def step_seed() -> Iterator[int]:
    """A 63-bit seed, one draw from torch's default CPU generator. At exit the default generators, those of GPUs too,
    are as they were right after that draw.

    So `torch.manual_seed` seeds the steps that follow, and `torch.get_rng_state` between two steps is all that there is
    to save.
    """
    seed = int(torch.empty((), dtype=torch.int64).random_())
    generators = (torch.default_generator, *torch.cuda.default_generators)
    states = [generator.get_state() for generator in generators]
    try:
        yield seed
    finally:
        for generator, state in zip(generators, states):
            generator.set_state(state)
