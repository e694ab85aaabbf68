"""`fzero.tiled_cross_entropy` against torch's cross entropy of all logits, on plain tensors and in steps."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from programs import calls, measure_peak
from torch import Tensor
from torch.nn import functional

import fzero
from fzero import ops, tree
from fzero.base.dtypes import accumulator

ROWS, WIDTH, VOCABULARY, IGNORED = 11, 4, 7, -100
TERMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "smooth": {"label_smoothing": 0.2},
    "z": {"z_loss": 0.3},
    "all": {"label_smoothing": 0.1, "z_loss": 0.01, "reduction": "sum", "ignore_index": 2},
}


def params(dtype: torch.dtype = torch.float64, vocabulary: int = VOCABULARY) -> Any:
    draw = torch.Generator().manual_seed(0)
    shapes = {"w": (vocabulary, WIDTH), "b": (vocabulary,)}
    return {name: torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype) for name, shape in shapes.items()}


def batch(rows: int = ROWS, dtype: torch.dtype = torch.float64, vocabulary: int = VOCABULARY) -> tuple[Tensor, Tensor]:
    """Hidden states and labels, one in four ignored."""
    draw = torch.Generator().manual_seed(1)
    labels = torch.randint(vocabulary, (rows,), generator=draw)
    labels[::4] = IGNORED
    return torch.randn(rows, WIDTH, generator=draw, dtype=torch.float64).to(dtype), labels


def plain(p: Any, hidden: Tensor, labels: Tensor, z_loss: float = 0.0, **terms: Any) -> Tensor:
    """torch's, and the z-loss by hand."""
    logits = functional.linear(hidden, p["w"], p.get("b"))
    logits = logits.to(accumulator(logits.dtype))
    counts = labels != terms.get("ignore_index", IGNORED)
    penalty = (logits.logsumexp(-1).square() * counts).sum()
    penalty = penalty if terms.get("reduction") == "sum" else penalty / counts.sum()
    return functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), **terms) + z_loss * penalty


def tiled(p: Any, hidden: Tensor, labels: Tensor, chunks: int = 3, **terms: Any) -> Tensor:
    return fzero.tiled_cross_entropy(hidden, p["w"], labels, chunks, bias=p.get("b"), **terms)


def by_all(loss: Any, labels: Tensor, **given: Any) -> Any:
    """The value and its gradient by parameters and hidden states."""
    return fzero.value_and_grad(lambda both: loss(both[0], both[1], labels, **given))


def assert_close(got: Any, expected: Any) -> None:
    """Equal but for roundings: of a sum over tokens, and of a gradient to its dtype."""
    for mine, theirs in zip(tree.leaves(got), tree.leaves(expected), strict=True):
        assert mine.dtype == theirs.dtype
        most = max(theirs.abs().max().item(), 1e-3)
        torch.testing.assert_close(mine, theirs, rtol=0, atol=8 * torch.finfo(theirs.dtype).eps * most)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("chunks", [1, 3, 7])
@pytest.mark.parametrize("terms", TERMS)
def test_losses_and_gradients_are_those_of_all_logits(terms: str, chunks: int, dtype: torch.dtype) -> None:
    given = {**TERMS[terms]}
    p, (hidden, labels) = params(dtype), batch(dtype=dtype)
    labels = labels.where(labels != IGNORED, given.get("ignore_index", IGNORED))
    expected = by_all(plain, labels, **given)((p, hidden))
    got = by_all(tiled, labels, chunks=chunks, **given)((p, hidden))
    assert got[0].dtype == accumulator(dtype)
    assert_close(got, expected)


