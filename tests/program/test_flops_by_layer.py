"""Flops of products in groups, of leaves in chunks, of loops: those of the same products one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fzero
from fzero.program.flops import count_flops, count_flops_again
from fzero.program.program import Program

MESH = fzero.VirtualMesh(fsdp=2)
ROWS, WIDTH, LAYERS = 8, 64, 3
PRODUCT = 2 * (ROWS // 2) * WIDTH**2  # of a rank


def layer(weight: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(x @ weight) @ weight


def trace_gradient(through: Callable[[Any, Tensor], Tensor], **options: Any) -> Program:
    weights = fzero.partition([torch.ones(WIDTH, WIDTH) for _ in range(LAYERS)], MESH)
    step = fzero.simulate(fzero.grad(lambda p, x: through(p, x).square().mean()), MESH, **options)
    return step.trace(weights, torch.ones(ROWS, WIDTH))


def unrolled(block: Any = layer) -> Callable[[Any, Tensor], Tensor]:
    def through(weights: Any, x: Tensor) -> Tensor:
        for weight in weights:
            x = block(weight, x)
        return x

    return through


@pytest.mark.parametrize("chunk", [None, "2KiB"])
def test_a_leaf_in_chunks_has_the_flops_of_the_whole(chunk: str | None) -> None:
    plain, again = (trace_gradient(unrolled(block), chunk=chunk) for block in (layer, fzero.remat(layer)))
    assert sum(count_flops(plain).values()) == (6 * LAYERS - 1) * PRODUCT
    assert count_flops_again(plain) == 0
    recomputed = sum(count_flops(again).values()) - sum(count_flops(plain).values())
    assert count_flops_again(again) == recomputed == LAYERS * PRODUCT


def test_layers_of_a_loop_count_as_the_first() -> None:
    def scanned(weights: Any, x: Tensor) -> Tensor:
        carry, _ = fzero.scan(lambda x, _, weight: (layer(weight, x), None), x, layers=weights)
        return carry

    assert count_flops(trace_gradient(scanned)) == {"0": 4 * LAYERS * PRODUCT, "mm": 2 * LAYERS * PRODUCT}


def test_microbatches_count_by_layer() -> None:
    through = unrolled()
    sums = fzero.accumulate(lambda p, x: (through(p, x).sum(), torch.tensor(float(len(x)))), 2)
    weights = fzero.partition([torch.ones(WIDTH, WIDTH) for _ in range(LAYERS)], MESH)
    found = count_flops(fzero.simulate(sums, MESH).trace(weights, torch.ones(ROWS, WIDTH)))
    assert found == {"0": 3 * PRODUCT, "1": 4 * PRODUCT, "2": 4 * PRODUCT, "mm": 2 * LAYERS * PRODUCT}


@pytest.mark.parametrize(
    "shapes, products",
    [
        (((16, 8), (2, 8, 24)), 16 * 8 * 24),
        (((2, 16, 8), (2, 8, 24)), 2 * 16 * 8 * 24),
        (((16, 8), (8, 24)), 16 * 8 * 24),
        (((2, 16, 8), (8, 24)), 16 * 8 * 24),
    ],
    ids=str,
)
def test_groups_have_the_flops_of_their_products(
    shapes: tuple[tuple[int, ...], tuple[int, ...]], products: int
) -> None:
    a, b = (torch.ones(1, *shape, dtype=torch.bfloat16, device="meta") for shape in shapes)
    ends = torch.ones(2, dtype=torch.int32, device="meta") if (a.ndim, b.ndim) != (4, 4) else None
    step = fzero.simulate(lambda a, b: torch._grouped_mm(a[0], b[0], offs=ends), fzero.VirtualMesh(fsdp=1))
    assert count_flops(step.trace(a, b)) == {"_grouped_mm": 2 * products}
