"""Granularity: a step gives the same results wherever rank boundaries fall, and whatever gaps shift them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from processes import run
from programs import layers, training
from torch.distributed.device_mesh import DeviceMesh

import fzero
from fzero import optim, tree
from fzero.base.tree import Tree
from fzero.layout.layout import Layout
from fzero.state.grouping import Granularity

MESH = fzero.VirtualMesh(replica=2, fsdp=3)


def rows(path: str, shape: tuple[int, ...]) -> int | None:
    """Elements of a row."""
    return math.prod(shape[1:]) if len(shape) > 1 else None


def partitioned(granularity: Granularity | None) -> Tree:
    return fzero.partition(layers(), MESH, granularity=granularity)


def buckets(params: Tree) -> set[Layout]:
    return {leaf.form.layout for leaf in tree.leaves(params)}


def test_there_are_gaps_and_whole_rows() -> None:
    found = buckets(partitioned(rows))
    assert any(layout.has_gaps for layout in found)
    for layout in found:
        for index, leaf in enumerate(layout.leaves):
            starts = [layout.part(index, rank).start for rank in range(3)]
            assert all(start % (rows(leaf.path, leaf.shape) or 1) == 0 or start == leaf.numel for start in starts)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(
    ("optimizer", "rtol"),
    [
        (optim.lion(0.01), 0),
        # torch's kernels round the last elements of a slice differently where they fill no vector register.
        (optim.sgd(0.1, momentum=0.9), 1e-6),
        (optim.adamw(0.1), 1e-6),
    ],
    ids=["lion", "sgd", "adamw"],
)
def test_a_step_gives_what_it_gives_without(optimizer: optim.GradientTransformation, rtol: float, stage: int) -> None:
    results = []
    for granularity in (None, rows):
        step = fzero.simulate(training(optimizer), MESH, stage=stage)
        params = partitioned(granularity)
        state = optimizer.init(params)
        for number in range(3):
            x = torch.randn(12, 5, generator=torch.Generator().manual_seed(number))
            params, state, loss = step(params, state, x)
        results.append([*map(fzero.unpartition, (params, state)), loss])
    tree.map(lambda a, b: torch.testing.assert_close(a, b, rtol=rtol, atol=1e-8 if rtol else 0), *results)


def test_real_ranks_hold_whole_rows_and_train() -> None:
    trained, plain = run(2, _trained)[0], _steps(layers(), training(optim.sgd(0.1)), optim.sgd(0.1))
    tree.map(torch.testing.assert_close, trained, plain)


def _trained(mesh: DeviceMesh) -> Tree:
    params = fzero.partition(layers(), mesh, granularity=rows)
    assert any(layout.has_gaps for layout in buckets(params))
    tree.map(lambda a, b: torch.testing.assert_close(a, b, rtol=0, atol=0), fzero.unpartition(params), layers())
    sgd = optim.sgd(0.1)
    return fzero.unpartition(_steps(params, fzero.shard(training(sgd), mesh), sgd))


def _steps(params: Tree, step: Any, optimizer: optim.GradientTransformation) -> Tree:
    """Parameters after two steps on the same rows on every rank."""
    state = optimizer.init(params)
    for number in range(2):
        params, state, _ = step(params, state, torch.randn(6, 5, generator=torch.Generator().manual_seed(number)))
    return params


def test_state_that_only_looks_like_scales_of_8_bit_state_is_plain() -> None:
    """A matrix of 256 columns has as many rows as blocks, and Adafactor a number for each row."""
    whole = {"w": torch.randn(64, 256)}
    optimizer, mesh = optim.adafactor(0.1), fzero.VirtualMesh(fsdp=2)
    params = fzero.partition(whole, mesh)
    state = fzero.partition(optimizer.init(whole), mesh, like=params)
    torch.testing.assert_close(fzero.unpartition(state), fzero.unpartition(optimizer.init(params)))
