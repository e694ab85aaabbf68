"""The scatter of a bucket in two hops: over the inner axis that state lies along, then over the outer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from fzero import Program, ops
from fzero.variants.codes import Codes, find_sum_dtype
from fzero.variants.model_axes import list_replicas


def define_scatter(name: str, codes: Codes) -> Any:
    """An operation like `ops.reduce_scatter` that moves such codes in two hops."""
    rules: Any = _perform, _list_moves, _find_scratch
    perform, moves, scratch = (partial(rule, codes) for rule in rules)
    return ops.define(name, like=ops.reduce_scatter, perform=perform, moves=moves, scratch=scratch)


def _perform(by: Codes, program: Program, node: Any, rank: Any) -> Callable[..., Any]:
    along, over = program.wire_of(node), list_replicas(program, node.args[1], node.kwargs.get("replicas", True))
    (outer, inner), what = program.mesh.shard_axes, f"{ops.record(node).name} of {node.args[1]}"
    nodes, inside, dtype = program.mesh.size(outer), program.mesh.size(inner), node.meta["val"].dtype

    def run(fulls: list[Any], bucket: str, leaves: Any, numel: int, **_: Any) -> Any:
        received = yield ops.AllToAll(f"{what} over {inner}", inner, by.pack(fulls, along, nodes))
        packed = by.encode(by.take_mean(received, inside, numel), dtype).view(-1)  # [n * B]
        received = yield ops.AllToAll(f"{what} over {outer}", outer, packed)
        block = by.take_mean(received, nodes, numel).view(-1) / along.layout.splits  # [S]
        return ((yield ops.AllReduce(f"{what} over {over}", over, block, "avg")) if over else block).to(dtype)

    return run


def _list_moves(by: Codes, program: Program, node: Any) -> Iterator[ops.Comm]:
    move, given, (outer, inner) = ops.BucketMove(*node.args), node.meta["val"].dtype, program.mesh.shard_axes
    dtype, sums = by.dtype or given, torch.float32 if by.dtype else find_sum_dtype(given)
    size = program.mesh.size(outer) * by.count(move.numel) * dtype.itemsize
    yield ops.Comm("all_to_all", inner, move.bucket, dtype, program.mesh.size(inner) * size)
    yield ops.Comm("all_to_all", outer, move.bucket, dtype, size)
    if over := list_replicas(program, move.bucket, node.kwargs.get("replicas", True)):
        yield ops.Comm("all_reduce", over, move.bucket, sums, sums.itemsize * move.numel)


def _find_scratch(by: Codes, program: Program, node: Any) -> int:
    along, (nodes, inside) = program.wire_of(node), map(program.mesh.size, program.mesh.shard_axes)
    received, dtype = inside * nodes * by.count(along.stride), by.dtype or node.meta["val"].dtype
    of_gradients = ops.measure_scratch(by.pack, ops.BucketMove(*node.args).values, along, nodes)
    packed = torch.empty(received, dtype=dtype, device="meta")
    return max(of_gradients, ops.measure_scratch(by.take_mean, packed, inside, along.stride))
