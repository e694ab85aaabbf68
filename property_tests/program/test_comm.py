"""Law of communication: each rank moves exactly the predicted bytes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hypothesis import given

from fzero.program import ops
from fzero.program.comm import Comm
from fzero.program.operation import Node, nbytes
from fzero.program.program import Program
from fzero.program.records import is_call
from fzero.testing.steps import TrainStep
from fzero.testing.strategies import train_steps
from property_tests.laws import everything, slow
from property_tests.running import finished

Values = list[dict[Node, Any]]


def count(program: Program, node: Node, result: Any) -> Iterator[Comm]:
    """The collectives that a node has started on one rank, counted on the tensors of that rank."""
    mesh = program.mesh
    axis = mesh.shard_axis
    if is_call(node, ops.all_gather):
        yield Comm("all_gather", axis, node.args[1], result.result.dtype, nbytes(result.result))
    elif is_call(node, ops.reduce_scatter) and mesh.size() == 1:  # the leaves stay where they lie
        leaves, sent = result.result, program.wire_of(node).sent
        assert [leaf.numel() for leaf in leaves] == [leaf.meta["val"].numel() for leaf in node.args[0]]
        yield Comm("reduce_scatter", axis, node.args[1], leaves[0].dtype, sent * leaves[0].element_size())
    elif is_call(node, ops.reduce_scatter):
        block, whole = result.result, sum(leaf.meta["val"].numel() for leaf in node.args[0])
        # some leaves of a bucket travel without padding
        size = len(block) * mesh.size(axis) if program.wire_of(node).is_complete else whole
        yield Comm("reduce_scatter", axis, node.args[1], block.dtype, size * block.element_size())
        if mesh.replica_axes:
            yield Comm("all_reduce", mesh.join(mesh.replica_axes), node.args[1], block.dtype, nbytes(block))
    elif is_call(node, ops.all_reduce, ops.all_reduce_list):
        first = result[0] if isinstance(result, list) else result
        yield Comm("all_reduce", node.args[2], None, first.dtype, nbytes(result))


@given(train_steps())
@everything
@slow
def test_predicted_comm_is_what_each_rank_exchanges(step: TrainStep) -> None:
    running = finished(step)
    exchanged: list[list[Comm]] = [[] for _ in range(step.mesh.size())]

    def watch(node: Node, ranks: Values) -> None:
        if node.op == "call_function":
            for entries, values in zip(exchanged, ranks):
                entries.extend(count(running.program, node, values[node]))

    running.outputs(watch=watch)
    assert all(entries == running.program.comm() for entries in exchanged)
