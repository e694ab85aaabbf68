"""Weights gathered in two hops, between nodes and then inside of them: MiCS (Zhang et al., 2022, arXiv:2205.00119).

    mesh = init_device_mesh("cuda", (groups, nodes, 8), mesh_dim_names=("replica", "node", "local"))
    step = fzero.shard(train_step, mesh, passes=passes.insert(passes.defaults(stage=3), mics, before="prefetch"))

In MiCS state lies over a group of ranks, and groups hold the same. The mesh says so, without a pass, and gradients are
averaged in two hops: a scatter in the group, and a mean over groups, once behind the loop of `fzero.accumulate`. This
pass is for groups of several nodes. Of N ranks with S elements of a bucket each, on n nodes, the first hop moves 4 n S
bytes over the nodes, and the second 4 N S inside of each node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from fzero import FzeroError, Program, ops


def mics(program: Program) -> Program:
    """Gather every bucket over the outer axis that state lies along, and then over the inner one. Same results, bit for
    bit.

    Raises:
        FzeroError: where state does not lie along two axes, and where nothing is gathered.
    """
    program, mesh = program.copy(), program.mesh
    gathers = program.graph.find_nodes(op="call_function", target=ops.all_gather)
    if len(mesh.shard_axes) == 1 or not (gathers or program.is_body or program.find(gather_in_two_hops)):
        problem = f"finds {len(gathers)} gathers over {mesh.shard_axis!r} of {mesh}"
        raise FzeroError("pass 'mics'", problem, 'put it behind the pass bucket, on a mesh with "node" and "local"')
    for node in gathers:
        node.target = gather_in_two_hops
    return program


def _perform(program: Program, node: Any, rank: Any) -> Callable[..., Any]:
    along, dtype, what = program.wire_of(node), node.meta["val"].dtype, f"all_gather of {node.args[1]}"
    (outer, inner), mesh = program.mesh.shard_axes, program.mesh

    def run(slices: list[Tensor], *_: Any, **__: Any) -> Any:
        block = ops.pack_slices(slices, along, rank.rank).to(dtype)  # [S]
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
