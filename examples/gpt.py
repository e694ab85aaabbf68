"""A small GPT, as anyone would write it: nothing in it knows that it will be sharded."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention


@dataclass(frozen=True)
class GPTConfig:
    """Sizes: `vocab` tokens, sequences of at most `seq`, width `dim`, `layers` blocks of `heads` heads."""

    vocab: int
    seq: int
    dim: int
    layers: int
    heads: int


class Attention(nn.Module):
    """Causal self-attention: [B, T, D] -> [B, T, D]."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.dim, 3 * config.dim)
        self.out = nn.Linear(config.dim, config.dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = rearrange(self.qkv(x), "b t (three h d) -> three b h t d", three=3, h=self.heads)
        y = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(rearrange(y, "b h t d -> b t (h d)"))


class MLP(nn.Module):
    """Two linear maps with a GELU between, four times as wide inside."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.dim, 4 * config.dim)
        self.down = nn.Linear(4 * config.dim, config.dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(gelu(self.up(x)))


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.dim)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.dim)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Tokens [B, T] -> logits of each next token [B, T, vocab].

    Radford et al. 2019 (GPT-2), with an output head of its own.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.wte = nn.Embedding(config.vocab, config.dim)
        self.wpe = nn.Embedding(config.seq, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.dim)
        self.head = nn.Linear(config.dim, config.vocab, bias=False)
        self.initialize(config.layers)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    @torch.no_grad()
    def initialize(self, layers: int) -> None:
        """Draw weights from N(0, 0.02), those that write to the residual stream smaller by sqrt(2 layers), in place."""
        for name, parameter in self.named_parameters():
            if name.endswith(("out.weight", "down.weight")):
                parameter.normal_(std=0.02 / (2 * layers) ** 0.5)
            elif parameter.ndim == 2:
                parameter.normal_(std=0.02)
            elif name.endswith("bias"):
                parameter.zero_()
