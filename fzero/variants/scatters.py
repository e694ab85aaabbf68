"""Other operations in the place of the scatters of a program, along two axes that state lies along."""

from __future__ import annotations

from typing import Any

from fzero import FzeroError, Program, ops
from fzero.variants.model_axes import lies_along_all


def replace_scatters(program: Program, name: str, target: Any, strict: bool) -> Program:
    """Let `target` scatter, for the pass of a name.

    Raises:
        FzeroError: where state does not lie along two axes. If `strict`, where nothing is scattered.
    """
    program, mesh = program.copy(), program.mesh
    found = program.graph.find_nodes(op="call_function", target=ops.reduce_scatter)
    scatters = [node for node in found if lies_along_all(program, node)]
    is_empty = not (scatters or program.is_body or program.find(target))
    if len(mesh.shard_axes) != 2 or (strict and is_empty):
        problem = f"finds {len(scatters)} reduce-scatters over {mesh.shard_axis!r} of {mesh}"
        raise FzeroError(f"pass {name!r}", problem, 'put it behind the pass bucket, on a mesh with "node" and "local"')
    for node in scatters:
        node.target = target
    return program
