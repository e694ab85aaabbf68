"""Reductions over ranks: in rank order, and rounded once in narrow dtypes."""

from __future__ import annotations

import pytest
import torch

from fzero.base.dtypes import accumulator
from fzero.ranks.transports.reduction import average_, reduce

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("world", [1, 2, 3, 7, 64, 512])
@pytest.mark.parametrize("op", ["sum", "avg"])
def test_a_reduction_is_one_rounding_from_the_exact_one(op: str, world: int, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(world)
    size = 60000 if op == "avg" else 60000 / world  # the sum of a mean is beyond float16
    given = [(size * (2 * torch.rand(50, generator=draw) - 1)).to(dtype) for _ in range(world)]
    kept = [x.clone() for x in given]
    exact = torch.stack(given).to(torch.complex128 if dtype.is_complex else torch.float64)
    divisor = world if op == "avg" else 1
    found, wide = reduce(given, op), torch.finfo(accumulator(dtype)).eps
    bound = torch.finfo(dtype).eps * exact.sum(0).abs() / divisor + world * wide * exact.abs().sum(0) / divisor
    assert found.dtype == dtype and all(map(torch.equal, given, kept))
    assert ((found - exact.sum(0) / divisor).abs() <= bound).all()
    if op == "avg":
        first, *others = given
        average_(first, iter(others), world)
        assert torch.equal(first, found)


@pytest.mark.parametrize("op", ["max", "min"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64])
def test_an_extreme_is_exact(op: str, dtype: torch.dtype) -> None:
    given = list(torch.tensor([[1, -2], [3, 0], [-5, 7]]).to(dtype))
    assert torch.equal(reduce(given, op), getattr(torch.stack(given), f"a{op}")(0))
    if dtype.is_floating_point:
        given[1][0] = torch.nan
        assert reduce(given, op).isnan().tolist() == [True, False]


def test_ones_stay_ones() -> None:
    ones = [torch.ones(3, dtype=torch.bfloat16) for _ in range(512)]
    assert torch.equal(reduce(ones, "avg"), ones[0]) and reduce(ones, "sum")[0] == 512
