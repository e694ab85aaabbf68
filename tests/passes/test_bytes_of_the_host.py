"""Bytes of the host and of a disk: those that are planned are those that the rank with most of them has."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peaks import Peaks
from programs import dense
from torch import Tensor

import fzero
from fzero import VirtualMesh, optim, tree
from fzero.base.placement import Placement

MESH = VirtualMesh(fsdp=2)
PARAMS = {"layers": [{"w": torch.arange(25.0).view(5, 5) / 25, "b": torch.ones(5)}]}
"""30 elements in one bucket: rank 0 holds 16, and the other one 14."""
ROWS = torch.arange(20.0).view(4, 5) / 20
RATE, WIDE = torch.tensor(0.1), torch.tensor(0.1, dtype=torch.float64)

Update = Callable[[Any, Any, Any], Any]
"""(gradients, state, parameters) -> the new parameters and state"""


def take(optimizer: optim.GradientTransformation) -> Update:
    def update(grads: Any, state: Any, params: Any) -> Any:
        updates, state = optimizer.update(grads, state, params)
        return optim.apply_updates(params, updates), state

    return update


def by_hand(average: Callable[[Tensor, Tensor], Tensor]) -> Update:
    """Means by `average(mean, gradient)`, leaf by leaf, and a captured rate."""

    def update(grads: Any, means: Any, params: Any) -> Any:
        means = tree.map(average, means, grads)
        return tree.map(lambda p, m: p - RATE * m, params, means), means

    return update


OPTIMIZERS: dict[str, optim.GradientTransformation] = {
    "sgd": optim.sgd(0.1, momentum=0.9),
    "a captured rate": optim.sgd(lambda count: RATE, momentum=0.9),
    "adamw": optim.adamw(0.1),
    "a rate by hand, clipped": optim.chain(optim.clip_by_global_norm(0.1), optim.inject_hyperparams(optim.adamw)(RATE)),
    "nadam": optim.nadam(0.1),
    "lamb": optim.lamb(0.1),
}
AVERAGES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a number": lambda m, g: 0.9 * m + g,
    "a captured tensor": lambda m, g: m * RATE + g,
    "a wide one": lambda m, g: torch.lerp(m, g, RATE) * WIDE,
    "a tensor of the step": lambda m, g: m * torch.tensor(2) + g,
    "a norm": lambda m, g: m / (1 + m.norm()) * RATE + g,
    "a number by name": lambda m, g: torch.addcmul(m, g, g, value=0.1),
}
UPDATES = {name: take(optimizer) for name, optimizer in OPTIMIZERS.items()} | {
    name: by_hand(average) for name, average in AVERAGES.items()
}


def begin(name: str, to: Placement | None, of_state: Placement | None) -> tuple[Any, Any]:
    """Parameters and state in these places."""
    params, resident = fzero.partition(PARAMS, MESH, to=to), fzero.partition(PARAMS, MESH)
    like = params if of_state == to else resident
    optimizer = OPTIMIZERS.get(name, optim.trace(0.9))
    state = optimizer.init(like, to=None if of_state == to else of_state)
    return params, state if name in OPTIMIZERS else state.trace


PLACES = {"state": "device host", "parameters": "host device", "both": "host host", "disk": "host disk"}
"""Where parameters and state lie."""
CASES = [
    *((name, "both", stage) for name, stage in zip(AVERAGES, [1, 3] * 3)),
    *((name, where, stage) for name, where, stage in zip(OPTIMIZERS, [*PLACES] * 2, [1, 3, 2] * 2)),
]
"""An update, where its state lies, and a stage. At stage 1 the rank with most on the host is not that with most on the
device."""


@pytest.mark.parametrize(("name", "where", "stage"), CASES)
def test_the_bytes_that_are_planned_are_those_of_the_rank_with_most(
    name: str, where: str, stage: int, tmp_path: Path
) -> None:
    """Whatever numbers the update takes from where: a copy of a number counts too."""

    def train(params: Any, state: Any, x: Tensor) -> Any:
        value, grads = fzero.value_and_grad(lambda p: dense(p["layers"][0], x).mean())(params)
        return *UPDATES[name](grads, state, params), value

    places = {"device": None, "host": fzero.host(), "disk": fzero.disk(tmp_path)}
    args = (*begin(name, *(places[each] for each in PLACES[where].split())), ROWS)
    step = fzero.simulate(train, MESH, stage=stage)
    peaks = functools.cache(lambda: Peaks(step._pipeline._cache[0].finished))  # the program, once it is traced
    step(*args, watch=lambda node, ranks: peaks().watch(node, ranks))
    most, planned = peaks().most, step._pipeline._cache[0].finished.memory()
    assert (most["device"], most["disk"]) == (planned.peak, planned.disk)
    if where == "disk":  # memory that is being written to a file is that of no value any more
        assert planned.disk and most["host"] <= planned.host
    else:
        assert most["host"] == planned.host > 0
