"""Models of `fzero.parallel` for tests on virtual and on real ranks: each has parameters, their split and a loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import fzero
from fzero import VirtualMesh, tree
from fzero.parallel import column, experts, pipeline, row, vocab_cross_entropy, vocab_embedding

F64 = torch.float64
WIDTH, VOCABULARY, ROWS = 8, 24, 8
_generator = torch.Generator().manual_seed(0)


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=F64, generator=_generator) / shape[-1] ** 0.5


class Layer(NamedTuple):
    """A loss of parameters and a batch, of which ranks have parts by `split` on a mesh of these data axes."""

    loss: Callable[..., Tensor]
    params: dict[str, Any]
    batch: tuple[Tensor, ...]
    split: dict[str, Any]
    data: tuple[str, ...] = ("fsdp",)

    def step(self, params: Any, *batch: Tensor) -> Any:
        return fzero.value_and_grad(self.loss)(params, *batch)

    def on_one_device(self) -> Any:
        return self.step(self.params, *self.batch)

    def on_ranks(self, mesh: VirtualMesh, stage: int = 3) -> Any:
        params = fzero.partition(self.params, mesh, split=self.split)
        loss, grads = fzero.simulate(self.step, mesh, data=self.data, stage=stage)(params, *self.batch)
        return loss, fzero.unpartition(grads)

    def trace(self, mesh: VirtualMesh) -> Any:
        params = fzero.partition(self.params, mesh, split=self.split)
        return fzero.simulate(self.step, mesh, data=self.data).trace(params, *self.batch)


TOKENS = torch.randint(VOCABULARY, (4, ROWS + 1), generator=_generator)


def lie_whole(sequence: int | None) -> Layer:
    """A decoder without attention: embedding, column, row, cross entropy, with or without sequence parallelism."""

    def loss(p: Any, tokens: Tensor, **how: Any) -> Tensor:
        inputs, labels = tokens[:, :-1], tokens[:, 1:].masked_fill(tokens[:, 1:] % 5 == 0, -100)
        h = vocab_embedding(inputs, p["embed"], sequence=sequence)
        hidden = column(F.layer_norm(h, (WIDTH,), p["norm"]), p["up"], p["up_bias"], sequence=sequence)
        h = h + row(F.gelu(hidden), p["down"], p["down_bias"], sequence=sequence)
        h = h if sequence is None else fzero.all_gather(h, "tp", sequence)
        options = {"label_smoothing": 0.1, "bias": p["head_bias"], "chunks": 1 if sequence is None else 3}
        total = vocab_cross_entropy(h, p["head"], labels, reduction="sum", **options)
        return fzero.pmean(total, "fsdp") / fzero.pmean((labels != -100).sum().to(F64), "fsdp")

    params = {
        "embed": draw(VOCABULARY, WIDTH), "norm": draw(WIDTH) + 1, "up": draw(16, WIDTH), "up_bias": draw(16),
        "down": draw(WIDTH, 16), "down_bias": draw(WIDTH), "head": draw(VOCABULARY, WIDTH), "head_bias": draw(VOCABULARY),
    }  # fmt: skip
    split = {name: ("tp", 0) for name in ("embed", "up", "up_bias", "head", "head_bias")} | {"down": ("tp", 1)}
    return Layer(loss, params, (TOKENS,), split)
