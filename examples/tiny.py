"""What the small examples train: a byte-level GPT of a size for CPUs, on batches of the standard library."""

from __future__ import annotations

from collections.abc import Iterator

import corpus
import torch
from corpus import Batch, Cut
from gpt import GPT, GPTConfig
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import cross_entropy

SEQ = 64


def byte_gpt(mesh: DeviceMesh, *, dim: int = 64, layers: int = 2, seed: int = 0) -> GPT:
    """A GPT of bytes, the same on all ranks."""
    torch.manual_seed(seed)
    return GPT(GPTConfig(vocab=256, seq=SEQ, dim=dim, layers=layers, heads=dim // 32)).to(mesh.device_type)


def batches(mesh: DeviceMesh, steps: int, *, size: int = 16) -> Iterator[Batch]:
    """This rank's rows of a batch of `size` windows of the standard library, for each step."""
    text = corpus.stdlib(torch.device(mesh.device_type)).train
    cut = Cut(size, SEQ, mesh.get_rank(), mesh.size())
    return (corpus.train_batch(text, cut, seed=0, step=step) for step in range(steps))


def next_byte_loss(logits: Tensor, batch: Batch, reduction: str = "mean") -> Tensor:
    """Cross-entropy in float32."""
    return cross_entropy(logits.flatten(0, 1).float(), batch["targets"].flatten(), reduction=reduction)
