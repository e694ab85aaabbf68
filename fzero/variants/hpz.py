"""A second copy of the weights inside of each node: hpZ of ZeRO++ (Wang et al., 2023, arXiv:2306.10209).

    mesh = init_device_mesh("cuda", (nodes, 8), mesh_dim_names=("node", "local"))  # state lies along both axes
    step = fzero.shard(train_step, mesh, passes=passes.insert(passes.defaults(stage=3), hpz, before="offload"))

The first gather of a bucket of N ranks with S elements each moves 4 N S bytes over both axes. Each further gather of
the step, such as that of the backward pass, moves 4 N S bytes over "local", and none between nodes. From the first to
the last of these gathers each rank keeps 4 n S bytes, where there are n nodes.
"""

from __future__ import annotations

from typing import Any

from fzero import FzeroError, Program, ops
from fzero.variants.parts import gather_parts, keep_part, list_gathers
from fzero.variants.parts_in_loops import keep_for_later_loops


def hpz(program: Program, *, axis: str = "local", strict: bool = True) -> Program:
    """Gather each bucket once over all ranks that state lies along, in a step, in a turn of microbatches, or in the
    turn of a layer with that of its backward pass. Each rank keeps a part of what it gathered, and later gathers are of
    these parts, along `axis`. Same results, bit for bit.

    Raises:
        FzeroError: where state does not lie along `axis` and another axis; behind the pass prefetch, where a gather
            starts before an earlier one is there. If `strict`, where no bucket is gathered twice, as at stages 1 and 2,
            or none of those that a loop gathers. Else such a program, or loop, stays as it is.
    """
    program, mesh, first = program.copy(), program.mesh, dict[Any, Any]()
    if axis not in mesh.shard_axes or len(mesh.shard_axes) == 1:
        problem = f"gathers again along {axis!r}, and state lies along {mesh.shard_axis!r} of {mesh}"
        raise FzeroError("pass 'hpz'", problem, 'make a mesh with the axes "node" and "local"')
    for node in list_gathers(program):
        slices, bucket, leaves, numel = node.args
        kept = first.setdefault((*slices, bucket, *leaves, *node.kwargs.items()), node)
        if kept is node:
            continue
        (buffer,) = kept.users
        if node < buffer:
            problem = f"finds that {node.name} starts before {buffer.name}, of whose result it would take parts"
            raise FzeroError("pass 'hpz'", problem, 'put it before="offload"')
        known = [x for x in buffer.users if ops.is_call(x, keep_part)]
        with program.graph.inserting_after(buffer):
            size = numel // mesh.size(axis)
            part = known[0] if known else program.emit(keep_part, buffer, bucket, leaves, size, axis)
        with program.graph.inserting_before(node):
            program.substitute(node, program.emit(gather_parts, part, bucket, leaves, numel, axis))
    if program.is_body:
        return program
    keep_for_later_loops(program, axis)
    loops = [ops.Loop(*x.args).body for x in program.graph.find_nodes(op="call_function", target=ops.loop)]
    once = [x for x in loops if list_gathers(x) and not x.find(keep_part)]
    if strict and (once or not program.find(gather_parts)):
        where, count = " in a loop" if once else "", len(list_gathers(once[0] if once else program))
        problem = f"finds {count} gathers{where}, and no bucket that is gathered twice"
        raise FzeroError("pass 'hpz'", problem, 'put it before="offload", at stage 3')
    return program
