"""What a step uses up while it is traced: each call would be the first one, and an error says so."""

from __future__ import annotations

import array
import itertools
import random
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fzero

MESH = fzero.VirtualMesh(fsdp=2)
Make = Callable[[], tuple[Any, Callable[[Any], float]]]


def count_in(entries: Any) -> float:
    entries[0] += 1
    return float(entries[0])


CASES: dict[str, Make] = {
    "an iterator": lambda: (iter([1.0, 2.0]), next),
    "a count": lambda: (itertools.count(), next),
    "a cycle": lambda: (itertools.cycle([1.0, 2.0]), next),
    "a chain": lambda: (itertools.chain(iter([1.0, 2.0]), [3.0]), next),
    "a map": lambda: (map(float, range(4)), next),
    "pairs": lambda: (zip(range(4), range(4)), lambda it: next(it)[1]),
    "numbered entries": lambda: (enumerate([1.0, 2.0]), lambda it: next(it)[1]),
    "a generator": lambda: ((float(n) for n in range(4)), next),
    "a queue": lambda: (deque([1.0, 2.0]), deque.popleft),
    "random numbers": lambda: (random.Random(0), random.Random.random),
    "random numbers of numpy": lambda: (np.random.default_rng(0), lambda draw: draw.random()),
    "random numbers of numpy, as they were": lambda: (np.random.RandomState(0), lambda draw: draw.rand()),
    "an array of numpy": lambda: (np.zeros(2), count_in),
    "an array": lambda: (array.array("d", [0.0]), count_in),
}


@pytest.mark.parametrize("name", CASES)
def test_what_a_step_uses_up_is_refused(name: str) -> None:
    held, use = CASES[name]()
    step = fzero.simulate(lambda x: x * use(held), MESH)
    with pytest.raises(fzero.FzeroError, match=r"^held(\[0\])?: the step changes it from .* while it is traced, and"):
        step(torch.ones(2))


def test_a_list_that_a_parameter_has_by_default_is_refused_where_it_is_read() -> None:
    def count(x: Tensor, calls: list[int] = [0]) -> Tensor:  # noqa: B006
        calls.append(1)
        return x * len(calls)

    with pytest.raises(fzero.FzeroError, match=r"^calls: the step changes it from 1 to 2 entries"):
        fzero.simulate(count, MESH)(torch.ones(2))


def test_what_a_step_only_reads_is_no_error() -> None:
    table, draws = np.arange(3.0), itertools.chain([1.0], [2.0])
    step = fzero.simulate(lambda x: x * table[2] * (2 if draws is None else 1), MESH)
    assert step(torch.ones(2)).tolist() == [2.0, 2.0]
