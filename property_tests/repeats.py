"""The law of repeats, on what tests run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from fzero import pipeline
from fzero.program.open import find_difference
from fzero.program.operation import Node
from fzero.program.program import Program
from fzero.tracing.repeats import Repeats
from fzero.values.regions import get_mark


@contextmanager
def trace_both() -> Iterator[list[str]]:
    """Within, each trace of a step is made without repeats too. Gives how both differ: nothing, by the law of repeats,
    that a trace which records operations of known forms at once is the trace that torch records."""
    given, differences = pipeline.trace, list[str]()

    def trace(*args: Any, **kwargs: Any) -> Program:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Repeats, "knows", lambda self, call: False)
            expected = given(*args, **kwargs)
        made = given(*args, **kwargs)
        pairs = zip(made.graph.nodes, expected.graph.nodes)
        lines = [f"the line or the mark of {a.name}" for a, b in pairs if _describe(a) != _describe(b)]
        differences.extend(filter(None, [find_difference(made, expected), *lines]))
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "trace", trace)
        yield differences


def _describe(node: Node) -> Any:
    """The line of a node, and its mark: two traces have as many regions and turns, and not the same ones."""
    mark = get_mark(node)
    return node.stack_trace, len(mark.regions), mark.in_backward, len(mark.turns), mark.port is None
