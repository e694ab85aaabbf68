"""The pass that lets gradients travel compressed, which the variants of a scatter share."""

from __future__ import annotations

from operator import getitem
from typing import Any

from fzero import FzeroError, Program, ops
from fzero.variants.compressor import Compressor


def compress_scatters(
    program: Program, name: str, by: Compressor, options: tuple[Any, ...] = (), keeps: bool = True, strict: bool = True
) -> Program:
    """Scatter every gradient compressed, by an all-to-all, and take the mean in float32 on each rank. Over replicas the
    mean of the results is exact, and so it is along model axes.

    With `keeps`, each rank keeps what compression took as state of the step, 0 for what is not finite, and adds it to
    its next gradient: one number for each element of a bucket, on every rank.

    Raises:
        FzeroError: where nothing is scattered, if `strict`; with `keeps`, where a loop scatters.
    """
    program, mesh = program.copy(), program.mesh
    scatters = program.graph.find_nodes(op="call_function", target=ops.reduce_scatter)
    is_empty = strict and not (scatters or program.is_body or program.find(by.exchange))
    if is_empty:
        problem = f"finds {len(scatters)} reduce-scatters on {mesh}"
        raise FzeroError(f"pass {name!r}", problem, "put it behind the pass bucket")
    for number, node in enumerate(scatters):
        fulls, bucket, leaves, numel = ops.BucketMove(*node.args)
        path, world = f"{by.name}_error.{number}.{bucket}", program.layouts[bucket].world
        kept = count = None
        if keeps:
            program, kept = program.add_state(path, (by.size(world, numel),), by.dtype, differs=mesh.names)
        if keeps and by.counts:
            program, count = program.step_count()
        replicas = node.kwargs.get("replicas", True)
        with program.graph.inserting_before(node):
            packed = program.emit(by.pack, fulls, bucket, leaves, numel, world, kept, count, options)
            if keeps:
                program.return_state(path, program.emit(getitem, packed, 1))
                packed = program.emit(getitem, packed, 0)
            dtype = node.meta["val"].dtype
            mean = program.emit(by.exchange, packed, bucket, leaves, numel, dtype, replicas, options)
            program.substitute(node, mean)
    return program
