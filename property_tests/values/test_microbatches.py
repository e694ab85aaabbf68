"""Laws of `fzero.accumulate` and `fzero.scan`: a division of a batch over microbatches and ranks changes nothing."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import fzero
from fzero.testing.steps import WIDE
from property_tests.laws import slow


def sums(params: Any, batch: Any) -> tuple[Tensor, Tensor]:
    """A masked loss with an auxiliary one, which the weight weighs."""
    h = torch.tanh(batch["x"] @ params["w"] + params["b"])
    weight = batch["mask"].sum()
    return ((h @ params["v"]).square() * batch["mask"]).sum() + 0.1 * params["v"].square().sum() * weight, weight


def mean(params: Any, batch: Any) -> Tensor:
    total, weight = sums(params, batch)
    return total / weight


@st.composite
def divisions(draw: st.DrawFn) -> tuple[Any, Any, int, int, dict[str, Any]]:
    """`(params, batch, ranks, microbatches, options)`."""
    ranks, microbatches, rows = draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    width, hidden, seed = draw(st.integers(1, 5)), draw(st.integers(1, 7)), draw(st.integers(0, 2**16))
    generator = torch.Generator().manual_seed(seed)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=WIDE)

    count = ranks * microbatches * rows
    mask = (torch.rand(count, generator=generator) < 0.5).to(WIDE)
    mask[draw(st.integers(0, count - 1))] = 1  # some microbatches, and some ranks, have no weight
    params = {"w": numbers(width, hidden), "b": numbers(hidden), "v": numbers(hidden)}
    options = {
        "stage": draw(st.sampled_from([1, 2, 3])),
        "donate": draw(st.booleans()),
        "sync": draw(st.sampled_from([None, "once", "each"])),
        "persist": draw(st.sampled_from([0, hidden])),
    }
    return params, {"x": numbers(count, width), "mask": mask}, ranks, microbatches, options


@given(divisions())
@slow
def test_every_division_of_a_batch_has_the_same_gradient(division: Any) -> None:
    params, batch, ranks, microbatches, options = division
    mesh, sync, persist = fzero.VirtualMesh(fsdp=ranks), options.pop("sync"), options.pop("persist")

    def step(params: Any, batch: Any) -> Any:
        return fzero.accumulate(sums, microbatches, sync=sync)(params, batch)

    loss, grads = fzero.simulate(step, mesh, **options)(fzero.partition(params, mesh, persist=persist), batch)
    expected = fzero.value_and_grad(mean)(params, batch)
    torch.testing.assert_close((loss, fzero.unpartition(grads)), expected, rtol=1e-9, atol=1e-10)
