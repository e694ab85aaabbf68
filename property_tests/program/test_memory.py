"""Laws of memory: predicted bytes alive bound the bytes that each rank of the running program keeps alive."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from hypothesis import example, given
from hypothesis import strategies as st
from programs import Storages
from torch import Tensor

import fzero
from fzero.base.mesh import VirtualMesh
from fzero.layout.layout import Layout
from fzero.passes import bucket, donate, release, resolve
from fzero.program import ops
from fzero.program.memory import Allocator, measure_memory
from fzero.program.operation import Node, nbytes
from fzero.program.program import Program
from fzero.ranks.virtual import virtual
from fzero.testing.steps import Of, Op, TrainStep
from fzero.testing.strategies import layouts, train_steps
from fzero.tracing.trace import trace
from fzero.values.sharded import Sharded
from property_tests.laws import everything, slow
from property_tests.running import Running, as_written, finish

Values = list[dict[Node, Any]]

CAST = TrainStep(VirtualMesh(fsdp=1), (Op("low"),), others=Of(()), width=1, stage=1, donate=False)
"""On one rank the block of a reduce-scatter is a list of slices, and so is the block that is cast."""
RAGGED = TrainStep(VirtualMesh(fsdp=3), (Op("dense", through=("gated", "gated", "tanh")),), width=5)
"""Rank 1 holds more of the matrix than rank 0, and more of every value computed from the slice."""


def tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif not isinstance(value, (int, str)) and hasattr(value, "__iter__"):
        for item in value:
            yield from tensors(item)


def peaks(running: Running) -> list[int]:
    """Each rank's most bytes alive behind a node."""
    most, storages = [0] * running.program.mesh.size(), Storages(running.program)

    def watch(node: Node, ranks: Values) -> None:
        found = [storages.count(values, tensors(values.values())) for values in ranks]
        most[:] = map(max, most, found)

    running.outputs(watch=watch)
    return most


def measure_margin(running: Running) -> int:
    """The receive buffers of reduce-scatters with more than two ranks, which a simulation does not need, and what an
    operation needs while it runs: bytes are counted behind each node."""
    mesh = running.program.mesh
    world = mesh.size(mesh.shard_axis)
    scratch = Allocator(running.program, range(world)).scratch.values()
    within = max((int(torch.as_tensor(each).max()) for each in scratch), default=0)
    scattered = running.program.graph.find_nodes(op="call_function", target=ops.reduce_scatter)
    return max(world - 2, 0) * sum(nbytes(node.meta["val"]) for node in scattered) + within


@given(train_steps())
@example(RAGGED)
@example(CAST)
@example(dataclasses.replace(CAST, mesh=VirtualMesh(fsdp=2), width=4, rows=3, loss="entropy"))
@everything
@slow
def test_predicted_memory_bounds_that_of_each_rank_and_is_near_that_of_some(step: TrainStep) -> None:
    """Before any pass it bounds."""
    written = as_written(step)
    assert written.program.memory().peak >= max(peaks(written))
    running = finish(written, step)
    most = max(peaks(running))
    assert most <= running.program.memory().peak <= 1.01 * most + measure_margin(running)


def of_every_rank(program: Program) -> None:
    """Memory of representative ranks is the memory of the rank that has most, among all ranks."""
    ranks = range(program.mesh.size(program.mesh.shard_axis))
    assert program.memory() == measure_memory(program, ranks)
    each = [measure_memory(program, [rank]) for rank in ranks]
    assert program.memory() == max(each, key=lambda one: one.peak)  # the first of those that have most


@given(train_steps())
@slow
def test_ranks_that_are_not_looked_at_have_as_much_as_others(step: TrainStep) -> None:
    written = as_written(step)
    for running in (written, finish(written, step)):
        of_every_rank(running.program)


@given(layouts(max_world=40, max_block=5), st.sets(st.integers(0, 4)), st.sampled_from(["float32", "bfloat16"]))
@slow
def test_so_it_is_of_some_leaves_of_a_bucket(layout: Layout, leaves: set[int], dtype: str) -> None:
    """Of leaves of any sizes, the gradients of some, cast or not: parts of a bucket travel, and adjoin or do not."""
    used = [leaf for leaf in range(len(layout.leaves)) if leaf in leaves or len(leaves) == 0]

    def update(params: list[Any]) -> list[Any]:
        def loss(params: list[Any]) -> Tensor:
            return sum((params[i].to(getattr(torch, dtype)).full_tensor().sin().sum() for i in used), torch.zeros(()))

        grads = fzero.grad(loss)(params)
        return [p - g.exp() * 0.1 if i in used else p for i, (p, g) in enumerate(zip(params, grads))]

    on = virtual(layout.mesh)
    params = [Sharded(torch.empty(leaf.numel), layout, i, on) for i, leaf in enumerate(layout.leaves)]
    program = resolve(trace(update, (params,), layout.mesh))
    of_every_rank(program)
    of_every_rank(donate(release(bucket(program), stage=3)))
