"""General programs with loops, and of steps with other options: one trace for all lengths, as in `test_general.py`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from processes import run
from test_general import MESH, SGD, VOCABULARY, WIDTH, Block, Model, Shape, Traced, full, tokens
from torch import Tensor, nn
from torch.nn import functional as F

import fzero

SHAPES: tuple[Shape, ...] = ((8, 7), (8, 9), (8, 31), (8, 5))
Gradient = Callable[[Any, Tensor], Any]


def sums(apply: Any, params: Any, ids: Tensor) -> Any:
    losses = F.cross_entropy(apply(params, ids).flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
    return losses, ids[:, 1:].numel()


def mean(apply: Any, params: Any, ids: Tensor) -> Tensor:
    losses, count = sums(apply, params, ids)
    return losses / count


def make_accumulating() -> tuple[Any, Gradient]:
    params, apply = fzero.lower(Model())
    return params, fzero.accumulate(lambda params, ids: sums(apply, params, ids), 2)


def make_checkpointed() -> tuple[Any, Gradient]:
    params, apply = fzero.lower(Model())
    return params, fzero.value_and_grad(fzero.remat(lambda params, ids: mean(apply, params, ids)))


def make_scanned() -> tuple[Any, Gradient]:
    (embed, apply_embed), (head, apply_head) = map(
        fzero.lower, (nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY))
    )
    layers, (apply_block, *_) = zip(*(fzero.lower(Block(None)) for _ in range(3)))

    def loss_of(params: Any, ids: Tensor) -> Tensor:
        x = apply_embed(params["embed"], ids)
        x, _ = fzero.scan(lambda x, _, layer: (apply_block(layer, x), None), x, layers=params["layers"])
        logits = apply_head(params["head"], x[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

    return {"embed": embed, "layers": list(layers), "head": head}, fzero.value_and_grad(loss_of)


MAKERS = {"accumulate": make_accumulating, "remat": make_checkpointed, "scan": make_scanned}


ON_RANKS = ("scan",)
"""What real ranks run: general programs run on them as on virtual ones, which run all."""


def make_step(name: str) -> tuple[Any, Traced]:
    torch.manual_seed(0)
    params, gradient = MAKERS[name]()

    def step(params: Any, state: Any, ids: Tensor) -> Any:
        loss, grads = gradient(params, ids)
        updates, state = SGD.update(grads, state, params)
        return fzero.optim.apply_updates(params, updates), state, loss

    return params, Traced(step)


@functools.cache
def train_alone(name: str) -> tuple[list[list[Tensor]], list[float]]:
    """What the step gives after each shape, in full, where each is traced by itself; and the losses."""
    params, fn = make_step(name)
    params = fzero.partition(params, MESH)
    state, results, losses = SGD.init(params), list[list[Tensor]](), list[float]()
    for shape in SHAPES:
        params, state, loss = fzero.simulate(fn.fn, MESH, donate=False)(params, state, tokens(shape))
        results.append(full((params, state, loss)))
        losses.append(loss.item())
    return results, losses


@pytest.mark.parametrize("name", MAKERS)
def test_a_loop_is_traced_twice_for_all_lengths(name: str) -> None:
    params, fn = make_step(name)
    params = fzero.partition(params, MESH)
    state, step = SGD.init(params), fzero.simulate(fn, MESH, donate=False)
    for shape, expected in zip(SHAPES, train_alone(name)[0]):
        params, state, loss = step(params, state, tokens(shape))
        assert all(map(torch.equal, full((params, state, loss)), expected)), shape
    assert fn.count == 2


def train(mesh: Any) -> dict[str, tuple[list[float], int]]:
    """Losses of each step on the rows of this rank, and how often it was traced."""
    found = {}
    for name in ON_RANKS:
        params, fn = make_step(name)
        params = fzero.partition(params, mesh)
        step, state, losses = fzero.shard(fn, mesh), SGD.init(params), list[float]()
        for shape in SHAPES:
            params, state, loss = step(params, state, tokens(shape).chunk(2)[mesh.get_rank()])
            losses.append(loss.item())
        found[name] = losses, fn.count
    return found


def test_ranks_run_loops_of_all_lengths() -> None:
    first, second = run(2, train)
    assert first == second
    for name, (losses, count) in first.items():
        assert losses == pytest.approx(train_alone(name)[1], rel=1e-6), name
        assert count == 2, name
