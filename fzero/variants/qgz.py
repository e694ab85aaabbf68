"""Gradients as 4-bit integers in two hops: the quantized reduce-scatter of ZeRO++ (qgZ; Wang et al., 2023,
arXiv:2306.10209).

    mesh = init_device_mesh("cuda", (nodes, 8), mesh_dim_names=("node", "local"))  # state lies along both axes
    step = fzero.shard(train_step, mesh, passes=passes.insert(passes.defaults(stage=3), qgz, before="prefetch"))

Of N ranks with S elements of a bucket each, on n nodes, with B = ceil(S / 2) + 4 ceil(S / 256): an all-to-all inside of
each node moves N B bytes. Each rank takes the mean of what it gets, and an all-to-all between nodes moves n B bytes of
that. One hop moves N B bytes between nodes too. The exact step moves 4 N S over both axes.
"""

from __future__ import annotations

import torch

from fzero import Program
from fzero.variants.codes import Codes
from fzero.variants.quantization import count_nibbles, dequantize_4_bits, quantize_to_4_bits
from fzero.variants.scatter_hops import define_scatter
from fzero.variants.scatters import replace_scatters

_nibbles = Codes(count_nibbles, lambda rows, dtype: quantize_to_4_bits(rows.float()), dequantize_4_bits, torch.uint8)
_scatter = define_scatter("qgz", _nibbles)


def qgz(program: Program, *, strict: bool = True) -> Program:
    """Scatter every gradient as int4 in two hops, and take means in float32. In each hop no element changes by more
    than 1/14 of the largest in its block. Over replicas, and along model axes, the mean is exact. No state, so that
    loops may scatter.

    Raises:
        FzeroError: where state does not lie along two axes. If `strict`, where nothing is scattered; else such a
            program stays as it is.
    """
    return replace_scatters(program, "qgz", _scatter, strict)
