"""A law of `fzero.tiled_cross_entropy`: for all shapes, chunks and terms it is the cross entropy of all logits."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

import fzero
from fzero.testing.steps import WIDE
from property_tests.laws import slow


class Problem(NamedTuple):
    """Sizes, and the terms of the loss. `ignored` tokens of each rank do not count."""

    rows: int
    width: int
    vocabulary: int
    chunks: int
    ignored: int
    has_bias: bool
    terms: dict[str, Any]


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    rows = draw(st.integers(1, 13))
    terms = {
        "z_loss": draw(st.sampled_from([0.0, 0.1])),
        "label_smoothing": draw(st.sampled_from([0.0, 0.3, 1.0])),
        "reduction": draw(st.sampled_from(["mean", "sum"])),
        "ignore_index": draw(st.sampled_from([-100, 0])),
    }
    sizes = draw(st.integers(1, 5)), draw(st.integers(1, 9)), draw(st.integers(1, rows)), draw(st.integers(0, rows))
    return Problem(rows, *sizes, draw(st.booleans()), terms)


def compute(problem: Problem, chunks: int, p: Any, x: Tensor, labels: Tensor) -> Tensor:
    """The loss of hidden states that depend on a parameter; with 0 chunks from all logits."""
    hidden, terms = (x * p["scale"]).tanh(), dict(problem.terms)
    if chunks:
        return fzero.tiled_cross_entropy(hidden, p["head"], labels, chunks, bias=p.get("bias"), **terms)
    z_loss, logits = terms.pop("z_loss"), functional.linear(hidden, p["head"], p.get("bias"))
    counts = labels != terms["ignore_index"]
    penalty = torch.where(counts, logits.logsumexp(-1).square(), 0).sum()
    penalty = penalty if terms["reduction"] == "sum" else penalty / counts.sum().clamp(min=1)
    return functional.cross_entropy(logits, labels, **terms) + z_loss * penalty


@given(problems(), st.sampled_from([1, 2, 3]), st.sampled_from([1, 3]))
@slow
def test_parts_are_all_logits(problem: Problem, stage: int, world: int) -> None:
    draw, mesh = torch.Generator().manual_seed(0), fzero.VirtualMesh(fsdp=world)
    shapes: dict[str, tuple[int, ...]] = {"scale": (problem.width,), "head": (problem.vocabulary, problem.width)}
    if problem.has_bias:
        shapes["bias"] = (problem.vocabulary,)
    p = {name: torch.randn(shape, dtype=WIDE, generator=draw) for name, shape in shapes.items()}
    x = torch.randn(world * problem.rows, problem.width, dtype=WIDE, generator=draw)
    labels = torch.randint(problem.vocabulary, (world, problem.rows), generator=draw)
    labels[:, : problem.ignored] = problem.terms["ignore_index"]

    def run(chunks: int) -> Any:
        step = fzero.value_and_grad(lambda p, x, y: compute(problem, chunks, p, x, y))
        args = p, x, labels.flatten()
        return step(*args), fzero.unpartition(
            fzero.simulate(step, mesh, stage=stage)(fzero.partition(p, mesh), *args[1:])
        )

    torch.testing.assert_close(run(problem.chunks), run(0), rtol=1e-11, atol=1e-12, equal_nan=True)
