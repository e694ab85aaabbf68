"""Gradients that travel as bfloat16 and are added up in float32: half the bytes, one rounding.

Bytes of a bucket of N ranks with S elements each: 2 N S, where the exact step moves 4 N S. A reduce-scatter of NCCL in
bfloat16 rounds after each addition.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fzero import Program
from fzero.variants.compression import compress_scatters
from fzero.variants.compressor import Compressor


def bf16_scatter(program: Program) -> Program:
    """Scatter every gradient as bfloat16, by an all-to-all, and take the mean in float32 on each rank. No element of a
    rank's gradient changes by more than 1/256 of itself. No state, so that loops may scatter.

    Raises:
        FzeroError: where nothing is scattered.
    """
    return compress_scatters(program, "bf16_scatter", BF16, keeps=False)


def compress(rows: Tensor, real: None) -> Tensor:
    return rows.bfloat16().view(torch.uint8)


def decompress(packed: Tensor, size: int) -> Tensor:
    return packed.view(torch.bfloat16).float()


BF16 = Compressor("bf16", lambda numel: 2 * numel, compress, decompress)