@pytest.mark.parametrize(
    "stage, world, chunks, dtype",
    [
        (1, 1, 3, torch.float64),
        (1, 3, 7, torch.bfloat16),
        (2, 1, 1, torch.float32),
        (2, 3, 3, torch.float32),
        (3, 1, 7, torch.bfloat16),
        (3, 3, 3, torch.bfloat16),
        (3, 3, 7, torch.float64),
    ],
)
def test_a_step_is_the_step_of_all_logits(stage: int, world: int, chunks: int, dtype: torch.dtype) -> None:
    """The head is the embedding too. It is gathered and scattered as by the step of all logits."""
    mesh, terms = fzero.VirtualMesh(fsdp=world), TERMS["smooth"] | TERMS["z"]
    _, labels = batch(ROWS * world)
    inputs = labels.roll(1).clamp(min=0)

    def training(loss: Any, **more: Any) -> Any:
        def of_embedding(p: Any, inputs: Tensor, labels: Tensor) -> Tensor:
            return loss(p, functional.embedding(inputs, p["w"]).sin(), labels, **terms, **more)

        return fzero.simulate(fzero.value_and_grad(of_embedding), mesh, stage=stage)

    p, args = fzero.partition(params(dtype), mesh), (inputs, labels)
    all_logits, parts = training(plain), training(tiled, chunks=chunks)
    assert_close(fzero.unpartition(parts(p, *args)), fzero.unpartition(all_logits(p, *args)))
    program = parts.trace(p, *args)
    assert sorted(each[:3] for each in program.comm()) == sorted(each[:3] for each in all_logits.trace(p, *args).comm())
    assert len(calls(program, ops.loop)) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_peak_falls_with_the_rows_of_a_part(dtype: torch.dtype) -> None:
    """All logits are 512 x 1024 numbers, and the step of all logits has three times as many bytes alive at its peak.
    Beside those of a part there are the head, its gradient and the one of a part."""
    mesh, vocabulary = fzero.VirtualMesh(fsdp=2), 1024
    p = fzero.partition({"w": params(dtype, vocabulary)["w"]}, mesh)
    args = batch(1024, dtype, vocabulary)
    logits, head = 512 * vocabulary * 4, vocabulary * WIDTH * 4
    peaks = {}
    for chunks in (0, 1, 4, 64):
        loss = (lambda p, *args, chunks=chunks: tiled(p, *args, chunks)) if chunks else plain
        program, peaks[chunks] = measure_peak(fzero.simulate(fzero.value_and_grad(loss), mesh), p, *args)
        assert program.memory().peak == peaks[chunks]
    assert peaks[0] > 3 * logits - 1
    for chunks in (1, 4, 64):
        part = logits // chunks if dtype == torch.float32 else logits // chunks * 3 // 2  # and one of two bytes
        assert peaks[chunks] < part + 5 * head + 40 * 1024


def test_a_microbatch_has_a_loop_in_its_turn() -> None:
    mesh = fzero.VirtualMesh(fsdp=2)
    p, (hidden, labels) = fzero.partition(params(), mesh), batch(24)

    def sums(loss: Any) -> Any:
        def of_part(p: Any, part: Any) -> Any:
            return loss(p, part["h"], part["y"], reduction="sum"), (part["y"] != IGNORED).sum()

        step = fzero.simulate(fzero.accumulate(of_part, 2), mesh)
        return fzero.unpartition(step(p, {"h": hidden, "y": labels}))

    assert_close(sums(tiled), sums(plain))


def test_without_a_derivative_no_gradient_is_computed() -> None:
    mesh = fzero.VirtualMesh(fsdp=2)
    p, args = fzero.partition(params(), mesh), batch(24)
    step = fzero.simulate(lambda p, *args: fzero.pmean(tiled(p, *args), "fsdp"), mesh)
    (loop,) = calls(step.trace(p, *args), ops.loop)
    assert [node.target for node in loop.args[0].graph.nodes].count(torch.ops.aten.addmm.default) == 1
    assert torch.ops.aten.mm.default not in [node.target for node in loop.args[0].graph.nodes]
    torch.testing.assert_close(tiled(fzero.unpartition(p), *args), plain(fzero.unpartition(p), *args))


def test_a_frozen_head_has_no_gradient() -> None:
    p, (hidden, labels) = params(), batch()
    got = fzero.grad(lambda h: tiled(p, h, labels))(hidden)
    assert_close(got, fzero.grad(lambda h: plain(p, h, labels))(hidden))


def test_transforms_of_torch_func_compose() -> None:
    p, (hidden, labels) = params(), batch()
    for terms in (TERMS["smooth"] | TERMS["z"], TERMS["plain"]):
        mine, theirs = (lambda h, loss=loss, terms=terms: loss(p, h, labels, **terms) for loss in (tiled, plain))
        for transform in (torch.func.grad, torch.func.jacrev, torch.func.jacfwd, torch.func.hessian):
            torch.testing.assert_close(transform(mine)(hidden), transform(theirs)(hidden))
        many = torch.stack([hidden, hidden.cos()])
        each = torch.func.vmap(torch.func.grad_and_value(mine))(many)
        torch.testing.assert_close(each, torch.func.vmap(torch.func.grad_and_value(theirs))(many))


def test_autograd_differentiates_once() -> None:
    p, (hidden, labels) = params(), batch()
    leaf = hidden.requires_grad_()
    (gradient,) = torch.autograd.grad(tiled(p, leaf, labels) * 2, leaf, create_graph=True)
    torch.testing.assert_close(gradient, torch.autograd.grad(plain(p, leaf, labels) * 2, leaf)[0])
    with pytest.raises(fzero.FzeroError, match="differentiated again"):
        torch.autograd.grad(gradient.sum(), leaf)


