"""Each optimizer against its reference: torch.optim where torch has it, else the paper's formula by hand.

Every reference is run on the whole leaves. The optimizer is run on plain tensors, and on 1 and 8 virtual ranks.
"""

from __future__ import annotations

import functools

import pytest
import torch
from references import CASES, Leaves, draw_gradients, first_params, train

from fzero import optim

STEPS = 15
ROUNDINGS = 10
"""In each step a parameter of size |p| is rounded once, by eps / 2 of it, on both sides. The movement is the result of
some 20 operations in another order on each side, and of as many more for the history of the moments. Each is off by
eps / 2, mostly not in one direction. So results differ by ROUNDINGS * eps * STEPS * (|p| / 10 + movement)."""


@functools.cache
def expected(name: str, dtype: torch.dtype) -> Leaves:
    return CASES[name].reference(first_params(dtype), draw_gradients(dtype, STEPS))


@pytest.mark.parametrize(
    ("world", "dtype"), [(0, torch.float64), (0, torch.float32), (1, torch.float32), (8, torch.float64)]
)
@pytest.mark.parametrize("name", CASES)
def test_an_optimizer_is_its_reference(name: str, dtype: torch.dtype, world: int) -> None:
    params, _ = train(CASES[name].optimizer, first_params(dtype), draw_gradients(dtype, STEPS), world)
    for key, want in expected(name, dtype).items():
        before = first_params(dtype)[key]
        if want.numel():
            moved, size = (want - before).abs().max().item(), want.abs().max().item()
            atol = ROUNDINGS * torch.finfo(dtype).eps * STEPS * (size / 10 + moved)
            assert moved > 20 * atol, key
            torch.testing.assert_close(params[key], want, rtol=0, atol=atol, msg=lambda m: f"{key}: {m}")  # noqa: B023


def test_amsgrad_is_not_adam() -> None:
    """So the cases of AMSGrad show its maximum."""
    params, grads = first_params(torch.float64), draw_gradients(torch.float64, STEPS)
    ours, _ = train(CASES["amsgrad"].optimizer, params, grads, 0)
    adam, _ = train(optim.adam(0.01, b2=0.5), params, grads, 0)
    assert (ours["weight"] - adam["weight"]).abs().max() > 0.01
