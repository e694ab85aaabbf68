"""Gradients as block-wise int8, without state: the quantized reduce-scatter of ZeRO++ (qgZ; arXiv:2306.10209).

`int8_scatter` keeps what rounding leaves, a float32 number for each gradient on each rank, and adds it the next time.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from fzero import FzeroError, Program, ops
from fzero.variants.int8_scatter import exchange
from fzero.variants.quantization import quantize


def int8_mean(program: Program, *, strict: bool = True) -> Program:
    """Scatter every gradient as int8, by an all-to-all, and take the mean in float32 on each rank. No element of a
    rank's gradient changes by more than 1/254 of the largest element in its block.

    Raises:
        FzeroError: where nothing is scattered, if `strict`. Else such a program stays as it is. On a mesh of several
            axes.
    """
    program = program.copy()
    scatters = program.graph.find_nodes(op="call_function", target=ops.reduce_scatter)
    is_empty = not (scatters or program.is_body or program.find(exchange))
    if len(program.mesh.names) > 1 or (strict and is_empty):
        problem = f"finds {len(scatters)} reduce-scatters on {program.mesh}"
        raise FzeroError("pass 'int8_mean'", problem, "put it behind the pass bucket, on a mesh of one axis")
    for node in scatters:
        fulls, bucket, leaves, numel = node.args
        with program.graph.inserting_before(node):
            packed = program.emit(pack, fulls, bucket, leaves, numel, program.mesh.size())
            program.substitute(node, program.emit(exchange, packed, bucket, leaves, numel, node.meta["val"].dtype))
    return program


def _pack(program: Program, node: Any, fulls: Any, bucket: str, leaves: Any, numel: int, world: int) -> Tensor:
    return quantize(ops.pack_leaves(fulls, program.wire_of(node)).view(-1, numel)).view(-1)  # [N * (S + scales)]


pack = ops.define(
    "int8_pack", names="leaves", perform=lambda program, node, rank: partial(_pack, program, node),
    fake=lambda fulls, bucket, leaves, numel, world: quantize(fulls[0].new_zeros(world, numel)).view(-1),
    kind=lambda walk, node: walk.per_rank,
)  # fmt: skip
