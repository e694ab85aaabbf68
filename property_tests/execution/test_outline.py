"""Laws of fragments: an outlined program gives the results of the program."""

from __future__ import annotations

from typing import Any

from hypothesis import given

from fzero.execution.outline import Fragment, outline
from fzero.program.operation import Node
from fzero.testing.steps import TrainStep
from fzero.testing.strategies import train_steps
from property_tests.laws import slow
from property_tests.running import assert_equal, finished


@given(train_steps())
@slow
def test_outlining_preserves_meaning(step: TrainStep) -> None:
    """Fragments take and give what all ranks have, in the same sizes: one is compiled for sizes that the program
    shows."""
    running = finished(step)
    program = outline(running.program)
    program.graph.lint()

    def check(node: Node, values: list[dict[Node, Any]]) -> None:
        if isinstance(node.target, Fragment):
            for mine in values:
                taken = [mine[source] for source in node.args]
                assert [x.shape for x in taken] == [x.shape for x in node.target.inputs]
                assert [x.shape for x in mine[node]] == [x.shape for x in node.meta["val"]]

    assert_equal(running.outputs(program, check), running.outputs(), None)
