"""The scatter of a bucket as 4-bit integers in two hops: over the inner axis that state lies along, then the outer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from fzero import Program, ops
from fzero.variants.exchange import list_replicas
from fzero.variants.quantization import count_nibbles, dequantize_4_bits, quantize_to_4_bits


def _perform(program: Program, node: Any, rank: Any) -> Callable[..., Any]:
    along, dtype = program.wire_of(node), node.meta["val"].dtype
    over = list_replicas(program, node.kwargs.get("replicas", True))
    (outer, inner), mesh, what = program.mesh.shard_axes, program.mesh, f"qgz of {node.args[1]}"
    nodes, inside = mesh.size(outer), mesh.size(inner)

    def run(fulls: list[Tensor], bucket: str, leaves: Any, numel: int, **_: Any) -> Any:
        rows = ops.pack_leaves(fulls, along).float().view(nodes, inside, numel).transpose(0, 1)  # of whom inside first
        for axis, count in ((inner, inside), (outer, nodes)):
            packed = quantize_to_4_bits(rows.reshape(-1, numel)).view(-1)
            received = yield ops.AllToAll(f"{what} over {axis}", axis, packed)
            rows = dequantize_4_bits(received.view(rows.numel() // numel, -1), numel).view(count, -1, numel).mean(0)
        block = rows.view(-1)  # [S]
        return ((yield ops.AllReduce(f"{what} over {over}", over, block, "avg")) if over else block).to(dtype)

    return run


def _list_moves(program: Program, node: Any) -> Iterator[ops.Comm]:
    move, (outer, inner) = ops.BucketMove(*node.args), program.mesh.shard_axes
    over = list_replicas(program, node.kwargs.get("replicas", True))
    size = program.mesh.size(outer) * count_nibbles(move.numel)
    yield ops.Comm("all_to_all", inner, move.bucket, torch.uint8, program.mesh.size(inner) * size)
    yield ops.Comm("all_to_all", outer, move.bucket, torch.uint8, size)
    if over:
        yield ops.Comm("all_reduce", over, move.bucket, torch.float32, 4 * move.numel)


scatter_in_two_hops = ops.define("scatter_in_two_hops", like=ops.reduce_scatter, perform=_perform, moves=_list_moves)
