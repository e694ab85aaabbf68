"""Weights as block-wise int8: the quantized all-gather of ZeRO++ (qwZ; Wang et al., 2023, arXiv:2306.10209).

    step = fzero.shard(train_step, mesh, passes=passes.insert(passes.defaults(stage=3), int8_gather, before="prefetch"))

A gather moves 1 + 4/256 bytes for each element instead of 4. All ranks compute with the same rounded weights, also with
those of their own slices. Each rank updates its slices in full precision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from fzero import FzeroError, Program, ops
from fzero.variants.quantization import count_bytes, dequantize, quantize


def int8_gather(program: Program, *, strict: bool = True) -> Program:
    """Gather every floating bucket as block-wise int8, with one scale for 256 elements. The stage stays as it is.

    Weights are rounded: no element changes by more than 1/254 of the largest element in its block.

    Raises:
        FzeroError: where nothing floating is gathered, if `strict`. Else such a program stays as it is.
    """
    program = program.copy()
    for node in program.graph.find_nodes(op="call_function", target=ops.all_gather):
        if node.meta["val"].is_floating_point():
            node.target = int8_all_gather
    if strict and not program.is_body and not program.find(int8_all_gather):
        raise FzeroError(
            "pass 'int8_gather'", "finds no floating leaf that is gathered", "put it behind the pass bucket"
        )
    return program


def _perform(program: Program, node: Any, rank: Any) -> Callable[..., Any]:
    along, axis, dtype = program.wire_of(node), program.mesh.shard_axis, node.meta["val"].dtype
    what = f"int8 all_gather of {along.layout.bucket}"

    def run(slices: list[Tensor], *_: Any, **__: Any) -> Any:
        packed = yield ops.AllGather(what, axis, quantize(ops.pack_slices(slices, along, rank.rank)[None])[0])
        return dequantize(packed.view(along.layout.world, -1), along.stride).to(dtype).reshape(-1)

    return run


def _moves(program: Program, node: Any) -> Iterator[ops.Comm]:
    along = program.wire_of(node)
    nbytes = along.layout.world * count_bytes(along.stride)
    yield ops.Comm("all_gather", program.mesh.shard_axis, ops.BucketMove(*node.args).bucket, torch.uint8, nbytes)


int8_all_gather = ops.define("int8_all_gather", like=ops.all_gather, perform=_perform, moves=_moves)
