"""Gradients as block-wise int8, without state: the quantized reduce-scatter of ZeRO++ (qgZ; arXiv:2306.10209).

`int8_scatter` keeps what rounding leaves, a float32 number for each gradient on each rank, and adds it the next time.
Bytes of a bucket of N ranks with S elements each: N (S + 4 ceil(S / 256)).
"""

from __future__ import annotations

from fzero import Program
from fzero.variants.compression import compress_scatters
from fzero.variants.int8_scatter import INT8


def int8_mean(program: Program, *, strict: bool = True) -> Program:
    """Scatter every gradient as int8, by an all-to-all, and take the mean in float32 on each rank. No element of a
    rank's gradient changes by more than 1/254 of the largest element in its block.

    Raises:
        FzeroError: where nothing is scattered, if `strict`. Else such a program stays as it is. On a mesh with model
            axes.
    """
    return compress_scatters(program, "int8_mean", INT8, keeps=False, strict=strict)
