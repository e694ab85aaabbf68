"""Updates on the host run in between the backward pass, and few of their copies are on the host at once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from programs import layers, loss, rows, training
from test_offload import ADAMW, BOTH, CLIPPED, STATE, assert_equal, train

import fzero
from fzero import VirtualMesh, optim, passes, tree
from fzero.passes.host_updates import UPDATES
from fzero.program import ops
from fzero.program.operation import Node, nbytes, values_of
from fzero.program.program import Program
from fzero.program.rates import Rates
from fzero.program.records import name_of

RATES = Rates(flops=1e11, memory=1e10, wire=1e30, launch=5e-6, latency=0.0)
COUNT, MESH = 8, VirtualMesh(fsdp=2)
LAYER = 64
"""Bytes of a layer's gradients on rank 0: 16 elements."""


def begin(optimizer: optim.GradientTransformation, places: Any = (None, None)) -> tuple[Any, Any]:
    """The first parameters and state of eight layers, in these places."""
    params = fzero.partition(layers(COUNT), MESH, to=places[0])
    return params, optimizer.init(params, to=places[1])


def trace(optimizer: optim.GradientTransformation, places: Any) -> Program:
    """The program for a machine on which a reduce-scatter takes no time: updates need not hide one."""
    chosen = passes.insert(passes.defaults(stage=3), lambda given: replace(given, measured=RATES), before="prefetch")
    return fzero.simulate(training(optimizer), MESH, passes=chosen).trace(*begin(optimizer, places), rows(MESH))


def find_copies(program: Program, *, of_arguments: bool) -> list[Node]:
    """The starts of copies of parameters to the host, or of those of gradients."""
    starts = program.graph.find_nodes(op="call_function", target=ops.to_host)
    wide = [node for node in starts if node.args[0][0].meta["val"].ndim]
    return [node for node in wide if (node.args[0][0].op == "placeholder") is of_arguments]


def count_on_host(program: Program, copies: list[Node]) -> int:
    """The most of these copies that are there at once, from their start to the last update that takes them."""
    position = {node: i for i, node in enumerate(program.graph.nodes)}
    updates = [node for node in program.graph.nodes if node.target is ops.adamw_]

    def find_end(copy: Node) -> int:
        (arrived,) = copy.users
        return max(position[update] for update in updates for item in arrived.users if update in item.users)

    spans = [(position[copy], find_end(copy)) for copy in copies]
    return max(sum(start <= at < end for start, end in spans) for at in position.values())


@pytest.mark.parametrize(("optimizer", "places"), [(ADAMW, STATE), (CLIPPED, BOTH), (optim.lion(0.1), BOTH)])
def test_a_step_of_many_buckets_is_the_resident_one(optimizer: optim.GradientTransformation, places: Any) -> None:
    step, batch = fzero.simulate(training(optimizer), MESH), rows(MESH)
    expected, losses = train(step, begin(optimizer), batch, 2)
    got, others = train(step, begin(optimizer, places), batch, 2)
    assert_equal(fzero.unpartition(got), fzero.unpartition(expected))
    assert_equal(others, losses)


def test_updates_run_in_between_the_backward_pass() -> None:
    """The host holds the state, and copies for four buckets out of eight."""
    program = trace(ADAMW, STATE)
    nodes = list(program.graph.nodes)
    first = next(i for i, node in enumerate(nodes) if node.target is ops.adamw_)
    assert first < max(i for i, node in enumerate(nodes) if node.target is torch.ops.aten.mm.default)
    for of_arguments in (False, True):
        copies = find_copies(program, of_arguments=of_arguments)
        assert len(copies) == COUNT
        assert count_on_host(program, copies) == UPDATES
    state, numbers = 2 * COUNT * LAYER, 4
    assert program.memory().host <= state + 2 * UPDATES * LAYER + numbers


def test_clipping_waits_for_all_gradients_and_copies_few_parameters() -> None:
    program = trace(CLIPPED, STATE)
    assert count_on_host(program, find_copies(program, of_arguments=False)) == COUNT
    assert count_on_host(program, find_copies(program, of_arguments=True)) == UPDATES
    state, numbers = 2 * COUNT * LAYER, 9
    assert program.memory().host <= state + COUNT * LAYER + UPDATES * LAYER + numbers


def test_lists_on_the_host_are_cut_by_bucket() -> None:
    """An optimizer without a fused kernel computes one bucket behind the other as well."""
    program = trace(optim.chain(optim.clip_by_global_norm(0.1), optim.lion(0.1)), BOTH)
    state, temporaries = 2 * COUNT * LAYER, 4 * LAYER
    assert program.memory().host <= state + COUNT * LAYER + temporaries + 9
    listed = [node for node in program.graph.nodes if node.op == "call_function" and name_of(node) == "_foreach_mul_"]
    assert len(listed) == 2 * COUNT
    assert all(nbytes(values_of(node.args[0])) == LAYER for node in listed)


def test_an_argument_that_is_read_on_the_way_is_updated_behind_that() -> None:
    """Each layer is read again behind the gradients, and the update still overwrites it."""

    def step(params: Any, state: Any, x: torch.Tensor) -> Any:
        value, grads = fzero.value_and_grad(lambda p: loss(p, x))(params)
        norm = sum(leaf.square().sum() for leaf in tree.leaves(params))
        updates, state = ADAMW.update(grads, state, params)
        return optim.apply_updates(params, updates), state, value + norm

    simulated, batch = fzero.simulate(step, MESH), rows(MESH)
    expected, losses = train(simulated, begin(ADAMW), batch, 2)
    got, others = train(simulated, begin(ADAMW, BOTH), batch, 2)
    assert_equal(fzero.unpartition(got), fzero.unpartition(expected))
    assert_equal(others, losses)
