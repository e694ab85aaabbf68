"""The all-to-all of compressed gradients, and the mean of what a rank gets, in float32.

Bytes of a bucket of N ranks with S elements each: N B of uint8, B = `count_bytes(S)`. On a mesh with a replica axis the
mean over replicas stays exact: an all-reduce of S float32 numbers. Along a model axis ranks are replicas of a leaf that
is not split. A gradient of leaves that n ranks have parts of is 1 / n of the mean, as in `ops.reduce_scatter`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from fzero import Program, ops
from fzero.variants.model_axes import list_replicas


def define_exchange(name: str, count_bytes: Callable[..., int], decompress: Callable[..., Any]) -> Any:
    """The operation `name` of `(packed, bucket, leaves, S, dtype, replicas, options)`, in place of a reduce-scatter."""

    def take_mean(received: Any, world: int, numel: int, options: Any) -> Any:
        return decompress(received.view(world, -1), numel, *options).mean(0)  # [S]

    def perform(program: Program, node: Any, rank: Any) -> Callable[..., Any]:
        _, bucket, _, _, _, replicas, _ = node.args
        axis, what = program.layouts[bucket].shard_axis, f"{name} of {bucket}"
        over = list_replicas(program, bucket, replicas)

        def run(packed: Any, bucket: str, leaves: Any, numel: int, dtype: Any, replicas: bool, options: Any) -> Any:
            received = yield ops.AllToAll(what, axis, packed)
            block = take_mean(received, program.mesh.size(axis), numel, options) / program.layouts[bucket].splits
            if over:
                block = yield ops.AllReduce(f"{what} over {over}", over, block, "avg")
            return block.to(dtype)

        return run

    def list_moves(program: Program, node: Any) -> Iterator[ops.Comm]:
        _, bucket, _, numel, _, replicas, options = node.args
        axis, over = program.layouts[bucket].shard_axis, list_replicas(program, bucket, replicas)
        yield ops.Comm("all_to_all", axis, bucket, torch.uint8, program.mesh.size(axis) * count_bytes(numel, *options))
        if over:
            yield ops.Comm("all_reduce", over, bucket, torch.float32, 4 * numel)

    def find_kind(walk: Any, node: Any) -> ops.Buffer:
        _, bucket, leaves, _, _, replicas, _ = node.args
        over = frozenset() if replicas else frozenset(walk.program.layouts[bucket].replica_axes)
        return ops.Buffer(False, bucket, tuple(leaves), over=over)

    return ops.define(
        name, like=ops.reduce_scatter, perform=perform, kind=find_kind, moves=list_moves,
        fake=lambda packed, bucket, leaves, numel, dtype, *_: packed.new_empty(numel, dtype=dtype),
        check=lambda program, node: None, scratch=lambda program, node: ops.measure_scratch(
            take_mean, node.args[0], program.layout_of(node).world, node.args[3], node.args[6]
        ),
    )  # fmt: skip
