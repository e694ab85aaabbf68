"""Gradients as products of two thin matrices, with error feedback: PowerSGD (Vogels et al., 2019, arXiv:1905.13727).

A gradient of n x m elements moves as r (n + m) float32 numbers (float64 as float64) in two all-reduces: 4 r (n + m)
bytes, where the exact step scatters 4 n m. Each rank keeps what this takes, n m numbers for each gradient.
"""

from __future__ import annotations

import math
from operator import getitem
from typing import Any

import torch

from fzero import FzeroError, Program, ops
from fzero.variants.options import check_option
from fzero.variants.power_iteration import draw, normalize_columns

aten = torch.ops.aten


def power_sgd(program: Program, *, rank: int = 4) -> Program:
    """Replace the scatter of each gradient of two or more dims by one step of power iteration for its first `rank`
    singular vectors, where that moves fewer bytes. Dims behind the first count as one. Exact, up to rounding, where
    the rank of the mean gradient, with what ranks keep, is at most `rank`. The place is in front of the pass bucket.

    Raises:
        FzeroError: for a rank below 1, on a mesh with model axes, where no gradient is such, for turns of accumulate.
    """
    check_option("power_sgd", "rank", rank, isinstance(rank, int) and rank >= 1, "a whole number from 1, as 4")
    program, found = program.copy(), 0
    for node in program.graph.find_nodes(op="call_function", target=ops.scatter):
        move, is_mean = ops.LeafMove(*node.args), not program.model_axes and node.kwargs.get("replicas", True)
        n, *others = move.value.meta["val"].shape or (1,)
        if is_mean and others and rank * (n + (m := math.prod(others))) < n * m:
            program, found = _replace(program, node, f"power_sgd.{found}.{move.bucket}", rank, n, m), found + 1
    if not (found or program.is_body or any(state.path.startswith("power_sgd.") for state in program.pass_state)):
        problem = f"finds no gradient on {program.mesh} that moves in fewer bytes as matrices of rank {rank}"
        raise FzeroError("pass 'power_sgd'", problem, "put it before='bucket', on data axes, or lower the rank")
    return program


def _replace(program: Program, node: Any, path: str, rank: int, n: int, m: int) -> Program:
    (full, *where), names, emit = node.args, program.mesh.names, program.emit
    dtype = torch.promote_types(full.meta["val"].dtype, torch.float32)
    program, error = program.add_state(f"{path}.error", (n, m), dtype, differs=names)
    program, old = program.add_state(f"{path}.q", (m, rank), dtype, replicated=True, initial=draw)
    with program.graph.inserting_before(node):
        whole = emit(aten.add.Tensor, *(emit(aten.reshape.default, x, [n, m]) for x in (full, error)))
        p = emit(ops.all_reduce, emit(aten.mm.default, whole, old), "avg", program.mesh.join(names))
        p = emit(getitem, emit(aten.linalg_qr.default, p), 0)  # [n, r] orthogonal columns
        q = emit(ops.all_reduce, emit(aten.mm.default, emit(aten.t.default, whole), p), "avg", program.mesh.join(names))
        sent = emit(aten.mm.default, p, emit(aten.t.default, q))
        left = emit(aten.nan_to_num.default, emit(aten.sub.Tensor, whole, sent), 0.0, 0.0, 0.0)
        program.return_state(f"{path}.error", emit(aten.reshape.default, left, [n * m]))
        program.return_state(f"{path}.q", normalize_columns(program, q, old))
        cast = emit(aten._to_copy.default, sent, dtype=node.meta["val"].dtype)
        shaped = emit(aten.reshape.default, cast, list(full.meta["val"].shape))
        program.substitute(node, emit(ops.take, shaped, *where))
    return program
