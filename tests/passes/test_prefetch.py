"""The prefetch pass: all-gathers start early, reduce-scatters are waited for late."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from programs import (
    EVERY_STEP,
    MESH,
    Case,
    apply,
    assert_same,
    calls,
    dense,
    differentiated,
    layers,
    loss,
    moved,
    names,
    on_ones,
    on_rows,
    tried,
)
from torch import Tensor, fx

import fzero
from fzero import tree
from fzero.base.mesh import VirtualMesh
from fzero.passes import bucket, prefetch, release
from fzero.passes.prefetch import SPARE
from fzero.program import ops
from fzero.program.operation import nbytes
from fzero.program.program import Program
from fzero.program.rates import GUESSES, Rates
from fzero.program.records import name_of
from fzero.program.work import work

STAGE_3 = (bucket, functools.partial(release, stage=3))
BUCKET = 32 * 4
"""Bytes of a gathered layer of `layers`: 30 elements and 2 of padding."""

FAST = Rates(flops=1e30, memory=1.0, wire=1e30, launch=0.0, latency=1e-9)
"""A wire so fast that a collective takes less than any operation."""
SLOW = Rates(flops=1e30, memory=1e30, wire=1.0, launch=0.0, latency=1.0)
"""So slow that nothing hides a collective."""


def prefetched(case: Case, rates: Rates = FAST, memory: int | None = None) -> Program:
    return apply(case.trace(), measuring(rates), *STAGE_3, functools.partial(prefetch, memory=memory))


def measuring(rates: Rates) -> Callable[[Program], Program]:
    return lambda program: replace(program, measured=rates)


def chain(*widths: int) -> Case:
    """`x @ w` for a leaf [4, 4] after the other, with as many products of x alone in front of each: [2, 4] @ [4, 4]."""
    params = {str(i): torch.ones(4, 4) for i in range(len(widths))}

    def step(params: tree.Tree, x: Tensor) -> Tensor:
        for weight, count in zip(params.values(), widths):
            for _ in range(count):
                x = x @ torch.ones(4, 4)
            x = x @ weight
        return x

    return on_ones(step, params)


def products(program: Program) -> dict[str, int]:
    """Bucket -> number of products between the start of its all-gather and the wait."""
    counts, under_way = dict[str, int](), set[str]()
    for node in program.graph.nodes:
        if ops.is_call(node, ops.all_gather):
            under_way.add(node.args[1])
            counts[node.args[1]] = 0
        elif ops.is_call(node, ops.wait):
            under_way.remove(node.args[0].args[1])
        elif name_of(node) == "mm":
            counts |= {bucket: counts[bucket] + 1 for bucket in under_way}
    return counts


def gathered_ahead(program: Program) -> int:
    """The most bytes of gathered buffers on their way during any computation."""
    waiting, most = 0, 0
    for node in program.graph.nodes:
        start = node.args[0] if ops.is_call(node, ops.wait) else node
        if ops.is_call(start, ops.all_gather):
            waiting += nbytes(start.meta["val"]) * (1 if node is start else -1)
        elif any(work(node)):
            most = max(most, waiting)
    return most


def sent_at_once(program: Program) -> int:
    """The most reduce-scatters under way at once."""
    sending, most = 0, 0
    for node in program.graph.nodes:
        if ops.is_call(node, ops.reduce_scatter):
            sending += 1
        elif ops.is_call(node, ops.wait) and ops.is_call(node.args[0], ops.reduce_scatter):
            sending -= 1
        most = max(most, sending)
    return most


def started_and_waited(program: Program, target: object) -> list[tuple[fx.Node, fx.Node]]:
    """`(start, wait)` of each collective of a kind, in order."""
    return [(start, wait) for start in calls(program, target) for wait in start.users]


@pytest.mark.parametrize(
    ("rates", "memory"),
    [(FAST, None), (SLOW, None), (SLOW, BUCKET), (GUESSES["cpu"], 0)],
    ids=["fast", "slow", "little memory", "none"],
)
@pytest.mark.parametrize(("name", "world"), EVERY_STEP)
def test_results_are_the_same_bit_for_bit(name: str, world: int, rates: Rates, memory: int | None) -> None:
    case, program, outputs = tried(name, world)
    result = apply(replace(program, measured=rates), *STAGE_3, functools.partial(prefetch, memory=memory))
    assert_same(case.run(result), outputs)


ONE = Rates(flops=64.0, memory=1e30, wire=64.0, launch=0.0, latency=0.0)
"""A product takes a second, to gather a leaf of `chain` as long."""


def test_a_gather_starts_two_products_before_its_use_if_it_takes_as_long_as_one() -> None:
    assert products(prefetched(chain(0, 5, 5), ONE)) == {"0": 0, "1": 2, "2": 2}


def test_a_gather_starts_right_in_front_of_the_first_product_that_hides_it() -> None:
    _, *starts = calls(prefetched(chain(0, 5, 5), ONE), ops.all_gather)
    assert [name_of(start.next) for start in starts] == ["mm", "mm"]


def test_a_gather_starts_with_the_step_if_there_is_not_enough_to_hide_it() -> None:
    assert products(prefetched(chain(0, 0, 5), ONE)) == {"0": 0, "1": 1, "2": 2}
    assert products(prefetched(chain(1, 0, 5), ONE)) == {"0": 1, "1": 2, "2": 2}


def test_a_gather_starts_before_the_use_of_a_small_one() -> None:
    assert products(prefetched(chain(4, 0, 0), ONE)) == {"0": 2, "1": 2, "2": 2}


def test_a_small_gather_starts_early_for_a_large_one_behind_it() -> None:
    params = {"0": torch.ones(4, 4), "1": torch.ones(4, 16)}

    def step(params: tree.Tree, x: Tensor) -> Tensor:
        for _ in range(6):
            x = x @ torch.ones(4, 4)
        return x @ params["0"] @ params["1"]

    case = on_ones(step, params)
    assert products(prefetched(case, ONE)) == {"0": 3, "1": 4}  # of which the last is by "0" itself


def test_a_step_without_gathers_stays_as_it_is() -> None:
    case = on_rows(lambda x: x * 2)
    assert names(prefetched(case)) == ["mul"]


def test_arguments_come_first() -> None:
    program = prefetched(differentiated(loss, layers(), MESH), SLOW)
    nodes = list(program.graph.nodes)
    assert nodes[: len(program.placeholders)] == program.placeholders


def test_gathers_of_which_memory_has_no_room_for_two_follow_each_other() -> None:
    assert products(prefetched(chain(4, 0, 4), ONE, memory=BUCKET)) == {"0": 2, "1": 1, "2": 2}


def test_a_gather_that_is_larger_than_memory_starts_at_its_use() -> None:
    assert set(products(prefetched(chain(4, 4, 4), ONE, memory=BUCKET - 1)).values()) == {0}


@pytest.mark.parametrize("memory", [0, BUCKET, 2 * BUCKET, 3 * BUCKET])
def test_memory_bounds_what_is_gathered_before_its_use(memory: int) -> None:
    case = differentiated(loss, layers(6), MESH)
    assert gathered_ahead(prefetched(case, SLOW, memory)) == memory


@pytest.mark.parametrize(("memory", "expected"), [(0, 1), (BUCKET, 1), (2 * BUCKET, 2), (3 * BUCKET, 3)])
def test_memory_bounds_what_is_being_scattered(memory: int, expected: int) -> None:
    assert sent_at_once(prefetched(differentiated(loss, layers(6), MESH), SLOW, memory)) == expected


def test_a_scatter_of_three_ranks_receives_a_block_of_one_besides() -> None:
    case = differentiated(loss, layers(6), VirtualMesh(fsdp=3))
    assert sent_at_once(prefetched(case, SLOW, 2 * 64 * 4 - 1)) == 1  # 48 elements sent, 16 received
    assert sent_at_once(prefetched(case, SLOW, 2 * 64 * 4)) == 2


def test_by_default_there_is_room_for_the_largest_bucket_twice() -> None:
    case = differentiated(loss, layers(6), MESH)
    assert str(prefetched(case, SLOW).graph) == str(prefetched(case, SLOW, 2 * BUCKET).graph)


@pytest.mark.parametrize("rates", [FAST, SLOW])
@pytest.mark.parametrize("memory", [0, BUCKET, 4 * BUCKET])
def test_the_peak_grows_by_no_more_than_twice_memory(rates: Rates, memory: int) -> None:
    case = differentiated(loss, layers(6), MESH)
    before = apply(case.trace(), *STAGE_3).memory().peak
    assert prefetched(case, rates, memory).memory().peak <= before + 2 * memory


@pytest.mark.parametrize("rates", [FAST, SLOW, GUESSES["cpu"]])
def test_collectives_start_in_the_order_in_which_they_are_used(rates: Rates) -> None:
    program = prefetched(differentiated(loss, layers(4), MESH), rates, 3 * BUCKET)
    before = apply(differentiated(loss, layers(4), MESH).trace(), *STAGE_3)
    for op in ("gather", "scatter"):
        assert [line for line in moved(program) if op in line] == [line for line in moved(before) if op in line]
    waited = [wait.args[0] for wait in calls(program, ops.wait) if ops.is_call(wait.args[0], ops.all_gather)]
    assert calls(program, ops.all_gather) == waited


def test_a_gather_whose_slices_come_late_keeps_its_place_among_the_others() -> None:
    def step(params: tree.Tree, x: Tensor) -> Tensor:
        first, second, third = params["layers"]
        y = dense(first, x)
        return y @ (second["w"] * fzero.pmean(y.mean(), "fsdp")) @ third["w"]

    program = prefetched(on_rows(step, layers(3)), SLOW)
    assert [line[-1] for line in moved(program) if "gather" in line] == list("012")


def test_without_memory_collectives_are_waited_for_at_once() -> None:
    program = prefetched(differentiated(loss, layers(), MESH), SLOW, 0)
    assert all(start.next is wait for start, wait in started_and_waited(program, ops.all_gather))
    assert sent_at_once(program) == 1


def test_on_one_rank_gathers_stay_at_their_uses() -> None:
    assert gathered_ahead(prefetched(differentiated(loss, layers(), VirtualMesh(fsdp=1)), SLOW)) == 0


def test_a_gather_does_not_start_before_its_slices_are_there() -> None:
    def step(params: tree.Tree, x: Tensor) -> Tensor:
        (layer,) = params["layers"]
        weight = layer["w"] * 2
        return (x @ weight.cos()) @ (weight.sin() @ weight)

    program = prefetched(on_rows(step, layers(1)), SLOW)
    position = {node: index for index, node in enumerate(program.graph.nodes)}
    first, *_ = starts = calls(program, ops.all_gather)
    assert first.prev is first.args[0][0]
    for start in starts:
        assert position[start.args[0][0]] < position[start]


def test_a_gather_starts_right_behind_its_slices_if_there_is_not_enough_to_hide_it() -> None:
    def step(params: tree.Tree, x: Tensor) -> Tensor:
        weight = params["w"] * 2
        return x.sin().cos() @ weight

    case = on_ones(step, {"w": torch.ones(4, 4)})
    assert names(prefetched(case, SLOW))[:3] == ["mul", "all_gather", "sin"]


def test_a_scatter_that_is_done_is_waited_for_when_the_next_one_starts() -> None:
    stage_2 = bucket, functools.partial(release, stage=2)  # in whose backward pass no gathered buffer arrives
    program = apply(differentiated(loss, layers(4), MESH).trace(), measuring(FAST), *stage_2, prefetch)
    pairs = started_and_waited(program, ops.reduce_scatter)
    position = {node: index for index, node in enumerate(program.graph.nodes)}
    for (_, wait), (following, _) in pairwise(pairs):
        assert {position[following] - position[node] for node in (wait, *wait.users)} == {1, 2, 3}


@pytest.mark.parametrize("part", [0.5, 2.0])
def test_a_scatter_that_is_almost_done_is_waited_for_when_a_gathered_buffer_arrives(part: float) -> None:
    case = differentiated(loss, layers(3), MESH)
    seconds = SPARE * prefetched(case, FAST).timeline().compute
    program = prefetched(case, FAST._replace(latency=part * seconds))
    position = {node: index for index, node in enumerate(program.graph.nodes)}
    *_, arrival = (wait for _, wait in started_and_waited(program, ops.all_gather))
    (start, wait), *_ = [
        pair for pair in started_and_waited(program, ops.reduce_scatter) if pair[0].args[1] == "layers.1"
    ]
    assert position[start] < position[arrival]
    assert (position[wait] < position[arrival]) == (part < 1)


def test_a_scatter_that_is_not_done_is_not_waited_for_when_the_next_one_starts() -> None:
    pairs = started_and_waited(prefetched(differentiated(loss, layers(2), MESH), SLOW), ops.reduce_scatter)
    assert max(start for start, _ in pairs) < min(wait for _, wait in pairs)


def test_a_scatter_is_waited_for_when_its_result_is_used() -> None:
    def step(params: tree.Tree, x: Tensor) -> tree.Tree:
        return tree.map(lambda g: g * 2, fzero.grad(loss)(params, x))

    program = prefetched(on_rows(step, layers(1)))
    assert names(program)[-5:] == ["wait", "part", "part", "mul", "mul"]


def test_a_cast_of_what_was_scattered_is_no_use() -> None:
    def halved(params: tree.Tree, x: Tensor) -> Tensor:
        return loss(tree.map(lambda leaf: leaf.to(torch.bfloat16), params), x.to(torch.bfloat16)).float()

    program = prefetched(differentiated(halved, layers(2), MESH), SLOW)
    assert names(program)[-6:] == [*["wait", "part", "part"] * 2]
    assert [bool(wait.kwargs) for wait in calls(program, ops.wait)[-2:]] == [True, True]


def test_the_last_scatter_of_returned_gradients_is_waited_for_at_the_end() -> None:
    program = prefetched(differentiated(loss, layers(2), MESH))
    assert names(program)[-3:] == ["wait", "part", "part"]
