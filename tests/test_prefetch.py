"""The prefetch pass: all-gathers start early, reduce-scatters are waited for late."""

from __future__ import annotations

import functools
from itertools import pairwise

import pytest
from programs import (
    EVERY_STEP,
    Case,
    apply,
    assert_same,
    calls,
    dense,
    differentiated,
    layers,
    loss,
    most_gathered,
    moved,
    names,
    partition,
    rows,
    tried,
)
from torch import Tensor, fx

import fzero
from fzero import ops, tree
from fzero.mesh import VirtualMesh
from fzero.passes import bucket, prefetch, release
from fzero.program import Program

MESH = VirtualMesh(fsdp=2)
STAGE_3 = (bucket, functools.partial(release, stage=3))


def prefetched(case: Case, ahead: int) -> Program:
    return apply(case.trace(), *STAGE_3, functools.partial(prefetch, ahead=ahead))


def started_and_waited(program: Program, target: object) -> list[tuple[fx.Node, fx.Node]]:
    """`(start, wait)` of each collective of a kind, in order."""
    return [(start, wait) for start in calls(program, target) for wait in start.users]


@pytest.mark.parametrize("ahead", [0, 1, 2])
@pytest.mark.parametrize(("name", "world"), EVERY_STEP)
def test_results_are_the_same_bit_for_bit(name: str, world: int, ahead: int) -> None:
    case, program, outputs = tried(name, world)
    assert_same(case.run(apply(program, *STAGE_3, functools.partial(prefetch, ahead=ahead))), outputs)


def test_a_gather_starts_when_the_one_before_it_is_there() -> None:
    pairs = started_and_waited(prefetched(differentiated(loss, layers(4), MESH), 1), ops.all_gather)
    for (_, there), (start, _) in pairwise(pairs):
        assert start.prev is there


@pytest.mark.parametrize("ahead", [1, 2, 3])
def test_gathers_start_in_the_order_in_which_they_are_used(ahead: int) -> None:
    program = prefetched(differentiated(loss, layers(4), MESH), ahead)
    waited = [wait.args[0] for wait in calls(program, ops.wait) if ops.is_call(wait.args[0], ops.all_gather)]
    assert calls(program, ops.all_gather) == waited


def test_a_gather_whose_slices_come_late_keeps_its_place_among_the_others() -> None:
    def step(params: tree.Tree, x: Tensor) -> Tensor:
        first, second, third = params["layers"]
        y = dense(first, x)
        return y @ (second["w"] * fzero.pmean(y.mean(), "fsdp")) @ third["w"]

    program = prefetched(Case(step, MESH, lambda seat: (partition(layers(3), seat), rows(seat))), 2)
    assert [line[-1] for line in moved(program) if "gather" in line] == list("012")


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_gathered_buckets_that_are_alive_grow_by_one_for_each_one_ahead(ahead: int) -> None:
    assert most_gathered(prefetched(differentiated(loss, layers(5), MESH), ahead)) == 1 + ahead


def test_none_ahead_leaves_gathers_at_their_uses() -> None:
    case = differentiated(loss, layers(), MESH)
    program = prefetched(case, 0)
    assert all(start.next is wait for start, wait in started_and_waited(program, ops.all_gather))


def test_the_same_is_moved() -> None:
    case = differentiated(loss, layers(), MESH)
    assert sorted(moved(prefetched(case, 1))) == sorted(moved(apply(case.trace(), *STAGE_3)))


def test_a_gather_does_not_start_before_its_slices_are_there() -> None:
    def step(params: tree.Tree, x: Tensor) -> Tensor:
        (layer,) = params["layers"]
        weight = layer["w"] * 2
        return (x @ weight.cos()) @ (weight.sin() @ weight)

    program = prefetched(Case(step, MESH, lambda seat: (partition(layers(1), seat), rows(seat))), 9)
    position = {node: index for index, node in enumerate(program.graph.nodes)}
    for start in calls(program, ops.all_gather):
        assert position[start.args[0][0]] < position[start]


def test_a_scatter_is_waited_for_when_the_next_one_starts() -> None:
    pairs = started_and_waited(prefetched(differentiated(loss, layers(4), MESH), 1), ops.reduce_scatter)
    position = {node: index for index, node in enumerate(pairs[0][0].graph.nodes)}
    for (_, wait), (following, _) in pairwise(pairs):
        assert {position[following] - position[node] for node in (wait, *wait.users)} == {1, 2, 3}


def test_a_scatter_is_waited_for_when_its_result_is_used() -> None:
    def step(params: tree.Tree, x: Tensor) -> tree.Tree:
        return tree.map(lambda g: g * 2, fzero.grad(loss)(params, x))

    program = prefetched(Case(step, MESH, lambda seat: (partition(layers(1), seat), rows(seat))), 1)
    assert names(program)[-5:] == ["wait", "part", "part", "mul", "mul"]


def test_the_last_scatter_of_returned_gradients_is_waited_for_at_the_end() -> None:
    program = prefetched(differentiated(loss, layers(2), MESH), 1)
    assert names(program)[-3:] == ["wait", "part", "part"]
