"""The scatter of a bucket as 4-bit integers in two hops: over the inner axis that state lies along, then the outer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fzero import Program, ops
from fzero.variants.model_axes import list_replicas
from fzero.variants.quantization import count_nibbles, dequantize_4_bits, quantize_to_4_bits


def _pack(fulls: Sequence[Tensor], along: Any, nodes: int) -> Tensor:
    """[L * n * B] the codes of each rank's block, ordered by the position inside of a node first."""
    rows = ops.pack_leaves(fulls, along).float().view(nodes, -1, along.stride).transpose(0, 1)  # [L, n, S]
    return quantize_to_4_bits(rows.reshape(-1, along.stride)).view(-1)


def _take_mean(received: Tensor, count: int, numel: int) -> Tensor:
    """[rows, S] the mean of what `count` ranks sent: of each of them as many rows of codes."""
    return dequantize_4_bits(received.view(-1, count_nibbles(numel)), numel).view(count, -1, numel).mean(0)


def _perform(program: Program, node: Any, rank: Any) -> Callable[..., Any]:
    along, over = program.wire_of(node), list_replicas(program, node.args[1], node.kwargs.get("replicas", True))
    (outer, inner), what = program.mesh.shard_axes, f"qgz of {node.args[1]}"
    nodes, inside = (program.mesh.size(axis) for axis in (outer, inner))

    def run(fulls: list[Tensor], bucket: str, leaves: Any, numel: int, **_: Any) -> Any:
        received = yield ops.AllToAll(f"{what} over {inner}", inner, _pack(fulls, along, nodes))
        packed = quantize_to_4_bits(_take_mean(received, inside, numel)).view(-1)  # [n * B]
        received = yield ops.AllToAll(f"{what} over {outer}", outer, packed)
        block = _take_mean(received, nodes, numel).view(-1) / along.layout.splits  # [S]
        return ((yield ops.AllReduce(f"{what} over {over}", over, block, "avg")) if over else block).to(fulls[0].dtype)

    return run


def _list_moves(program: Program, node: Any) -> Iterator[ops.Comm]:
    move, (outer, inner) = ops.BucketMove(*node.args), program.mesh.shard_axes
    size = program.mesh.size(outer) * count_nibbles(move.numel)
    yield ops.Comm("all_to_all", inner, move.bucket, torch.uint8, program.mesh.size(inner) * size)
    yield ops.Comm("all_to_all", outer, move.bucket, torch.uint8, size)
    if over := list_replicas(program, move.bucket, node.kwargs.get("replicas", True)):
        yield ops.Comm("all_reduce", over, move.bucket, torch.float32, 4 * move.numel)


def _find_scratch(program: Program, node: Any) -> int:
    along, (nodes, inside) = program.wire_of(node), map(program.mesh.size, program.mesh.shard_axes)
    packed = torch.empty(inside * nodes * count_nibbles(along.stride), dtype=torch.uint8, device="meta")
    of_gradients = ops.measure_scratch(_pack, ops.BucketMove(*node.args).values, along, nodes)
    return max(of_gradients, ops.measure_scratch(_take_mean, packed, inside, along.stride))


scatter_in_two_hops = ops.define(
    "scatter_in_two_hops", like=ops.reduce_scatter, perform=_perform, moves=_list_moves, scratch=_find_scratch
)
