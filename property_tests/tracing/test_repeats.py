"""The law of repeats: a trace that records operations of known forms at once is the trace that torch records."""

from __future__ import annotations

from typing import Any

import pytest

from fzero import pipeline
from fzero.program.open import find_difference
from fzero.program.operation import Node
from fzero.program.program import Program
from fzero.tracing.repeats import Repeats
from fzero.values.regions import get_mark
from property_tests.random_steps.run import run

SEEDS = range(4000, 4012)


def trace_both(monkeypatch: pytest.MonkeyPatch, differences: list[str]) -> None:
    """Let each trace of a step be made again without repeats, and note how both differ."""
    given = pipeline.trace

    def trace(*args: Any, **kwargs: Any) -> Program:
        made: list[Program] = []
        for has_repeats in (False, True):
            with pytest.MonkeyPatch.context() as patch:
                if not has_repeats:
                    patch.setattr(Repeats, "knows", lambda self, call: False)
                made.append(given(*args, **kwargs))
        expected, *others = made
        for other in others:
            pairs = zip(other.graph.nodes, expected.graph.nodes)
            lines = [f"the line or the mark of {a.name}" for a, b in pairs if _describe(a) != _describe(b)]
            differences.extend(filter(None, [find_difference(other, expected), *lines]))
        return others[-1]

    monkeypatch.setattr(pipeline, "trace", trace)


def _describe(node: Node) -> Any:
    """The line of a node, and its mark: two traces have as many regions and turns, and not the same ones."""
    mark = get_mark(node)
    return node.stack_trace, len(mark.regions), mark.in_backward, len(mark.turns), mark.port is None


@pytest.mark.parametrize("seed", SEEDS)
def test_repeats_record_what_torch_records(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    differences: list[str] = []
    trace_both(monkeypatch, differences)
    run(seed)
    assert not differences
