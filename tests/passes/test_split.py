"""The split pass: an AdamW update in two calls, the second for gradients that come last."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
from programs import EVERY_STEP, MESH, Case, apply, assert_same, calls, layers, moved, trained, tried

from fzero import optim
from fzero.base.mesh import VirtualMesh
from fzero.passes import bucket, donate, fuse, prefetch, release, split
from fzero.program import ops
from fzero.program.program import Program
from fzero.program.rates import Rates

BEFORE = (bucket, functools.partial(release, stage=3), fuse)
RATES = Rates(flops=1e30, memory=8 * 30.0, wire=16 * 4.0, launch=0.0, latency=0.0)
"""A layer of 30 elements takes 1 s to scatter, and more than that to compute the gradients of."""
ONLY_THE_WIRE = Rates(flops=1e30, memory=1e30, wire=1.0, launch=0.0, latency=1.0)


def adamw(mesh: VirtualMesh = MESH, count: int = 3) -> Case:
    return trained(optim.adamw(0.1, weight_decay=0.1), layers(count), mesh)


def updates(program: Program) -> list[list[str]]:
    """The parameters of each update."""
    paths = dict(zip(program.placeholders, program.arguments))
    return [[paths[param].path for param in call.args[0]] for call in calls(program, ops.adamw, ops.adamw_)]


def splitted(case: Case, rates: Rates) -> Program:
    return apply(replace(case.trace(), measured=rates), *BEFORE, split)


@pytest.mark.parametrize("rates", [RATES, ONLY_THE_WIRE])
@pytest.mark.parametrize(("name", "world"), EVERY_STEP)
def test_results_are_the_same_bit_for_bit(name: str, world: int, rates: Rates) -> None:
    case, program, _ = tried(name, world)
    before = apply(replace(program, measured=rates), *BEFORE)
    assert_same(case.run(apply(before, split, prefetch, donate)), case.run(before))


@pytest.mark.parametrize("world", [1, 2, 3])
def test_an_update_in_two_is_the_same_bit_for_bit(world: int) -> None:
    case = adamw(VirtualMesh(fsdp=world))
    before = apply(replace(case.trace(), measured=RATES), *BEFORE)
    after = apply(before, split, prefetch, donate)
    assert len(updates(after)) == (1 if world == 1 else 2)
    assert_same(case.run(after), case.run(before))


def test_the_leaves_whose_gradients_come_last_are_updated_last() -> None:
    leaves = [[f"0.layers.{layer}.{name}" for name in "bw"] for layer in range(3)]
    assert updates(splitted(adamw(), RATES)) == [leaves[1] + leaves[2], leaves[0]]


def test_the_last_scatter_is_hidden_behind_the_first_update() -> None:
    program = splitted(adamw(), RATES)
    before = apply(replace(adamw().trace(), measured=RATES), *BEFORE)
    (*_, late), (*_, hidden) = (
        [each for each in prefetch(p).timeline().transfers if each.comm.op == "reduce_scatter"]
        for p in (before, program)
    )
    assert late.exposed > 0 == hidden.exposed


def test_what_comes_at_once_is_updated_at_once() -> None:
    assert updates(splitted(adamw(count=1), RATES)) == [["0.layers.0.b", "0.layers.0.w"]]


def test_an_update_that_needs_all_gradients_stays_whole() -> None:
    clipped = trained(optim.chain(optim.clip_by_global_norm(0.1), optim.adamw(0.1)), layers(), MESH)
    assert len(updates(splitted(clipped, RATES))) == 1


def test_nothing_else_is_moved() -> None:
    assert moved(splitted(adamw(), RATES)) == moved(apply(adamw().trace(), *BEFORE))
