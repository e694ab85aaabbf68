"""Gradients as signs with error feedback: scaled signSGD (Karimireddy et al., 2019, arXiv:1901.09847), 1-bit SGD.

A bit for each element, and for 256 of them one float32 scale, the mean of their absolute values. Bytes of a bucket of N
ranks with S elements each: N (ceil(S / 8) + 4 ceil(S / 256)), where the exact step moves 4 N S.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from fzero import Program
from fzero.variants.compression import compress_scatters
from fzero.variants.compressor import Compressor
from fzero.variants.quantization import BLOCK


def sign_scatter(program: Program) -> Program:
    """Scatter every gradient as signs, by an all-to-all, and take the mean in float32 on each rank. What a rank sends
    of a block is at most as far from the block as zeros are; the rest it sends later. Padding counts in no scale.

    Raises:
        FzeroError: where nothing is scattered, and where a loop of microbatches scatters in each turn.
    """
    return compress_scatters(program, "sign_scatter", SIGN)


def count_bytes(numel: int) -> int:
    return -(-numel // 8) + 4 * -(-numel // BLOCK)


def compress(rows: Tensor, real: Tensor) -> Tensor:
    count, size = rows.shape
    blocks, there = (pad(x, (0, -size % BLOCK)).view(count, -1, BLOCK) for x in (rows, real))
    scales = (blocks.abs() * there).sum(2) / there.sum(2).clamp(min=1)  # [N, B]
    bits = pad(rows >= 0, (0, -size % 8)).view(count, -1, 8)
    packed = (bits * _weights(rows)).sum(2, dtype=torch.uint8)
    return torch.cat([packed, scales.float().view(torch.uint8)], 1)


def decompress(packed: Tensor, size: int) -> Tensor:
    split = -(-size // 8)
    signs = ((packed[:, :split, None] & _weights(packed)) != 0).view(len(packed), -1)[:, :size] * 2.0 - 1
    scales = packed[:, split:].clone(memory_format=torch.contiguous_format).view(-1).view(torch.float32)
    return signs * scales.view(len(packed), -1).repeat_interleave(BLOCK, 1)[:, :size]


def _weights(like: Tensor) -> Tensor:
    return 2 ** torch.arange(8, dtype=torch.uint8, device=like.device)


SIGN = Compressor("sign", count_bytes, compress, decompress, masks=True)
