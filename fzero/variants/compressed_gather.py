"""The all-gather of compressed weights, and the pass that lets weights travel so, which variants of a gather share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from fzero import FzeroError, Program, ops


def define_gather(
    name: str,
    count_bytes: Callable[[int], int],
    compress: Callable[[Tensor], Tensor],
    decompress: Callable[..., Tensor],
) -> Any:
    """The operation `name` in place of an all-gather: N B bytes of uint8 for N ranks with S elements each.

    `compress` makes [R, B] uint8 of [R, S], B = `count_bytes(S)`, and `decompress(packed, S)` [R, S] float32 of these.
    """

    def take(packed: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        return decompress(packed, numel).to(dtype).reshape(-1)

    def perform(program: Program, node: Any, rank: Any) -> Callable[..., Any]:
        along, axis, dtype = program.wire_of(node), program.layout_of(node).shard_axis, node.meta["val"].dtype

        def run(slices: list[Tensor], *_: Any, **__: Any) -> Any:
            block = compress(ops.pack_slices(slices, along, along.layout.rank_of(rank))[None])[0]  # [B]
            packed = yield ops.AllGather(f"{name} of {along.layout.bucket}", axis, block)  # [N * B]
            return take(packed.view(along.layout.world, -1), along.stride, dtype)

        return run

    def list_moves(program: Program, node: Any) -> Iterator[ops.Comm]:
        along = program.wire_of(node)
        nbytes = along.layout.world * count_bytes(along.stride)
        yield ops.Comm("all_gather", along.layout.shard_axis, node.args[1], torch.uint8, nbytes)

    def find_scratch(program: Program, node: Any) -> int:
        along, value = program.wire_of(node), node.meta["val"]
        block = torch.empty(1, along.stride, dtype=value.dtype, device="meta")
        packed = torch.empty(along.layout.world, count_bytes(along.stride), dtype=torch.uint8, device="meta")
        return max(ops.measure_scratch(compress, block), ops.measure_scratch(take, packed, along.stride, value.dtype))

    return ops.define(name, like=ops.all_gather, perform=perform, moves=list_moves, scratch=find_scratch)


def compress_gathers(program: Program, name: str, gather: Any, strict: bool) -> Program:
    """Gather every floating bucket by the operation `gather`; if `strict`, refuse a program that gathers none."""
    program = program.copy()
    for node in program.graph.find_nodes(op="call_function", target=ops.all_gather):
        if node.meta["val"].is_floating_point():
            node.target = gather
    if strict and not program.is_body and not program.find(gather):
        raise FzeroError(f"pass {name!r}", "finds no floating leaf that is gathered", "put it behind the pass bucket")
    return program
