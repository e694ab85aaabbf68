"""Gradients as 4-bit integers, with an average of errors as feedback: LoCo (Xie et al., 2024, arXiv:2407.04480).

Two elements to a byte, and for 256 of them one float32 scale. Bytes of a bucket of N ranks with S elements each:
N (ceil(S / 2) + 4 ceil(S / 256)), where the exact step moves 4 N S. The average is kept as 8-bit integers with scales.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fzero import Program
from fzero.variants.compression import compress_scatters
from fzero.variants.compressor import Compressor
from fzero.variants.options import check_option
from fzero.variants.quantization import (
    count_bytes,
    count_nibbles,
    dequantize,
    dequantize_4_bits,
    quantize,
    quantize_to_4_bits,
)


def loco_scatter(program: Program, *, beta: float = 0.8, period: int = 1024) -> Program:
    """Scatter every gradient as int4, by an all-to-all, and take the mean in float32 on each rank. No element that a
    rank sends changes by more than 1/14 of the largest in its block. A rank adds to its gradient the average error,
    beta times the old average and 1 - beta times the new error, which is zero again after each `period` of steps.

    Raises:
        FzeroError: for a beta that is not in [0, 1), or a period below 1; where nothing is scattered, and
            where a loop of microbatches scatters in each turn.
    """
    check_option("loco_scatter", "beta", beta, 0 <= beta < 1, "a part of the average to keep, as 0.8")
    check_option("loco_scatter", "period", period, isinstance(period, int) and period >= 1, "a whole number from 1")
    return compress_scatters(program, "loco_scatter", LOCO, (beta, period))


class _Loco(Compressor):
    dtype, counts = torch.uint8, True

    def size(self, world: int, numel: int) -> int:
        return world * count_bytes(numel)

    def recall(self, kept: Tensor, numel: int) -> Tensor:
        return dequantize(kept.view(-1, count_bytes(numel)), numel)

    def store(self, left: Tensor, kept: Tensor, count: Tensor | None, *options: Any) -> Tensor:
        beta, period = options
        average = beta * self.recall(kept, left.shape[1]) + (1 - beta) * left
        return quantize(torch.where((count + 1) % period == 0, 0.0, average)).view(-1)  # type: ignore


LOCO = _Loco(
    "loco", lambda numel, *_: count_nibbles(numel), lambda rows, real, *_: quantize_to_4_bits(rows),
    lambda packed, size, *_: dequantize_4_bits(packed, size),
)  # fmt: skip
