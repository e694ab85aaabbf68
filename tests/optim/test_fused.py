"""torch's fused kernels against the chains of stages that they stand for, in each dtype and number of elements that
`fuse` gives them: kernels take the elements of a vector register at once, and the last ones apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from programs import MESH, Case, apply, calls

import fzero
from fzero import optim, tree
from fzero.passes import bucket, fuse
from fzero.program import ops

OPTIMIZERS: dict[str, Any] = {
    "sgd": (optim.sgd(0.1), ops.sgd),
    "sgd with decay": (optim.sgd(0.1, weight_decay=0.1), ops.sgd),
    "momentum": (optim.sgd(0.1, momentum=0.9), ops.momentum),
    "nesterov": (optim.sgd(0.1, momentum=0.9, nesterov=True), ops.momentum),
    "adagrad": (optim.adagrad(0.1), ops.adagrad),
    "adamw": (optim.adamw(0.1, weight_decay=0.1), ops.adamw),
}
SIZES = [*range(1, 36), 48, 63, 64, 65, 100, 127, 128]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 0.02, torch.float16: 3e-3}  # some roundings


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_fused_update_is_the_chain(name: str, dtype: torch.dtype) -> None:
    """Of leaves of many sizes at once, each a bucket of its own, over two ranks."""
    optimizer, call = OPTIMIZERS[name]
    generator = torch.Generator().manual_seed(0)
    draw = lambda: {f"x{size}": torch.randn(size, generator=generator).to(dtype) for size in SIZES}  # noqa: E731
    params, grads = draw(), draw()
    state = tree.map(lambda leaf: leaf + 1 if leaf.ndim else leaf, optimizer.init(params))

    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = optimizer.update(grads, state, params)
        return optim.apply_updates(params, updates), state

    case = Case(step, MESH, tuple(fzero.partition(each, MESH) for each in (params, state, grads)))
    before = case.trace()
    program = apply(before, bucket, fuse)
    is_wrong = dtype in (torch.float16, torch.bfloat16) and call in (ops.sgd, ops.momentum)
    assert len(calls(program, call)) == (0 if is_wrong else 1)  # torch's kernel is wrong there
    for mine, theirs in zip(case.run(program), case.run(before)):
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
