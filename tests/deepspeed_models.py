"""Models, batches and loops that the tests of `fzero.deepspeed` share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

import fzero.deepspeed
from fzero import VirtualMesh

MESH = VirtualMesh(fsdp=2)
ROWS = 8
"""Examples of all ranks in one call of the engine."""


class Classifier(nn.Module):
    """A model that returns its loss."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(width, width) for _ in range(2)])
        self.head = nn.Linear(width, 4)

    def scores(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.scores(x).float(), y)


def make_model() -> Classifier:
    torch.manual_seed(0)
    return Classifier()


def make_batches(count: int, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(ROWS, 8, generator=generator), torch.randint(0, 4, (ROWS,), generator=generator))
        for _ in range(count)
    ]


def make_engine(config: Any, **how: Any) -> Any:
    model = how.pop("model", None) or make_model()
    return fzero.deepspeed.initialize(model=model, config=config, **{"mesh": MESH, **how}).engine


def run_loop(engine: Any, batches: Iterable[tuple[Tensor, Tensor]]) -> list[float]:
    """The losses of DeepSpeed's loop."""
    losses = []
    for batch in batches:
        loss = engine(*batch)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses
