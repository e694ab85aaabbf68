"""The baseline: each byte guessed from the one before it, by counting."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from corpus import Batch
from torch import Tensor


def count(text: Tensor, vocab: int = 256) -> Tensor:
    """log2 P(next byte | byte) as counted on `text`, with add-one smoothing: [vocab, vocab], a row for each byte."""
    pairs = text[:-1].long() * vocab + text[1:].long()
    counts = torch.bincount(pairs, minlength=vocab * vocab).view(vocab, vocab).double() + 1
    return torch.log2(counts / counts.sum(dim=1, keepdim=True))


def bits_per_byte(bigram: Tensor, batches: Iterable[Batch]) -> float:
    """Mean of -log2 P(target | input) over all bytes of the batches."""
    bits = [-bigram[batch["inputs"], batch["targets"]].flatten() for batch in batches]
    return torch.cat(bits).mean().item()
