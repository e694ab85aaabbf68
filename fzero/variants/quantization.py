"""Block-wise integers: 256 elements share one float32 scale, so that an element takes 1 + 4/256 bytes as int8, and
1/2 + 4/256 as int4."""

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


def count_nibbles(numel: int) -> int:
    """`count_bytes` of int4: two codes to a byte."""
    return -(-numel // 2) + 4 * -(-numel // BLOCK)


def quantize_to_4_bits(rows: Tensor) -> Tensor:
    """`quantize` with codes from -7 to 7: no element changes by more than `amax / 14`."""
    count, size = rows.shape
    blocks = torch.nn.functional.pad(rows.float(), (0, -size % BLOCK)).view(count, -1, BLOCK)
    scales = blocks.abs().amax(2) / 7  # [R, B]
    codes = (blocks / torch.where(scales == 0, 1.0, scales)[..., None]).round().to(torch.int8).view(count, -1)[:, :size]
    low, high = (torch.nn.functional.pad(codes + 7, (0, size % 2)).to(torch.uint8).view(count, -1, 2)).unbind(2)
    return torch.cat([low | high << 4, scales.view(torch.uint8)], 1)


def dequantize_4_bits(packed: Tensor, size: int) -> Tensor:
    """The inverse of `quantize_to_4_bits`, up to rounding."""
    split = -(-size // 2)
    pairs = torch.stack([packed[:, :split] & 15, packed[:, :split] >> 4], 2).view(len(packed), -1)
    codes = torch.nn.functional.pad(pairs[:, :size].float() - 7, (0, -size % BLOCK)).view(len(packed), -1, BLOCK)
    scales = packed[:, split:].clone(memory_format=torch.contiguous_format).view(-1)
    return (codes * scales.view(torch.float32).view(len(packed), -1, 1)).view(len(packed), -1)[:, :size]
