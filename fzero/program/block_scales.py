"""Scales of blocks as bytes: those of a float32 each, or codes of 8 bits in groups, the double quantization of QLoRA.

    scales, float32     |----- 256 -----|----- 256 -----|-- 20 --|
    plain               four bytes a scale
    double              a code a scale, then four bytes a group, then four bytes of the mean of all scales

A code's value, times its group's scale, is how far a scale lies from the mean. This is what bitsandbytes computes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fzero.optim import quantized

GROUP = quantized.BLOCK
"""Scales that share a scale of their own."""


def shape_scales(blocks: int, is_double: bool) -> tuple[int, ...]:
    """The shape of the bytes of so many scales."""
    return (blocks + 4 * quantized.count_blocks(blocks) + 4,) if is_double else (blocks, 4)


def store_scales(scales: Tensor, is_double: bool) -> Tensor:
    """The bytes of scales [B] in float32: all scales of a leaf where they are quantized."""
    if not is_double:
        return scales.view(torch.uint8).view(-1, 4)
    mean = scales.mean(dtype=torch.float64).float()  # in float64, so that no number of threads changes the result
    codes, of_groups = quantized.quantize(scales - mean, is_signed=True)
    return torch.cat([codes, of_groups.view(torch.uint8), mean.view(1).view(torch.uint8)])


def read_scales(stored: Tensor, count: int, wanted: range, is_double: bool) -> Tensor:
    """The scales `wanted` in float32, of the bytes of `count` scales."""
    if not is_double:
        return _read_numbers(stored[wanted.start : wanted.stop])
    groups = range(wanted.start // GROUP, quantized.count_blocks(wanted.stop))
    begin = groups.start * GROUP
    of_groups = _read_numbers(stored[count + 4 * groups.start : count + 4 * groups.stop])
    made = quantized.dequantize(stored[begin : wanted.stop], of_groups, is_signed=True)
    return made[wanted.start - begin :] + _read_numbers(stored[-4:])


def _read_numbers(stored: Tensor) -> Tensor:
    """Float32 numbers of their bytes."""
    # `clone`: the bytes of float32 numbers must begin at a multiple of four
    return stored.clone(memory_format=torch.contiguous_format).view(-1).view(torch.float32)
