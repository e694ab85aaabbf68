"""One seed: its layers, options and batches, and whether ranks train them as plain torch does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

import fzero
from fzero import FzeroError, tree
from fzero.tracing.layers import Layers
from property_tests.random_layers.layers import HABITS, MODEL_HABITS, WIDTH, Model

RATE, ROWS, RANKS = 1e-3, 4, 2
LENGTHS = ((3, 3), (3, 5, 3), (5, 3, 6))
WAYS = ("plain", "accumulate", "remat", "dynamic", "no donation", "memory")


@dataclass(frozen=True)
class Case:
    """A seed's model and how it is trained."""

    seed: int
    layers: int
    habits: tuple[str, ...]
    of_model: tuple[str, ...]
    returns: str
    stage: int
    way: str
    lengths: tuple[int, ...]

    def make_model(self) -> Model:
        """The model, the same one each time."""
        torch.manual_seed(self.seed)
        return Model(self.layers, self.habits, self.of_model, self.returns).double()

    def list_batches(self) -> list[Tensor]:
        """A batch for each step."""
        draws = torch.Generator().manual_seed(self.seed)
        return [torch.randn(ROWS, n, WIDTH, generator=draws, dtype=torch.float64) for n in self.lengths]


def draw_case(seed: int) -> Case:
    draw = Random(seed)
    habits, of_model = (
        draw.sample(list(HABITS), draw.choice([0, 1, 1, 1, 2, 3])),
        draw.sample(MODEL_HABITS, draw.choice([0, 0, 1, 2])),
    )
    returns, stage, way = (
        draw.choice(["tensor", "tensor", "pair", "every second"]),
        draw.choice([1, 2, 3]),
        draw.choice(WAYS),
    )
    return Case(seed, draw.randint(4, 8), (*habits,), (*of_model,), returns, stage, way, draw.choice(LENGTHS))


def train_plainly(case: Case) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and parameters of steps of plain torch: means over the parts of a batch."""
    model, losses = case.make_model(), []
    params = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for batch in case.list_batches():
        parts = batch.chunk(2 * RANKS if case.way == "accumulate" else RANKS)
        loss = sum(model(part) for part in parts) / len(parts)
        grads = torch.autograd.grad(loss, list(params.values()), allow_unused=True)
        losses.append(loss.item())
        with torch.no_grad():
            for p, grad in zip(params.values(), grads):
                p -= RATE * (0.0 if grad is None else grad)
    return losses, {name: p.detach() for name, p in model.named_parameters()}


def train_sharded(case: Case) -> tuple[list[float], dict[str, Tensor]]:
    """The same on virtual ranks."""
    params, apply = fzero.lower(case.make_model())
    run, optimizer = fzero.remat(apply) if case.way == "remat" else apply, fzero.optim.sgd(RATE)

    def step(params: Any, state: Any, batch: Tensor) -> Any:
        if case.way == "accumulate":
            differentiate = fzero.accumulate(lambda p, x: (run(p, x), torch.ones(())), 2)
        else:
            differentiate = fzero.value_and_grad(run)
        loss, grads = differentiate(params, batch)
        updates, state = optimizer.update(grads, state, params)
        return fzero.optim.apply_updates(params, updates), state, loss

    open_sizes = {"batch": {0: (1, 64), 1: (1, 64)}} if case.way == "dynamic" else None
    options: dict[str, Any] = {"memory": "10MB"} if case.way == "memory" else {"stage": case.stage}
    mesh = fzero.VirtualMesh(fsdp=RANKS)
    sharded = fzero.simulate(step, mesh, dynamic=open_sizes, donate=case.way != "no donation", **options)
    held, losses = fzero.partition(params, mesh), []
    state = optimizer.init(held)
    for batch in case.list_batches():
        held, state, loss = sharded(held, state, batch)
        losses.append(loss.item())
    whole = fzero.unpartition(held)
    return losses, dict(zip(tree.paths(whole), tree.leaves(whole)))


@contextmanager
def count_copies() -> Iterator[list[int]]:
    """Within, a list gets an item for each layer that is copied."""
    found, copy = list[int](), Layers._copy

    def note(self: Layers, run: Any, template: Any) -> Any:
        found.append(1)
        return copy(self, run, template)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Layers, "_copy", note)
        yield found


def judge(seed: int) -> tuple[int, str, str]:
    """`(seed, verdict, detail)`: equal, refused, wrong or raw; "copied" where it is equal, and layers were copied;
    "untried" where plain torch refuses the model."""
    torch.set_num_threads(1)
    case = draw_case(seed)
    try:
        losses, params = train_plainly(case)
    except (RuntimeError, AttributeError) as error:  # a layer that was left out has kept nothing
        return seed, "untried", str(error)
    try:
        with count_copies() as copies:
            got_losses, got = train_sharded(case)
    except FzeroError as error:
        return seed, "refused", str(error)
    except Exception as error:
        return seed, "raw", f"{type(error).__name__}: {error}"
    try:
        torch.testing.assert_close(got_losses, losses, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(got, {name: params[name] for name in got}, rtol=1e-10, atol=1e-12)
    except AssertionError as error:
        return seed, "wrong", str(error)[:300]
    return seed, "copied" if copies else "equal", ""
