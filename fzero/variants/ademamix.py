"""A second, slow average of gradients for Adam: AdEMAMix (Pagliardini et al., 2024, arXiv:2409.03137).

    m2 = b3 m2 + (1 - b3) g,  which is state of the pass, like the leaf
    update = (m1 / (1 - b1^t) + alpha m2) / (sqrt(v / (1 - b2^t)) + eps)

The pass moves no bytes, and keeps a float32 number more for each element of a rank's slices.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from fzero import FzeroError, Program
from fzero.variants.options import check_option

aten = torch.ops.aten


def ademamix(program: Program, *, b3: float = 0.9999, alpha: float = 8.0, warmup: int = 0) -> Program:
    """Add the slow average of gradients to each update of `fzero.optim.adam` or `adamw`, in front of the pass bucket.
    In `warmup` steps alpha grows from 0, and b3 from Adam's b1. Let 1 / (1 - b3) steps be a small part of the run.

    Raises:
        FzeroError: for a b3 that is not in (0, 1), an alpha below 0, a negative warmup; where the step has no Adam.
    """
    check_option("ademamix", "b3", b3, 0 < b3 < 1, "a part of the average to keep, as 0.9999")
    check_option("ademamix", "alpha", alpha, 0 <= alpha < math.inf, "a number from 0, as 8")
    check_option("ademamix", "warmup", warmup, isinstance(warmup, int) and warmup >= 0, "a whole number from 0")
    program = program.copy()
    updates = program.graph.find_nodes(op="call_function", target=torch.ops.fzero.scale_by_adam.default)
    if not updates and not program.is_body:
        raise FzeroError("pass 'ademamix'", "finds no update of Adam", "use fzero.optim.adam or adamw, before='bucket'")
    for number, node, row in [(i, x, j) for i, x in enumerate(updates) for g, *_ in [x.args] for j in range(len(g))]:
        program = _add_average(program, node, row, f"ademamix.{number}.{row}", b3, alpha, warmup)
    return program


def _add_average(program: Program, node: Any, row: int, path: str, b3: float, alpha: float, warmup: int) -> Program:
    grads, firsts, _, count, b1, b2, eps = node.args
    results = {at: {row: y for y in x.users for _, row in [y.args]} for x in node.users for _, at in [x.args]}
    update, second = results[0][row], results[2][row]
    wide = torch.promote_types(firsts[row].meta["val"].dtype, torch.float32)  # in bfloat16 a b3 of 0.9999 is 1
    program, old = program.add_state(path, like=firsts[row], dtype=wide)
    emit, users, ends = program.emit, list(update.users), (math.log(b1 or 1e-9), math.log(b3))
    with program.graph.inserting_before(max(update, second).next):
        done = emit(aten.clamp_max.default, emit(aten.div.Scalar, count, max(1, warmup)), 1.0)
        slope = emit(aten.add.Scalar, emit(aten.mul.Scalar, done, ends[0] - ends[1]), ends[1])
        keep = emit(aten.exp.default, emit(aten.mul.Scalar, emit(aten.reciprocal.default, slope), ends[0] * ends[1]))
        new = emit(aten.lerp.Tensor, emit(aten._to_copy.default, grads[row], dtype=wide), old, keep)
        unbiased = emit(aten.div.Tensor, second, emit(aten.rsub.Scalar, emit(aten.pow.Scalar, b2, count), 1.0))
        scale = emit(aten.add.Scalar, emit(aten.sqrt.default, unbiased), eps)
        slow = emit(aten.div.Tensor, emit(aten.mul.Tensor, new, emit(aten.mul.Scalar, done, alpha)), scale)
        mixed = emit(aten.add.Tensor, update, emit(aten._to_copy.default, slow, dtype=update.meta["val"].dtype))
    for user in users:
        user.replace_input_with(update, mixed)
    program.return_state(path, new)
    return program
