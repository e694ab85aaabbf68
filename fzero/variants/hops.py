"""The gather of a bucket in two hops: over the outer axis that state lies along, and then over the inner one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from fzero import Program, ops


def _perform(program: Program, node: Any, rank: Any) -> Callable[..., Any]:
    along, dtype, what = program.wire_of(node), node.meta["val"].dtype, f"all_gather of {node.args[1]}"
    (outer, inner), mesh = program.mesh.shard_axes, program.mesh

    def run(slices: list[Tensor], *_: Any, **__: Any) -> Any:
        block = ops.pack_slices(slices, along, along.layout.rank_of(rank)).to(dtype)  # [S]
        column = yield ops.AllGather(f"{what} over {outer}", outer, block)  # [n * S]
        rows = yield ops.AllGather(f"{what} over {inner}", inner, column)  # [L * n * S]
        by_node = rows.view(mesh.size(inner), mesh.size(outer), -1).transpose(0, 1)
        return by_node.clone(memory_format=torch.contiguous_format).view(-1)  # [n * L * S]

    return run


def _list_moves(program: Program, node: Any) -> Iterator[ops.Comm]:
    value, (outer, inner), mesh = node.meta["val"], program.mesh.shard_axes, program.mesh
    yield ops.Comm("all_gather", outer, node.args[1], value.dtype, value.nbytes // mesh.size(inner))
    yield ops.Comm("all_gather", inner, node.args[1], value.dtype, value.nbytes)


gather_in_two_hops = ops.define("gather_in_two_hops", like=ops.all_gather, perform=_perform, moves=_list_moves)
