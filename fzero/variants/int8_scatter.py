"""Gradients as block-wise int8 with error feedback: ZeRO++ (arXiv:2306.10209) and 1-bit Adam (arXiv:2102.02888).

Bytes of a bucket of N ranks with S elements each: N (S + 4 ceil(S / 256)), where the exact step moves 4 N S.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fzero import Program
from fzero.variants.compression import compress_scatters
from fzero.variants.compressor import Compressor
from fzero.variants.quantization import count_bytes, dequantize, quantize


def int8_scatter(program: Program) -> Program:
    """Scatter every gradient as int8, by an all-to-all, and take the mean in float32 on each rank. No element of a
    rank's gradient changes by more than 1/254 of the largest element in its block, and a rank sends the rest later.

    Raises:
        FzeroError: where nothing is scattered, and where a loop of microbatches scatters in each turn.
    """
    return compress_scatters(program, "int8_scatter", INT8)


def _compress(rows: Tensor, real: Any) -> Tensor:
    return quantize(rows)


INT8 = Compressor("int8", count_bytes, _compress, dequantize)
