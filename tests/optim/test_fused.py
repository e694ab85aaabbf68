"""torch's fused kernels against the chains of stages that they stand for, in each dtype and number of elements that
`fuse` gives them: kernels take the elements of a vector register at once, and the last ones apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from programs import MESH, Case, apply, calls

import fzero
from fzero import optim, tree
from fzero.optim import fused
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
    is_wrong = dtype in (torch.float16, torch.bfloat16) and call in (ops.sgd, ops.momentum)
    check_fused(optimizer, dtype, {call: 0 if is_wrong else 1})  # torch's kernel is wrong there


NARROW: dict[str, Any] = {
    "all": None,
    "first": lambda path, leaf: ".mu." in path,
    "some leaves": lambda path, leaf: "3" in path,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("mask", NARROW)
def test_adamw_is_fused_with_bfloat16_state(mask: str, dtype: torch.dtype) -> None:
    """New state is rounded once, as the chain rounds it: in both a step is computed in the parameters' dtype."""
    optimizer = optim.cast_state(optim.adamw(0.1, weight_decay=0.1), torch.bfloat16, NARROW[mask])
    check_fused(optimizer, dtype, {ops.adamw: 1})


def test_wider_state_is_not_fused() -> None:
    check_fused(optim.cast_state(optim.adamw(0.1), torch.float32), torch.bfloat16, {ops.adamw: 0})


def test_narrow_state_is_updated_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    params, grads = ([torch.randn(size, generator=generator) for size in (7, 64, 0)] for _ in range(2))
    states = [[torch.rand(x.shape).to(torch.bfloat16) for x in params] for _ in range(2)]
    results = []
    for chunk in (2**20, 16):  # of whole vector registers: the last elements of a piece are rounded otherwise
        monkeypatch.setattr(fused, "CHUNK", chunk)
        given = [[x.clone() for x in column] for column in (params, grads, *states)]
        fused.fused_adamw_(*given, torch.tensor(3), 0.1, 0.9, 0.99, 1e-8, 0.1)
        results.append(given)
    for a, b in zip(*(tree.leaves(each) for each in results)):
        assert a.dtype == b.dtype and torch.equal(a, b)
    assert not torch.equal(results[0][0][0], params[0])


def check_fused(optimizer: Any, dtype: torch.dtype, expected: dict[Any, int]) -> None:
    """The fused step of leaves of all sizes, and the chain's, and how often the program calls an update."""
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
    assert {call: len(calls(program, call)) for call in expected} == expected
    for mine, theirs in zip(case.run(program), case.run(before)):
        for a, b in zip(mine, theirs, strict=True):
            tolerance = TOLERANCE.get(a.dtype, 0)  # counts are equal
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
