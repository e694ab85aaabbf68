"""What calls leave behind: neither a batch nor state waits for a collection of garbage, which may come late."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fzero
from fzero.base import garbage

MESH = fzero.VirtualMesh(fsdp=2)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


def make() -> Any:
    """A step and its parameters, of equal layers."""
    params, apply = fzero.lower(nn.Sequential(*[Block() for _ in range(4)]))

    def step(p: Any, batch: Any) -> Any:
        def loss(p: Any) -> Tensor:
            return apply(p, batch["x"])[batch["c"]].square().mean()

        value, grads = fzero.value_and_grad(loss)(p)
        return fzero.tree.map(lambda w, g: w - 0.1 * g, p, grads), value

    return step, params


def draw(rows: int) -> dict[str, Tensor]:
    x = torch.randn(rows, 8)
    return {"x": x, "c": x[:, 0] > -1}


@pytest.fixture
def without_collections() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("without_collections")
@pytest.mark.parametrize("options", [{}, {"donate": False}, {"stage": 2}, {"memory": "1GiB"}], ids=str)
def test_a_call_keeps_none_of_its_arguments(options: Any) -> None:
    """Of the first call, of one whose trace has open sizes, and of ranks whose batches differ in sizes."""
    step, params = make()
    simulated, state = fzero.simulate(step, MESH, **options), fzero.partition(params, MESH)
    given: list[Any] = []
    for rows in (4, 6, 8, 10):
        batch = draw(rows)
        leaves = fzero.tree.leaves(state)
        given += map(weakref.ref, (*batch.values(), *leaves, *(leaf.local for leaf in leaves)))
        state, _ = simulated(state, batch)
        del batch, leaves
    assert not any(each() is not None for each in given)


def test_the_first_trace_of_a_process_keeps_none_of_its_arguments() -> None:
    """torch keeps the frames of an import that the first trace does."""
    code = (
        "import gc, weakref, torch, fzero; gc.disable(); x = torch.ones(4); kept = weakref.ref(x); "
        "fzero.simulate(lambda x: x.sum(), fzero.VirtualMesh(fsdp=2))(x); del x; assert kept() is None"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_many_objects_count_as_old_and_few_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(garbage, "MANY", 10_000)
    gc.unfreeze()
    for count, is_old in ((5_000, False), (20_000, True)):
        gc.collect()
        with garbage.pause_garbage_collection():
            made: list[list[Any]] = [[] for _ in range(count)]
        assert any(made[0] is each for each in gc.get_objects(generation=2)) == is_old
    assert gc.isenabled()
    gc.freeze()  # as tests are run
