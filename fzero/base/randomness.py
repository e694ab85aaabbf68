"""Randomness: what a random operation draws depends on the step's seed, the rank and the operation's number only.

The step's seed follows from the seeds and step counts in the step's state (`fzero.State`), where there are any, and
else from torch's default CPU generator.

A draw depends neither on when the operation runs nor on what else draws. So passes may move, drop and repeat a random
operation. The idea is that of JAX's keys and `fold_in`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


def fold(seed: int, *keys: int | str) -> int:
    """Hash `seed` and `keys` to a 63-bit number, the same in every process."""
    digest = hashlib.blake2b(repr((seed, *keys)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def draw(seed: int, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `target(*args, **kwargs)` with the default generators seeded by `seed`.

    The generators stay seeded and advanced: call `draw` within `step_seed`, which restores the generators. torch's CPU
    generator uses the lower 32 bits of a seed; GPU generators use all bits.
    """
    for generator in (torch.default_generator, *torch.cuda.default_generators):
        generator.manual_seed(seed)
    return target(*args, **kwargs)


@contextmanager
def step_seed(given: Sequence[Tensor] = ()) -> Iterator[int]:
    """The 63-bit seed of one step, from the 0-d tensors `given`, else drawn from torch's default CPU generator.
    Restores all default generators at exit.

    At exit the default generators, those of GPUs too, are as they were right after the draw of the seed. So without
    `given` `torch.manual_seed` seeds all following steps, and `torch.get_rng_state` between two steps is all there is
    to save. Waits for the values of `given`.
    """
    if given:
        seed = fold(*(int(x) for x in given))
    else:
        seed = int(torch.empty((), dtype=torch.int64, device="cpu").random_())
    generators = (torch.default_generator, *torch.cuda.default_generators)
    states = [generator.get_state() for generator in generators]
    try:
        yield seed
    finally:
        for generator, state in zip(generators, states):
            generator.set_state(state)
