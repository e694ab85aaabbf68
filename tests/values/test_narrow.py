"""Reductions of slices in every dtype: as torch, which adds up float16 and bfloat16 in float32 and rounds once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from programs import on_rows
from torch import Tensor

import fzero
from fzero import FzeroError
from fzero.base.mesh import VirtualMesh

MESH = VirtualMesh(fsdp=3)
REDUCTIONS: dict[str, Callable[[Any], Tensor]] = {
    "sum": lambda p: p.sum(),
    "mean": lambda p: p.mean(),
    "norm": lambda p: p.norm(),
    "norm, p=1": lambda p: p.norm(1),
    "norm, p=3": lambda p: p.norm(3),
    "norm, p=inf": lambda p: p.norm(float("inf")),
    "vector_norm": torch.linalg.vector_norm,
    "matrix_norm": torch.linalg.matrix_norm,
    "_foreach_norm": lambda p: torch._foreach_norm([p])[0],
    "_foreach_norm, ord=1": lambda p: torch._foreach_norm([p], 1)[0],
    "var": lambda p: p.var(),
    "std": lambda p: p.std(),
    "logsumexp": lambda p: p.logsumexp((0, 1)),
    "amax": lambda p: p.amax(),
    "min": lambda p: p.min(),
    "sum, wide": lambda p: p.sum(dtype=torch.float64),
    "mean, wide": lambda p: torch.mean(p, dtype=torch.float64),
    "norm, wide": lambda p: p.norm(dtype=torch.float64),
    "_foreach_norm, wide": lambda p: torch._foreach_norm([p], dtype=torch.float64)[0],
}
IS_REAL = ("_foreach_norm", "logsumexp", "amax", "min", "wide")
"""Reductions that torch lacks for complex numbers, or whose float64 is no dtype for them; and the list of one norm."""
SIZES = {
    torch.float16: (1e-4, 1.0, 60.0, 300.0),  # squares vanish below 2e-4, and overflow beyond 256
    torch.bfloat16: (1e-4, 1.0, 300.0),  # a sum of ones stops at 256
    torch.float32: (1.0,),
    torch.float64: (1.0,),
    torch.complex64: (1.0,),
}
CASES = [
    pytest.param(name, dtype, size, id=f"{name}-{str(dtype).removeprefix('torch.')}-{size:g}")
    for name in REDUCTIONS
    for dtype, sizes in SIZES.items()
    for size in sizes
    if not (dtype.is_complex and any(word in name for word in IS_REAL))
]


def weight(dtype: torch.dtype, size: float) -> Tensor:
    """[50, 7]: 350 elements of up to `size` to 2 * `size`, so that no sum cancels."""
    draw = torch.Generator().manual_seed(0)
    real, imaginary = size * (1 + torch.rand(2, 50, 7, generator=draw, dtype=torch.float64))
    return (torch.complex(real, imaginary) if dtype.is_complex else real).to(dtype)


def differentiate(reduce: Callable[[Any], Tensor]) -> Callable[[Any], tuple[Tensor, Any]]:
    """A step that returns the value of a reduction, and the gradient of a leaf."""

    def loss(p: Any) -> tuple[Tensor, Tensor]:
        value = reduce(p)
        return (value.abs() if value.is_complex() else value), value

    def step(p: Any) -> tuple[Tensor, Any]:
        (_, value), gradient = fzero.value_and_grad(loss, has_aux=True)(p)
        return value, gradient

    return step


@pytest.mark.parametrize(("name", "dtype", "size"), CASES)
def test_a_reduction_is_torchs(name: str, dtype: torch.dtype, size: float) -> None:
    step, full = differentiate(REDUCTIONS[name]), weight(dtype, size)
    got, expected = fzero.simulate(step, MESH)(fzero.partition(full, MESH)), step(full)
    found = got[0], fzero.unpartition(got[1])
    for ours, theirs, steps in zip(found, expected, (1, 4)):  # one rounding; a quotient, a product and their operands
        limits = torch.finfo(ours.dtype)
        terms = 1 if limits.bits == 16 else 20  # a sum of 350 terms in another order
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=terms * steps * limits.eps, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", ["sum", "mean", "norm", "_foreach_norm"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_outside_of_a_step(name: str, dtype: torch.dtype) -> None:
    full = weight(dtype, 300.0)
    ours, theirs = REDUCTIONS[name](fzero.partition(full, MESH)), REDUCTIONS[name](full)
    torch.testing.assert_close(ours, theirs, rtol=torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize(
    ("reduce", "dtype"),
    [
        (lambda p: p.mean(), torch.int64),
        (lambda p: p.norm(), torch.int64),
        (lambda p: p.norm(dtype=torch.float16), torch.float32),
        (lambda p: p.norm(dtype=torch.float32), torch.complex64),
    ],
)
def test_what_torch_refuses_is_refused(reduce: Callable[[Any], Tensor], dtype: torch.dtype) -> None:
    full = torch.ones(5, dtype=dtype)
    with pytest.raises(RuntimeError):
        reduce(full)
    with pytest.raises(RuntimeError):
        reduce(fzero.partition(full, MESH))


def test_many_equal_peaks_share_the_gradient() -> None:
    """300 elements equal the maximum, a count that bfloat16 has no number for."""
    full = torch.ones(3, 100, dtype=torch.bfloat16)
    step = fzero.grad(lambda p: 1000 * p.max())
    got = fzero.unpartition(fzero.simulate(step, MESH)(fzero.partition(full, MESH)))
    assert torch.equal(got, torch.full_like(full, 1000 / 300))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_mean_over_ranks_is_rounded_once(dtype: torch.dtype) -> None:
    """Of a gradient, sharded and replicated, and by name: 512 ranks that each hold 200."""
    mesh = VirtualMesh(fsdp=512)
    params = fzero.partition({"w": torch.zeros(5, dtype=dtype)}, mesh)
    kept = fzero.partition({"b": torch.zeros(5, dtype=dtype)}, mesh, persist=5)

    def step(params: Any, x: Tensor) -> Any:
        grads = fzero.grad(lambda p: ((p["w"] + p["b"]) * x).sum())(params)
        return grads, fzero.pmean(x, "fsdp"), fzero.psum(x / 512, "fsdp")

    results = fzero.simulate(step, mesh)({**params, **kept}, torch.full((512, 5), 200.0, dtype=dtype))
    for result in fzero.tree.leaves(fzero.unpartition(results)):
        assert torch.equal(result.unique(), torch.tensor([200.0], dtype=dtype))


@pytest.mark.parametrize(
    ("reduce", "message"),
    [
        (lambda x: fzero.pmean(x.long(), "fsdp"), r"^pmean: .* torch\.int64; cast the operand to a floating dtype"),
        (lambda x: fzero.psum(x > 0, "fsdp"), r"^psum: .* torch\.bool; cast the operand to torch\.int64"),
    ],
)
def test_reductions_that_leave_the_dtype_are_refused(reduce: Callable[[Tensor], Tensor], message: str) -> None:
    with pytest.raises(FzeroError, match=message):
        on_rows(lambda p, x: reduce(x), {"w": torch.zeros(3)}).trace()