@pytest.mark.parametrize("transform", [fzero.value_and_grad, fzero.remat])
def test_all_ignored_is_nan_with_a_gradient_of_zero(transform: Any) -> None:
    p, (hidden, labels) = params(), batch()
    mesh = fzero.VirtualMesh(fsdp=2)

    def step(p: Any, hidden: Tensor) -> Any:
        loss = transform(lambda p: tiled(p, hidden, torch.full_like(labels, IGNORED), label_smoothing=0.1, z_loss=0.1))
        return fzero.value_and_grad(loss)(p) if transform is fzero.remat else loss(p)

    sharded = fzero.simulate(step, mesh)(fzero.partition(p, mesh), torch.cat([hidden, hidden]))
    for value, gradient in (step(p, hidden), fzero.unpartition(sharded)):
        assert math.isnan(value)
        assert not any(leaf.any() for leaf in tree.leaves(gradient))


def test_extreme_logits() -> None:
    """Large ones, whose exponentials are infinite, and classes that are ruled out."""
    p, (hidden, labels) = params(torch.float32), batch(dtype=torch.float32)
    for bias in (p["b"] * 1e4, p["b"].index_fill(0, torch.tensor([5]), -math.inf)):
        labels = labels.where(labels != 5, 4)
        given = {"w": p["w"], "b": bias}
        assert_close(by_all(tiled, labels)((given, hidden)), by_all(plain, labels)((given, hidden)))


def test_a_sum_over_many_rows_of_float16_is_finite() -> None:
    """It would be 80,000 before the division by the number of rows."""
    hidden, labels = torch.full((4096, WIDTH), 20.0, dtype=torch.float16), torch.zeros(4096, dtype=torch.int64)
    p = {"w": torch.zeros(VOCABULARY, WIDTH, dtype=torch.float16)}
    got = fzero.grad(lambda p: tiled(p, hidden, labels, chunks=1))(p)
    torch.testing.assert_close(got["w"][0], torch.full((WIDTH,), -20 * 6 / 7, dtype=torch.float16))


def test_autocast_and_leading_dimensions() -> None:
    p, (hidden, labels) = params(torch.float32), batch(12, torch.float32)
    hidden, labels = hidden.view(3, 4, WIDTH), labels.view(3, 4)
    with torch.autocast("cpu", torch.bfloat16):
        got, expected = (by_all(loss, labels)((p, hidden)) for loss in (tiled, plain))
    torch.testing.assert_close(tree.leaves(got), tree.leaves(expected), rtol=2e-2, atol=2e-2)
    assert [x.dtype for x in tree.leaves(got)] == [torch.float32] * 4


@pytest.mark.parametrize(
    "change, message",
    [
        ({"chunks": 0}, "chunks: is 0, for 11 rows"),
        ({"chunks": 12}, "chunks: is 12, for 11 rows"),
        ({"head": torch.zeros(VOCABULARY, 5)}, r"head: is \(7, 5\), hidden is \(11, 4\)"),
        ({"hidden": torch.tensor(1.0)}, r"head: is \(7, 4\), hidden is \(\)"),
        ({"head": params(torch.bfloat16)["w"]}, "head: is torch.bfloat16 beside others"),
        ({"bias": torch.zeros(3)}, r"bias: does not fit the head, \(7, 4\)"),
        ({"labels": torch.zeros(10, dtype=torch.int64)}, r"labels: is \(10,\), hidden is \(11, 4\)"),
        ({"labels": torch.zeros(ROWS)}, "labels: is torch.float32"),
        ({"labels": torch.arange(ROWS)}, "labels: 4 of 11 lie outside of 0 to 6, the first is 7"),
        ({"labels": torch.full((ROWS,), -1)}, "labels: 11 of 11 lie outside of 0 to 6, the first is -1"),
        ({"label_smoothing": 1.5}, "label_smoothing: is 1.5"),
        ({"reduction": "none"}, "reduction: is 'none'"),
    ],
)
def test_bad_input_is_named(change: dict[str, Any], message: str) -> None:
    hidden, labels = batch()
    given = {"hidden": hidden, "head": params()["w"], "labels": labels, "chunks": 3} | change
    with pytest.raises(fzero.FzeroError, match=f"tiled_cross_entropy: {message}"):
        fzero.tiled_cross_entropy(**given)


def test_a_label_out_of_range_stops_a_step() -> None:
    mesh = fzero.VirtualMesh(fsdp=2)
    hidden, labels = batch(24)
    step = fzero.simulate(fzero.value_and_grad(lambda p, h, y: tiled(p, h, y)), mesh)
    with pytest.raises(RuntimeError, match="index 9 is out of bounds"):
        step(fzero.partition(params(), mesh), hidden, labels.index_fill(0, torch.tensor([1]), 9))
