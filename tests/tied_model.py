"""The model of the checkpoints in tests/formats/deepspeed. Torch alone: DeepSpeed's Python imports it too."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class TiedModel(nn.Module):
    """Sizes that no number of ranks divides, a shared parameter, a frozen one, a buffer."""

    offset: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(2)])
        self.scale = nn.Parameter(torch.full((1,), 1.5))
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight
        self.fixed = nn.Parameter(torch.arange(6.0) / 7, requires_grad=False)
        self.register_buffer("offset", torch.arange(6.0) / 100)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x).tanh() * self.scale + (self.offset + self.fixed).to(x.dtype)
        return self.head(x)
