"""The sink pass: large leaves that the tiles of `fzero.tiled` share are gathered chunk by chunk in each tile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from programs import Storages, calls, list_programs, tensors
from test_stream import CHUNK, count_comm
from torch import Tensor
from torch.nn import functional

import fzero
from fzero import VirtualMesh, ops, tree
from fzero.program.operation import Node
from fzero.program.program import Program
from fzero.program.records import early_of

WIDTH, HIDDEN, ROWS = 16, 64, 8
DRAW = torch.Generator().manual_seed(0)
PARAMS = {
    "up": 0.3 * torch.randn(HIDDEN, WIDTH, generator=DRAW),
    "down": 0.3 * torch.randn(WIDTH, HIDDEN, generator=DRAW),
    "bias": 0.3 * torch.randn(WIDTH, generator=DRAW),
}
NBYTES = 4 * CHUNK
"""Bytes of `up` and of `down`."""


def mlp(p: Any, x: Tensor) -> Tensor:
    return functional.linear(functional.relu(x @ p["up"].T), p["down"], p["bias"])


def gated(p: Any, x: Tensor) -> Tensor:
    """Each leaf twice: its gradient is a sum."""
    return (functional.silu(x @ p["up"].T) * (x @ p["down"])) @ p["up"] + p["bias"]


def sorted_down(p: Any, x: Tensor) -> Tensor:
    """No rule for rows has a sort."""
    return functional.linear(functional.relu(x @ p["up"].T), p["down"].sort(0).values, p["bias"])


def loss_of(fn: Callable[..., Tensor], chunks: int) -> Callable[..., Tensor]:
    tiled = fzero.tiled(fn, chunks)
    return lambda p, x: tiled(p, x).square().mean()


Step = Callable[..., tuple[Tensor, Any]]
CASES: dict[str, tuple[Step, int, int, int, int]] = {
    "parts": (fzero.value_and_grad(loss_of(mlp, 4)), 2, 3, 4 * 4, 4 * 2),
    "a last part": (fzero.value_and_grad(loss_of(mlp, 3)), 2, 2, 3 * 4, 3 * 2),
    "twice, on four ranks": (fzero.value_and_grad(loss_of(gated, 2)), 4, 1, 2 * 6, 2 * 2),
}
"""A step, ranks, a stage, and how often the bytes of a whole leaf are gathered and scattered: in each part the forward
pass of an MLP gathers both leaves, and the backward pass one to compute again, and one to multiply by."""


def differentiate(step: Step, world: int, **how: Any) -> tuple[Any, Any, Any]:
    """Loss and gradients on virtual ranks and plain, and the program, whose peak is as predicted."""
    mesh = VirtualMesh(fsdp=world)
    batch = torch.randn(world * ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    held, simulated = fzero.partition(PARAMS, mesh), fzero.simulate(step, mesh, chunk=CHUNK, **how)
    got = fzero.unpartition(simulated(held, batch))
    program, most = simulated._pipeline._cache[0].finished, 0
    storages = Storages(program)

    def watch(node: Node, ranks: list[dict[Node, Any]]) -> None:
        nonlocal most
        most = max(most, *(storages.count(values, tensors(values.values())) for values in ranks))

    simulated(held, batch, watch=watch)
    loops = [loop for each in list_programs(program) for loop in calls(each, ops.loop)]
    early = max(sum(x.meta["val"].nbytes for x in early_of(loop)) for loop in loops)
    blocks = max(world - 2, 0) * CHUNK // world  # which virtual ranks do not hold while a chunk is scattered
    assert most <= program.memory().peak <= most + early + blocks + 64
    return got, step(PARAMS, batch), program


def count_moves(program: Program) -> tuple[int, int]:
    """How often the bytes of a whole leaf are gathered and scattered, beside those of the bias."""
    comm = count_comm(program)
    return comm["all_gather"] // NBYTES, comm["reduce_scatter"] // NBYTES


@pytest.mark.parametrize("name", CASES)
def test_no_tile_has_a_whole_leaf(name: str) -> None:
    """Losses and gradients are the plain ones. Nothing is as large as a leaf, and each tile gathers and scatters."""
    step, world, stage, gathers, scatters = CASES[name]
    got, expected, program = differentiate(step, world, stage=stage)
    torch.testing.assert_close(tree.leaves(got), tree.leaves(expected), rtol=1e-5, atol=1e-6)
    values = [x.meta.get("val") for each in list_programs(program) for x in each.graph.nodes]
    assert max(x.numel() for x in values if isinstance(x, Tensor)) < WIDTH * HIDDEN
    assert not program.remarks
    assert count_moves(program) == (gathers, scatters)


def test_a_leaf_that_a_tile_uses_whole_is_gathered_in_front_of_the_tiles() -> None:
    """Once, with a line in the report; the other leaf is streamed."""
    got, expected, program = differentiate(fzero.value_and_grad(loss_of(sorted_down, 4)), 2)
    torch.testing.assert_close(tree.leaves(got), tree.leaves(expected), rtol=1e-5, atol=1e-6)
    (remark,) = program.remarks
    assert remark.startswith("down is gathered whole, 4.0 KiB with chunks of 1.0 KiB: loop uses it (")
    assert count_moves(program) == (4 * 2 + 1, 4 + 1)


def test_leaves_of_tiles_are_gathered_once_without_chunks() -> None:
    mesh = VirtualMesh(fsdp=2)
    held, batch = fzero.partition(PARAMS, mesh), torch.randn(2 * ROWS, WIDTH)
    program = fzero.simulate(fzero.value_and_grad(loss_of(mlp, 4)), mesh).trace(held, batch)
    assert count_moves(program) == (2, 2)
