"""The largest gradients alone, with error feedback: sparsified SGD with memory (Stich et al., 2018, arXiv:1809.07599).

Bytes of a bucket of N ranks with S elements each: 8 N k, k = max(1, ceil(density S)): a position and a float32 value
for each element that is sent. The exact step moves 4 N S.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fzero import Program
from fzero.variants.compression import compress_scatters
from fzero.variants.compressor import Compressor
from fzero.variants.options import check_option


def topk_scatter(program: Program, *, density: float = 0.05) -> Program:
    """Scatter this part of every gradient, the largest elements of each block that a rank sends, and take the mean in
    float32. Elements that a rank sends are exact; the others it keeps. With density 1 all is exact, up to rounding.

    Raises:
        FzeroError: for a density that is not in (0, 1]; where nothing is scattered, and where a loop of
            microbatches scatters in each turn.
    """
    check_option("topk_scatter", "density", density, 0 < density <= 1, "a part of the elements, as 0.05")
    return compress_scatters(program, "topk_scatter", TOPK, (density,))


def count_largest(numel: int, density: float) -> int:
    return min(numel, max(1, math.ceil(density * numel)))


def compress(rows: Tensor, real: None, density: float) -> Tensor:
    found = rows.abs().topk(count_largest(rows.shape[1], density), 1, sorted=False).indices
    return torch.cat([found.int().view(torch.uint8), rows.gather(1, found).view(torch.uint8)], 1)


def decompress(packed: Tensor, size: int, density: float) -> Tensor:
    whole = packed.clone(memory_format=torch.contiguous_format)
    found, values = whole.view(torch.int32).chunk(2, 1)
    return torch.zeros(len(packed), size, device=packed.device).scatter(
        1, found.long(), values.contiguous().view(torch.float32)
    )


TOPK = Compressor("topk", lambda numel, density: 8 * count_largest(numel, density), compress, decompress)
