"""The law of what a batch decides: a step that reads its batch is that of plain torch, at all sizes, or is refused.
Steps are sums of drawn terms; batches, the rows that they choose and their sizes are drawn for each call."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import fzero

WIDTH = 4
Batch = dict[str, Tensor]
Term = Callable[[Any, Batch, Tensor, int], Tensor]
TERMS: list[Term] = [
    lambda p, b, h, k: h[b["y"] > k].square().sum(),
    lambda p, b, h, k: F.cross_entropy(h[b["y"] >= 0], b["y"][b["y"] >= 0] % WIDTH),
    lambda p, b, h, k: h[torch.where(b["y"] == k)[0]].sum() * p["w"].mean(),
    lambda p, b, h, k: h.masked_select(b["x"] > k / 4).sin().sum(),
    lambda p, b, h, k: h[(b["y"] < k).nonzero().squeeze(1)].cumsum(0).mean(),
    lambda p, b, h, k: h.sum() / ((b["y"] > k).sum().item() + 1),
    lambda p, b, h, k: (p["w"] * (b["y"] > k).sum().item()).sum() + h.mean(),
    lambda p, b, h, k: h[: (b["y"] > k).sum().item() + 2].square().sum(),
    lambda p, b, h, k: torch.cat([part.mean(0) for part in h.split([2, h.shape[0] - 2])]).sum(),
    lambda p, b, h, k: h.repeat_interleave(b["y"].clamp(1, 3), 0).tanh().sum(),
    lambda p, b, h, k: (torch.ones_like(b["x"])[b["y"] > k] @ p["w"]).sum(),
    lambda p, b, h, k: (p["w"][0] + torch.arange(h[b["y"] > k].shape[0])[:, None]).sum() * 1e-2,
    lambda p, b, h, k: fill_rows(h, b["y"] > k).square().sum(),
    lambda p, b, h, k: p["w"].square().sum() * torch.ones_like(h[b["y"] > k][:, 0]).sum() * 1e-2,
    lambda p, b, h, k: fzero.remat(lambda h: torch.tanh(h[b["y"] > k] @ p["w"]).sum())(h),
    lambda p, b, h, k: h.sum() * (2 if (b["y"] > 2 * k).any() else 3),
    lambda p, b, h, k: h.index_select(0, b["y"].unique() % h.shape[0]).sum(),
]


def fill_rows(h: Tensor, mask: Tensor) -> Tensor:
    h = h.clone()
    h[mask] = h[mask].flip(0) + 1
    return h


class Drawn:
    """A step of drawn terms, and the ranks and options that it has."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        self.terms = [(draw.choice(TERMS), draw.randint(-3, 2)) for _ in range(draw.randint(1, 3))]
        self.ranks, self.rows = draw.choice([1, 1, 2, 3]), [draw.randint(3, 12) for _ in range(5)]
        self.how = {"stage": draw.choice([1, 2, 3]), "donate": draw.random() < 0.5}

    def compute(self, p: Any, b: Batch) -> Tensor:
        h = torch.tanh(b["x"] @ p["w"])
        return torch.stack([term(p, b, h, k) for term, k in self.terms]).sum()

    def step(self, p: Any, b: Batch) -> Any:
        value, grads = fzero.value_and_grad(self.compute)(p, b)
        return fzero.tree.map(lambda x, g: x - 1e-3 * g, p, grads), value

    def step_plainly(self, p: Any, b: Batch) -> Any:
        w = p["w"].detach().requires_grad_()
        parts = [dict(zip(b, part)) for part in zip(*(x.chunk(self.ranks) for x in b.values()))]
        value = sum(self.compute({"w": w}, part) for part in parts) / self.ranks
        (grad,) = torch.autograd.grad(value, w)
        return {"w": w.detach() - 1e-3 * grad}, value.detach()


def run(seed: int) -> int:
    """How many calls of a drawn step were those of plain torch, until one is refused."""
    drawn, generator = Drawn(seed), torch.Generator().manual_seed(seed)
    mesh = fzero.VirtualMesh(fsdp=drawn.ranks)
    expected = {"w": torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float64) / 2}
    step, params = fzero.simulate(drawn.step, mesh, **drawn.how), fzero.partition(expected, mesh)
    for i, rows in enumerate(drawn.rows):
        count = rows * drawn.ranks
        x = torch.randn(count, WIDTH, generator=generator, dtype=torch.float64)
        batch = {"x": x, "y": torch.randint(-4, 5, (count,), generator=generator)}
        expected, value = drawn.step_plainly(expected, batch)
        try:
            params, got = step(params, batch)
        except fzero.FzeroError:
            return i
        torch.testing.assert_close(got, value, rtol=1e-10, atol=1e-10, equal_nan=True)
        torch.testing.assert_close(fzero.unpartition(params), expected, rtol=1e-10, atol=1e-10, equal_nan=True)
    return len(drawn.rows)


@pytest.mark.parametrize("first", range(0, 24, 6))
def test_a_step_that_reads_its_batch_is_that_of_plain_torch_or_refused(first: int) -> None:
    counts = [run(seed) for seed in range(first, first + 6)]
    assert sum(counts) >= 15, counts  # half of all calls
