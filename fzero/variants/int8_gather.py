"""Weights as block-wise int8: the quantized all-gather of ZeRO++ (qwZ; Wang et al., 2023, arXiv:2306.10209).

    step = fzero.shard(train_step, mesh, passes=passes.insert(passes.defaults(stage=3), int8_gather, before="prefetch"))

A gather moves 1 + 4/256 bytes for each element instead of 4. All ranks compute with the same rounded weights, also with
those of their own slices. Each rank updates its slices in full precision.
"""

from __future__ import annotations

from fzero import Program
from fzero.variants.compressed_gather import compress_gathers, define_gather
from fzero.variants.quantization import count_bytes, dequantize, quantize


def int8_gather(program: Program, *, strict: bool = True) -> Program:
    """Gather every floating bucket as block-wise int8, with one scale for 256 elements. The stage stays as it is.

    Weights are rounded: no element changes by more than 1/254 of the largest element in its block.

    Raises:
        FzeroError: where nothing floating is gathered, if `strict`. Else such a program stays as it is.
    """
    return compress_gathers(program, "int8_gather", int8_all_gather, strict)


int8_all_gather = define_gather("int8_all_gather", count_bytes, quantize, dequantize)
