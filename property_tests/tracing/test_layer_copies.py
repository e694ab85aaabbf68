"""The law of equal layers: a trace that runs two of them, and copies what those recorded for the others, is the trace
of all of them. Layers, what they compute with and how they are called are drawn."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from traces import describe_trace

import fzero
from fzero.tracing.layers import Layers
from fzero.tracing.trace import trace

MESH, WIDTH = fzero.VirtualMesh(fsdp=2), 4
STEPS: list[Callable[[Any, Tensor, Any], Tensor]] = [
    lambda self, x, y: self.linear(x),
    lambda self, x, y: self.norm(x),
    lambda self, x, y: x + self.linear(F.gelu(x)),
    lambda self, x, y: F.dropout(x, 0.5),
    lambda self, x, y: x * self.scale,
    lambda self, x, y: x * self.bias,
    lambda self, x, y: x.add(1.0).mul_(y),
    lambda self, x, y: torch.cat([x, x.flip(0)])[: x.shape[0]],
    lambda self, x, y: F.scaled_dot_product_attention(x[None], x[None], x[None], is_causal=True)[0],
    lambda self, x, y: x.softmax(-1) + x.detach(),
    lambda self, x, y: fzero.remat(torch.tanh)(x) * 2.0,
    lambda self, x, y: torch.where(y > 0, x, x.roll(1, 0)),
    lambda self, x, y: torch.stack(x.unbind(0)).split([1, x.shape[0] - 1])[1].sum(0) + x,
]


class Layer(nn.Module):
    def __init__(self, index: int, steps: list[int], scale: float, returns: str) -> None:
        super().__init__()
        self.index, self.steps, self.scale, self.returns = index, steps, scale, returns
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.bias = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor, mask: dict[str, Tensor]) -> Any:
        for step in self.steps:
            x = STEPS[step](self, x, mask["y"])
        return {"pair": (x, mask["y"], None), "tensor": x}[self.returns]


class Model(nn.Module):
    """Layers of one or two kinds, some of which may have another constant, be frozen, share a leaf or be left out."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        kinds = [draw.choices(range(len(STEPS)), k=draw.randint(1, 4)) for _ in range(draw.choice([1, 1, 1, 2]))]
        self.returns, count = draw.choice(["tensor", "pair"]), draw.randint(4, 7)
        odd, self.left_out = draw.choice([None, None, draw.randrange(count)]), draw.choice([None] * 4 + [count - 1])
        self.layers = nn.ModuleList(
            Layer(i, kinds[i % len(kinds)], 0.5 if i == odd else 2.0, self.returns) for i in range(count)
        )
        self.embed, self.with_skip, self.with_all = nn.Linear(WIDTH, WIDTH), draw.random() < 0.2, draw.random() < 0.2
        if draw.random() < 0.2:
            self.layers[draw.randrange(count)].linear.weight = self.layers[0].linear.weight
        if draw.random() < 0.3:
            for layer in self.layers[: draw.randrange(count)]:
                layer.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x, mask, all_of = self.embed(x), {"y": x.tanh()}, []
        for i, layer in enumerate(self.layers):
            if i != self.left_out:
                made = layer(x, mask=mask)
                made = made[0] if self.returns == "pair" else made
                x = x + made if self.with_skip else made
                all_of.append(x)
        return torch.stack(all_of).sum(0) if self.with_all else x


def test_copies_of_layers_are_what_layers_record(monkeypatch: pytest.MonkeyPatch) -> None:
    copied, copy = set[int](), Layers._copy
    for seed in range(10):  # `make layers` draws others
        with monkeypatch.context() as patch:
            patch.setattr(Layers, "_copy", lambda self, *given, of=seed: (copied.add(of), copy(self, *given))[1])
            torch.manual_seed(seed)
            params, apply = fzero.lower(Model(random.Random(seed)))
            given = fzero.partition(params, MESH), torch.zeros(3, WIDTH)

            def step(params: Any, x: Tensor, apply: Any = apply) -> Any:
                return fzero.value_and_grad(lambda params: apply(params, x).square().mean())(params)

            with_copies, without = trace(step, given, MESH), trace(step, given, MESH, copies=False)
        assert describe_trace(with_copies) == describe_trace(without), seed
    assert len(copied) >= 4
