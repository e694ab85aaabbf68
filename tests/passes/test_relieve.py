"""The relieve pass: gathered weights die early, no peak rises, and results keep their bits."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from programs import EVERY_STEP, MESH, Case, apply, assert_same, calls, names, on_rows, trained, tried
from torch import Tensor

import fzero
from fzero import optim, value_and_grad
from fzero.base.mesh import VirtualMesh
from fzero.passes import bucket, fuse, prefetch, release, relieve
from fzero.program.program import Program

WIDE, NARROW, ROWS = 96, 8, 4
STAGE_3 = bucket, functools.partial(release, stage=3), fuse


def network(depth: int = 3, rows: int = ROWS, mesh: VirtualMesh = MESH) -> Case:
    """Gradients of layers whose weights are larger than their activations."""
    draw = torch.Generator().manual_seed(0)
    params = {
        "layers": [
            {
                "scale": torch.randn(NARROW, generator=draw),
                "up": torch.randn(NARROW, WIDE, generator=draw),
                "down": torch.randn(WIDE, NARROW, generator=draw),
            }
            for _ in range(depth)
        ]
    }

    def loss(params: Any, x: Tensor) -> Tensor:
        for layer in params["layers"]:
            x = x + torch.nn.functional.gelu((x * layer["scale"]) @ layer["up"]) @ layer["down"]
        return x.square().mean()

    batch = torch.randn(rows * mesh.size(), NARROW, generator=draw)
    return Case(value_and_grad(loss), mesh, (fzero.partition(params, mesh), batch))


@pytest.mark.parametrize(("name", "world"), EVERY_STEP)
def test_results_are_the_same_bit_for_bit(name: str, world: int) -> None:
    case, program, before = tried(name, world)
    assert_same(case.run(relieve(program)), before)


@pytest.mark.parametrize(("name", "world"), EVERY_STEP)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_no_peak_rises_and_collectives_keep_their_order(name: str, world: int, stage: int) -> None:
    case, program, _ = tried(name, world)
    before = apply(program, bucket, functools.partial(release, stage=stage), fuse)
    after = relieve(before)
    assert after.memory().peak <= before.memory().peak
    assert after.comm() == before.comm()
    assert sorted(names(after)) == sorted(names(before))
    assert_same(case.run(apply(after, prefetch)), case.run(before))


def products(program: Program) -> list[list[int]]:
    """The shapes of the results of matrix products, in order."""
    return [list(node.meta["val"].shape) for node in calls(program, torch.ops.aten.mm.default)]


def test_gradients_of_weights_come_behind_the_last_use_of_the_weights() -> None:
    case = network()
    before = apply(case.trace(), *STAGE_3)
    after = relieve(before)
    up, down, wide, narrow = [NARROW, WIDE], [WIDE, NARROW], [ROWS, WIDE], [ROWS, NARROW]
    assert products(before)[6:] == [down, wide, up, narrow] * 3
    assert products(after)[6:] == [wide, narrow, down, up] * 3
    assert after.memory().peak < before.memory().peak
    assert_same(case.run(after), case.run(before))


def test_results_smaller_than_the_operands_that_they_keep_stay() -> None:
    before = apply(network(rows=10 * WIDE).trace(), *STAGE_3)
    assert relieve(before) is before


def test_one_rank_has_nothing_to_free() -> None:
    before = apply(network(mesh=VirtualMesh(fsdp=1)).trace(), *STAGE_3)
    assert relieve(before) is before


def test_the_head_is_free_when_its_gradient_is_made() -> None:
    draw = torch.Generator().manual_seed(0)
    params = {"up": torch.randn(NARROW, WIDE, generator=draw), "head": torch.randn(64, WIDE, generator=draw)}

    def loss(params: Any, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(torch.tanh(x @ params["up"]), params["head"]).square().mean()

    case = on_rows(value_and_grad(loss), params, width=NARROW)
    before = apply(case.trace(), *STAGE_3)
    after = relieve(before)
    by_head = products(after).index([2, WIDE], 1)
    assert by_head < products(after).index([64, WIDE])
    assert products(before).index([64, WIDE]) < products(before).index([2, WIDE], 1)
    assert_same(case.run(after), case.run(before))


def test_writes_stay_behind_what_they_depend_on() -> None:
    case = trained(optim.adamw(0.1), {"a": torch.ones(40, 5), "b": torch.ones(5, 5)}, MESH, _loss_with_writes)
    before = apply(case.trace(), *STAGE_3)
    assert_same(case.run(relieve(before)), case.run(before))


def _loss_with_writes(params: Any, x: Tensor) -> Tensor:
    held = torch.zeros(2, 5)
    held.copy_(x)
    y = (held + 1) * params["b"].sum()
    held.add_(1.0)
    return (y + held.detach() @ params["b"]).square().mean() + (y @ params["a"].t()).mean()
