"""Weights gathered in two hops, between nodes and then inside of them: MiCS (Zhang et al., 2022, arXiv:2205.00119).

    mesh = init_device_mesh("cuda", (groups, nodes, 8), mesh_dim_names=("replica", "node", "local"))
    step = fzero.shard(train_step, mesh, passes=passes.insert(passes.defaults(stage=3), mics, before="prefetch"))

In MiCS state lies over a group of ranks, and groups hold the same. The mesh says so, without a pass, and gradients are
averaged in two hops: a scatter in the group, and a mean over groups, once behind the loop of `fzero.accumulate`. This
pass is for groups of several nodes. Of N ranks with S elements of a bucket each, on n nodes, the first hop moves 4 n S
bytes over the nodes, and the second 4 N S inside of each node.
"""

from __future__ import annotations

from fzero import FzeroError, Program, ops
from fzero.variants.hops import gather_in_two_hops
from fzero.variants.model_axes import lies_along_all


def mics(program: Program, *, strict: bool = True) -> Program:
    """Gather every bucket over the outer axis that state lies along, and then over the inner one. Same results, bit for
    bit.

    Raises:
        FzeroError: where state does not lie along two axes. If `strict`, where nothing is gathered; else such a program
            stays as it is.
    """
    program, mesh = program.copy(), program.mesh
    found = program.graph.find_nodes(op="call_function", target=ops.all_gather)
    gathers = [node for node in found if lies_along_all(program, node)]
    is_empty = not (gathers or program.is_body or program.find(gather_in_two_hops))
    if len(mesh.shard_axes) != 2 or (strict and is_empty):
        problem = f"finds {len(gathers)} gathers over {mesh.shard_axis!r} of {mesh}"
        raise FzeroError("pass 'mics'", problem, 'put it behind the pass bucket, on a mesh with "node" and "local"')
    for node in gathers:
        node.target = gather_in_two_hops
    return program
