"""Attention over rows of several ranks, against torch's of the whole sequence: packed documents, windows, few keys."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import parallel_layers as layers
import pytest
import torch
import torch.nn.functional as F
from parallel_layers import list_bytes
from torch import Tensor

import fzero
from fzero import FzeroError, VirtualMesh
from fzero.parallel import order_rows, ring_attention, ulysses

FLOAT = 8  # bytes
DATA = ("fsdp", "sp")


def ring(window: int, **how: Any) -> Callable[..., Tensor]:
    """Documents by their positions where keys rotate, else by their numbers."""

    def attention(q: Tensor, k: Tensor, v: Tensor, documents: Tensor, positions: Tensor) -> Tensor:
        packed = {"positions": positions} if "rotate" in how else {"documents": documents}
        return ring_attention(q, k, v, window=window, **packed, **how)

    return attention


def by_heads(window: int) -> Callable[..., Tensor]:
    def attention(q: Tensor, k: Tensor, v: Tensor, documents: Tensor, positions: Tensor) -> Tensor:
        mask = layers.see(window, fzero.all_gather(documents, "sp", 1))
        return ulysses(F.scaled_dot_product_attention)(q, k, v, mask, enable_gqa=True)

    return attention


CASES: dict[str, tuple[Callable[..., Tensor], int, bool]] = {
    "gathered": (ring(5), 5, False),
    "gathered, balanced": (ring(16, balanced=True), 16, True),
    "rotated": (ring(5, rotate=True), 5, False),
    "rotated, balanced": (ring(16, rotate=True, balanced=True), 16, True),
    "ulysses": (by_heads(5), 5, False),
}
"""An attention, its window, and whether rows are in balanced order."""


@pytest.mark.parametrize("name", CASES)
def test_a_sequence_of_parts_is_the_whole(name: str) -> None:
    (attention, window, is_balanced), sp = CASES[name], 2 if "rotated" in name else 4
    mesh = VirtualMesh(fsdp=2, sp=sp)
    layer = layers.attend_to_parts(attention, keys=2)
    right = fzero.value_and_grad(partial(layers.attend_plainly, window))(layer.params, *layer.batch)
    order = order_rows(layers.PLACES, sp) if is_balanced else torch.arange(layers.PLACES)
    parts = layer._replace(batch=tuple(layers.cut(x, mesh, order) for x in layer.batch))
    made, program = parts.on_ranks(mesh)
    torch.testing.assert_close(made, right, rtol=1e-12, atol=1e-14)
    found = list_bytes(program, "sp")
    local, keys = 2 * layers.PLACES // sp * layers.WIDE * FLOAT, 2
    if name == "ulysses":  # heads of keys are repeated
        assert found == {"all_to_all": 2 * local * (2 * layers.HEADS + 2 * 4)}
    elif "rotated" in name:
        assert found == {"ppermute": 2 * (sp - 1) * sp * local * 2 * keys}
    else:
        assert found == dict.fromkeys(("all_gather", "psum_scatter"), sp * local * 2 * keys)


@pytest.mark.parametrize("rotate", [False, True])
def test_without_causality_and_documents(rotate: bool) -> None:
    x = torch.randn(4, 2, 4, 2, dtype=torch.float64)
    attend = fzero.simulate(
        lambda x: ring_attention(x, x, x, causal=False, rotate=rotate), VirtualMesh(fsdp=1, sp=4), data=DATA
    )
    whole = F.scaled_dot_product_attention(*[torch.cat(x.split(1), 2)] * 3)
    torch.testing.assert_close(torch.cat(attend(x).split(1), 2), whole, rtol=1e-12, atol=1e-14)


def test_a_balanced_ring_computes_half_of_the_blocks() -> None:
    """A block of its own, then halves: of N blocks, 1 + (N - 1) / 2."""
    x, flops = torch.empty(4, 1, 8, 2, device="meta"), []
    for is_balanced in (False, True):
        attend = fzero.simulate(partial(attend_around, is_balanced), VirtualMesh(fsdp=1, sp=4), data=DATA)
        nodes = attend.trace(x).graph.find_nodes(op="call_function", target=torch.ops.aten.bmm.default)
        flops.append(sum(fzero.ops.record(node).work(node).flops for node in nodes))
    assert flops[1] / flops[0] == (1 + 3 / 2) / 4


def attend_around(is_balanced: bool, x: Tensor) -> Tensor:
    return ring_attention(x, x, x, rotate=True, balanced=is_balanced)


X = torch.ones(1, 4, 3, 2)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: ring_attention(X, X, X, window=0), "ring_attention: window: is 0; give 1 or more, with causal"),
        (lambda: ring_attention(X, X, X, window=2, causal=False), "ring_attention: window: is 2"),
        (lambda: ring_attention(X, X[:, :3], X[:, :3]), "ring_attention: k: has 3 heads, q has 4"),
        (lambda: ring_attention(X, X, X, balanced=True), "ring_attention: balanced: cuts 3 rows of a rank"),
        (lambda: ring_attention(X, X, X, positions=X[0, 0], documents=X[0, 0]), "documents: is given beside positions"),
        (lambda: order_rows(6, 2), "order_rows: length: is 6, for 2 ranks; give a multiple of 2"),
    ],
)
def test_what_is_refused(call: Callable[[], Any], words: str) -> None:
    with pytest.raises(FzeroError, match=words):
        call()


def test_heads_that_do_not_divide_are_refused() -> None:
    attention = ulysses(F.scaled_dot_product_attention)
    step = fzero.simulate(lambda x: attention(x, x, x), VirtualMesh(fsdp=1, sp=3), data=DATA)
    with pytest.raises(
        FzeroError, match="ulysses: 4 heads, and 4 of keys, on 3 ranks along 'sp'; use 2 ranks, or fzero"
    ):
        step(X.repeat(3, 1, 1, 1))
