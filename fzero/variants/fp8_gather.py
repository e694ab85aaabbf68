"""Weights as float8_e4m3 numbers with a scale for each block: the weights' all-gather of FP8-LM (Peng et al., 2023,
arXiv:2310.18313), which has one scale a tensor.

    step = fzero.shard(train_step, mesh, passes=passes.insert(passes.defaults(stage=3), fp8_gather, before="prefetch"))

A gather of N ranks with S elements each moves N (S + 4 ceil(S / 256)) bytes, as `int8_gather`. A code has three bits
behind the point: small elements beside a large one keep their sign and two digits, where int8 rounds them to zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from fzero import Program
from fzero.variants.compressed_gather import compress_gathers, define_gather
from fzero.variants.quantization import BLOCK, count_bytes

LARGEST = torch.finfo(torch.float8_e4m3fn).max  # 448


def fp8_gather(program: Program, *, strict: bool = True) -> Program:
    """Gather every floating bucket as float8_e4m3, with one scale for 256 elements. The stage stays as it is.

    Weights are rounded: no element changes by more than 1/16 of itself, or 2 ** -18 of the largest in its block where
    that is more.

    Raises:
        FzeroError: where nothing floating is gathered, if `strict`. Else such a program stays as it is.
    """
    return compress_gathers(program, "fp8_gather", fp8_all_gather, strict)


def compress(rows: Tensor) -> Tensor:
    count, size = rows.shape
    blocks = pad(rows.float(), (0, -size % BLOCK)).view(count, -1, BLOCK)
    scales = blocks.abs().amax(2) / LARGEST  # [R, B]
    scaled = (blocks / torch.where(scales == 0, 1.0, scales)[..., None]).clamp(-LARGEST, LARGEST)  # a code has no inf
    codes = scaled.to(torch.float8_e4m3fn).view(count, -1)[:, :size]
    return torch.cat([codes.view(torch.uint8), scales.view(torch.uint8)], 1)


def decompress(packed: Tensor, size: int) -> Tensor:
    codes = packed[:, :size].clone(memory_format=torch.contiguous_format).view(torch.float8_e4m3fn).float()
    scales = packed[:, size:].clone(memory_format=torch.contiguous_format).view(-1).view(torch.float32)
    blocks = pad(codes, (0, -size % BLOCK)).view(len(packed), -1, BLOCK)
    return (blocks * scales.view(len(packed), -1, 1)).view(len(packed), -1)[:, :size]


fp8_all_gather = define_gather("fp8_all_gather", count_bytes, compress, decompress)
