"""Cross entropies over a streamed head: neither the head nor the logits are ever whole."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from programs import measure_peak
from torch import Tensor
from torch.nn import functional

import fzero
from fzero import tree
from fzero.base.mesh import VirtualMesh
from fzero.program.program import Program
from fzero.program.records import find_bodies, name_of

WIDTH, CLASSES, BATCH, LENGTH = 16, 60, 8, 3
CHUNK = 1024  # bytes: 16 of 60 rows of the head, where the logits of a rank have 2880
IGNORED = 7


def params() -> Any:
    torch.manual_seed(0)
    return {"w": torch.randn(WIDTH, WIDTH) / 4, "head": torch.randn(CLASSES, WIDTH), "bias": torch.randn(2, CLASSES)}


def batch() -> Any:
    torch.manual_seed(1)
    return {"x": torch.randn(BATCH, LENGTH, WIDTH), "y": torch.randint(CLASSES, (BATCH, LENGTH))}


def is_mean(p: Any, b: Any, **how: Any) -> Tensor:
    logits = (b["x"] @ p["w"]).tanh() @ p["head"].T
    return functional.cross_entropy(logits.flatten(0, 1), b["y"].flatten(), **how)


def is_sum(p: Any, b: Any) -> Tensor:
    return is_mean(p, b, reduction="sum") / 10


def ignores_tokens(p: Any, b: Any) -> Tensor:
    return is_mean(p, {**b, "y": b["y"].masked_fill(b["y"] % 3 == 0, IGNORED)}, ignore_index=IGNORED)


def has_a_bias(p: Any, b: Any) -> Tensor:
    logits = functional.linear((b["x"] @ p["w"]).tanh().flatten(0, 1), p["head"], p["bias"].sum(0))
    return functional.cross_entropy(logits, b["y"].flatten()) * 3


def scales_logits(p: Any, b: Any) -> Tensor:
    logits = (b["x"] @ p["w"]).tanh() @ p["head"].T
    return functional.nll_loss((logits.flatten(0, 1) * 0.5).log_softmax(-1), b["y"].flatten())


def smooths_labels(p: Any, b: Any) -> Tensor:
    return is_mean(
        p, {**b, "y": b["y"].masked_fill(b["y"] % 3 == 0, IGNORED)}, ignore_index=IGNORED, label_smoothing=0.1
    )


def weighs_classes(p: Any, b: Any) -> Tensor:
    labels = b["y"].masked_fill(b["y"] % 3 == 0, IGNORED)
    return is_mean(p, {**b, "y": labels}, ignore_index=IGNORED, weight=torch.linspace(0.5, 2, CLASSES))


def recomputes(p: Any, b: Any) -> Tensor:
    return fzero.remat(is_mean)(p, b)


def smooths_and_weighs(p: Any, b: Any) -> Tensor:
    return is_mean(p, b, label_smoothing=0.1, weight=torch.linspace(0.5, 2, CLASSES))


def is_tiled(p: Any, b: Any, **how: Any) -> Tensor:
    hidden = (b["x"] @ p["w"]).tanh()
    return fzero.tiled_cross_entropy(hidden, p["head"], b["y"], **{"chunks": 3, **how})


def is_tiled_with_all_terms(p: Any, b: Any) -> Tensor:
    labels = b["y"].masked_fill(b["y"] % 3 == 0, IGNORED)
    terms: Any = {"ignore_index": IGNORED, "z_loss": 0.1, "label_smoothing": 0.2, "reduction": "sum"}
    return is_tiled(p, {**b, "y": labels}, bias=p["bias"].sum(0), **terms) / 7


def is_tiled_and_tied(p: Any, b: Any) -> tuple[Tensor, Tensor]:
    """The sum and the number of tokens. The head is the embedding too."""
    hidden = (b["x"] + p["head"][b["y"]]) @ p["w"]
    total = fzero.tiled_cross_entropy(hidden, p["head"], b["y"], chunks=4, reduction="sum")
    return total, torch.tensor(float(b["y"].numel()))


def uses_logits_twice(p: Any, b: Any) -> Tensor:
    logits = ((b["x"] @ p["w"]).tanh() @ p["head"].T).flatten(0, 1)
    return functional.cross_entropy(logits, b["y"].flatten()) + logits.square().mean()


def run(
    loss: Any, given: Any, b: Any, chunk: int | None, world: int = 2, derive: Any = fzero.value_and_grad
) -> tuple[Any, Program]:
    """The loss and its gradients, and the program."""
    mesh = VirtualMesh(fsdp=world)
    step = fzero.simulate(lambda p, b: derive(loss)(p, b), mesh, chunk=chunk)
    given = fzero.partition(given, mesh, granularity=lambda path, shape: shape[-1])
    return fzero.unpartition(step(given, b)), step.trace(given, b)


def list_sizes(program: Program) -> list[int]:
    """The elements of each floating value, those of bodies too."""
    values = [node.meta.get("val") for node in program.graph.nodes]
    own = [x.numel() for x in values if isinstance(x, Tensor) and x.is_floating_point()]
    return own + [size for body in find_bodies(program.graph) for size in list_sizes(body)]


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(
    "loss", [is_mean, is_sum, ignores_tokens, has_a_bias, scales_logits, smooths_labels, weighs_classes, recomputes]
)
def test_losses_and_gradients_are_those_of_all_logits(loss: Any, world: int) -> None:
    ours, program = run(loss, params(), batch(), CHUNK, world)
    theirs, _ = run(loss, params(), batch(), None, world)
    torch.testing.assert_close(tree.leaves(ours), tree.leaves(theirs), rtol=1e-5, atol=1e-6)
    assert not program.remarks and max(list_sizes(program)) < BATCH * LENGTH // world * CLASSES


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("loss", [is_tiled, is_tiled_with_all_terms])
def test_tiled_losses_cut_the_head_and_not_the_tokens(loss: Any, world: int) -> None:
    ours, program = run(loss, params(), batch(), CHUNK, world)
    theirs, _ = run(loss, params(), batch(), None, world)
    torch.testing.assert_close(tree.leaves(ours), tree.leaves(theirs), rtol=1e-5, atol=1e-6)
    assert not program.remarks and max(list_sizes(program)) <= CLASSES * WIDTH // world  # a rank's slice of the head
    moved = [entry.op for entry in program.comm() if "head" in (entry.bucket or "")]
    gathers, turns = 3 if loss is is_tiled_with_all_terms else 2, 5 if world == 2 else 4  # a third one for a bias
    assert (moved.count("all_gather"), moved.count("reduce_scatter")) == (gathers * turns, turns)


def test_a_last_part_of_fewer_tokens_takes_the_head_by_rows_too() -> None:
    loss = partial(is_tiled, chunks=5)  # of 24 tokens
    (ours, program), (theirs, _) = (run(loss, params(), batch(), chunk, world=1) for chunk in (CHUNK, None))
    torch.testing.assert_close(tree.leaves(ours), tree.leaves(theirs), rtol=1e-5, atol=1e-6)
    assert not program.remarks and max(list_sizes(program)) <= CLASSES * WIDTH


def test_microbatches_of_a_tiled_loss_and_a_tied_head() -> None:
    given = {name: x for name, x in params().items() if name != "bias"}
    (ours, program), (theirs, _) = (
        run(is_tiled_and_tied, given, batch(), chunk, derive=lambda loss: fzero.accumulate(loss, 2))
        for chunk in (CHUNK, None)
    )
    torch.testing.assert_close(tree.leaves(ours), tree.leaves(theirs), rtol=1e-5, atol=1e-6)
    assert not program.remarks and max(list_sizes(program)) <= CLASSES * WIDTH // 2


def test_more_parts_of_tokens_are_more_parts_of_the_head() -> None:
    """As few logits are alive at a time. The measured peak is the predicted one, but for the chunk of the next turn."""
    mesh, given = VirtualMesh(fsdp=2), fzero.partition(params(), VirtualMesh(fsdp=2), granularity=lambda path, x: x[-1])
    for chunks in (2, 10):
        loss = partial(is_tiled, chunks=chunks)
        step = fzero.simulate(lambda p, b, loss=loss: fzero.value_and_grad(loss)(p, b), mesh, chunk=2 * CHUNK)
        program, most = measure_peak(step, given, batch())
        (body, *_) = find_bodies(program.graph)
        (logits,) = (
            node.meta["val"] for node in body.graph.nodes if node.op == "call_function" and name_of(node) == "mm"
        )
        assert logits.numel() <= math.ceil(BATCH * LENGTH / 2 / chunks) * CLASSES
        assert most <= program.memory().peak <= most + 2 * CHUNK


def has_softmax(program: Program) -> bool:
    """Whether some node takes the softmax of all logits."""
    return not {"_log_softmax", "log_softmax_"}.isdisjoint(map(name_of, program.graph.nodes))


@pytest.mark.parametrize("loss", [smooths_and_weighs, uses_logits_twice])
def test_other_losses_take_logits_whole(loss: Any) -> None:
    ours, program = run(loss, params(), batch(), CHUNK)
    theirs, _ = run(loss, params(), batch(), None)
    torch.testing.assert_close(tree.leaves(ours), tree.leaves(theirs), rtol=1e-5, atol=1e-6)
    assert not program.remarks and has_softmax(program)


def test_logits_smaller_than_a_chunk_stay() -> None:
    few = {name: x[:2] for name, x in batch().items()}
    _, program = run(is_mean, params(), few, CHUNK)
    assert has_softmax(program)


def test_narrow_logits_are_added_up_wide() -> None:
    """In bfloat16 loss and gradients are as far from those in float32 as with all logits, but for rounding."""
    narrow = tree.map(lambda x: x.bfloat16(), params())
    b = {**batch(), "x": batch()["x"].bfloat16()}
    exact, _ = run(is_mean, params(), batch(), None)
    (ours, program), (theirs, _) = run(is_mean, narrow, b, CHUNK // 2), run(is_mean, narrow, b, None)
    assert not program.remarks and not has_softmax(program)
    for mine, whole, wanted in zip(*map(tree.leaves, (ours, theirs, exact))):
        off, before = ((x.float() - wanted).norm() for x in (mine, whole))
        assert off <= 1.5 * before + 2**-9 * wanted.norm()


def test_all_tokens_ignored_are_nan_as_in_torch() -> None:
    b = {**batch(), "y": torch.full((BATCH, LENGTH), -100)}
    assert run(is_mean, params(), b, CHUNK)[0][0].isnan() and run(is_mean, params(), b, None)[0][0].isnan()


@pytest.mark.parametrize("label", [-1, CLASSES])
def test_a_label_outside_of_the_classes_is_refused_as_before(label: int) -> None:
    b = batch()
    b["y"][0, 0] = label
    for chunk in (None, CHUNK):
        with pytest.raises(IndexError, match=r"out of (bounds|range)"):
            run(is_mean, params(), b, chunk)


def test_the_head_is_gathered_once_forward_and_once_backward() -> None:
    _, program = run(is_mean, params(), batch(), CHUNK)
    moved = [entry.op for entry in program.comm() if "head" in (entry.bucket or "")]
    assert (moved.count("all_gather"), moved.count("reduce_scatter")) == (2 * 5, 5)
