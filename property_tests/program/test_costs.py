"""Laws of costs: what a program is said to communicate and to keep alive is what it does, run for all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

import fzero
from fzero.base.mesh import VirtualMesh
from fzero.layout.layout import Layout
from fzero.passes import bucket, donate, release, resolve
from fzero.program import ops
from fzero.program.comm import Comm
from fzero.program.memory import measure_memory
from fzero.program.operation import Node, nbytes
from fzero.program.program import Program
from fzero.program.records import is_call
from fzero.ranks.virtual import virtual
from fzero.tracing.trace import trace
from fzero.values.sharded import Sharded
from property_tests.laws import everything, slow
from property_tests.running import Running, as_written, finished
from property_tests.steps import Op, Step
from property_tests.strategies import layouts, steps

Values = list[dict[Node, Any]]

RAGGED = Step(VirtualMesh(fsdp=3), (Op("dense", through=("gated", "gated", "tanh")),), width=5)
"""Of its matrix rank 1 has more than rank 0, and so of all that is computed from it."""


def counted(program: Program, node: Node, result: Any) -> Iterator[Comm]:
    """The collectives that a node has started on one rank, by the tensors that it gets."""
    mesh = program.mesh
    axis, others = mesh.shard_axis, [name for name in mesh.names if name != mesh.shard_axis]
    if is_call(node, ops.all_gather):
        yield Comm("all_gather", axis, node.args[1], result.result.dtype, nbytes(result.result))
    elif is_call(node, ops.reduce_scatter):
        block, fulls = result.result, node.args[0]
        whole = sum(full.meta["val"].numel() for full in fulls) * block.element_size()
        size = nbytes(block) * mesh.size(axis) if program.wire_of(node).is_complete else whole  # some leaves alone travel without padding
        yield Comm("reduce_scatter", axis, node.args[1], block.dtype, size)
        yield from (Comm("all_reduce", other, node.args[1], block.dtype, nbytes(block)) for other in others)
    elif is_call(node, ops.all_reduce, ops.all_reduce_list):
        first = result[0] if isinstance(result, list) else result
        yield Comm("all_reduce", node.args[2], None, first.dtype, nbytes(result))


@given(steps())
@everything
@slow
def test_predicted_comm_is_what_each_rank_exchanges(step: Step) -> None:
    running = finished(step)
    exchanged: list[list[Comm]] = [[] for _ in range(step.mesh.size())]

    def watch(node: Node, ranks: Values) -> None:
        if node.op == "call_function":
            for entries, values in zip(exchanged, ranks):
                entries.extend(counted(running.program, node, values[node]))

    running.outputs(watch=watch)
    assert all(entries == running.program.comm() for entries in exchanged)


def alive(values: dict[Node, Any]) -> int:
    """Bytes of the storages of all tensors among a rank's values, each counted once."""
    return sum({x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in tensors(values.values())}.values())


def tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif not isinstance(value, (int, str)) and hasattr(value, "__iter__"):
        for item in value:
            yield from tensors(item)


def peaks(running: Running) -> list[int]:
    """Each rank's most bytes alive behind a node."""
    most = [0] * len(running.arguments)

    def watch(node: Node, ranks: Values) -> None:
        most[:] = [max(peak, alive(values)) for peak, values in zip(most, ranks)]

    running.outputs(watch=watch)
    return most


@given(steps())
@example(RAGGED)
@everything
@slow
def test_predicted_memory_bounds_that_of_each_rank(step: Step) -> None:
    running = finished(step)
    assert running.program.memory().peak >= max(peaks(running))


@given(steps())
@example(RAGGED)
@slow
def test_predicted_memory_bounds_that_of_each_rank_before_any_pass(step: Step) -> None:
    running = as_written(step)
    assert running.program.memory().peak >= max(peaks(running))


@given(steps())
@slow
def test_predicted_memory_is_near_that_of_some_rank(step: Step) -> None:
    """But for what a reduce-scatter receives from other ranks than one, which simulation has no need of."""
    running = finished(step)
    world = step.mesh.size(step.mesh.shard_axis)
    scattered = running.program.graph.find_nodes(op="call_function", target=ops.reduce_scatter)
    received = max(world - 2, 0) * sum(nbytes(node.meta["val"]) for node in scattered)
    assert running.program.memory().peak <= 1.01 * max(peaks(running)) + received


def of_every_rank(program: Program) -> None:
    """The memory is that of all ranks, each looked at."""
    ranks = range(program.mesh.size(program.mesh.shard_axis))
    assert program.memory() == measure_memory(program, ranks)
    each = [measure_memory(program, [rank]) for rank in ranks]
    assert program.memory() == max(each, key=lambda one: one.peak)  # the first of those that have most


@given(steps())
@slow
def test_ranks_that_are_not_looked_at_have_as_much_as_others(step: Step) -> None:
    for running in (as_written(step), finished(step)):
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
