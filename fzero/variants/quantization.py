"""Block-wise int8: 256 elements share one float32 scale, so that an element takes 1 + 4/256 bytes."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 256


def count_bytes(numel: int) -> int:
    """Bytes of a row of `numel` elements: a code for each element, a scale for each block. The last block may be
    shorter."""
    return numel + 4 * -(-numel // BLOCK)


def quantize(rows: Tensor) -> Tensor:
    """[R, S] of any floating dtype -> [R, count_bytes(S)] uint8: the codes of each row, then its scales.

    The largest element of a block, `amax` in absolute value, has the code 127 or -127. No element changes by more than
    `amax / 254`, and zeros stay zeros.
    """
    count, size = rows.shape
    blocks = torch.nn.functional.pad(rows.float(), (0, -size % BLOCK)).view(count, -1, BLOCK)
    scales = blocks.abs().amax(2) / 127  # [R, B]
    codes = (blocks / torch.where(scales == 0, 1.0, scales)[..., None]).round().to(torch.int8)
    return torch.cat([codes.view(count, -1)[:, :size].view(torch.uint8), scales.view(torch.uint8)], 1)


def dequantize(packed: Tensor, size: int) -> Tensor:
    """[R, count_bytes(S)] uint8 -> [R, S] float32: the inverse of `quantize`, up to rounding."""
    codes = torch.nn.functional.pad(packed[:, :size].view(torch.int8), (0, -size % BLOCK)).view(len(packed), -1, BLOCK)
    scales = packed[:, size:].clone(memory_format=torch.contiguous_format).view(-1)  # aligned: they may lie anywhere
    return (codes * scales.view(torch.float32).view(len(packed), -1, 1)).view(len(packed), -1)[:, :size]
