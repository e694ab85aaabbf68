"""AdEMAMix as a pass over AdamW: updates are those of the definition, and its average is state like each leaf."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import fzero
from fzero import FzeroError, optim, passes, tree
from fzero.variants.ademamix import ademamix

MESH = fzero.VirtualMesh(replica=2, fsdp=2)
B1, B2, B3, ALPHA, RATE, DECAY, EPS = 0.9, 0.99, 0.95, 4.0, 0.02, 0.1, 1e-8
OPTIMIZER = optim.chain(optim.clip_by_global_norm(0.5), optim.adamw(RATE, b1=B1, b2=B2, eps=EPS, weight_decay=DECAY))


def loss_of(params: Any, x: Tensor) -> Tensor:
    return ((x @ params["a"]["w"]).tanh() @ params["b"]["w"]).square().mean()


def train_step(params: Any, opt_state: Any, x: Tensor) -> Any:
    updates, opt_state = OPTIMIZER.update(fzero.grad(loss_of)(params, x), opt_state, params)
    return optim.apply_updates(params, updates), opt_state


def weights() -> Any:
    draw = torch.Generator().manual_seed(0)
    return {name: {"w": torch.randn(6, 6, generator=draw) / 2} for name in "ab"}


def clip(grads: Any) -> Any:
    norm = torch.stack([x.square().sum() for x in tree.leaves(grads)]).sum().sqrt()
    return tree.map(lambda x: x * min(1.0, 0.5 / norm.item()), grads)


@pytest.mark.parametrize(("warmup", "stage"), [(0, 3), (3, 1)])
def test_updates_are_those_of_the_definition(warmup: int, stage: int) -> None:
    rewrite = partial(ademamix, b3=B3, alpha=ALPHA, warmup=warmup)
    step = fzero.simulate(
        train_step, MESH, passes=passes.insert(passes.defaults(stage=stage), rewrite, before="bucket")
    )
    params, x = fzero.partition(weights(), MESH), torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
    opt_state = OPTIMIZER.init(params)
    state = step.init_pass_state(params, opt_state, x)
    plain = weights()
    zeros = tree.map(torch.zeros_like, plain)
    m1, m2, v = zeros, zeros, zeros
    for t in range(1, 6):
        (params, opt_state), state = step(params, opt_state, x * t, pass_state=state)
        grads, done = clip(fzero.grad(loss_of)(plain, x * t)), min(1.0, t / warmup) if warmup else 1.0
        keep = math.exp(math.log(B1) * math.log(B3) / ((1 - done) * math.log(B3) + done * math.log(B1)))
        m1 = tree.map(lambda m, g: B1 * m + (1 - B1) * g, m1, grads)
        m2 = tree.map(lambda m, g, b=keep: b * m + (1 - b) * g, m2, grads)
        v = tree.map(lambda v, g: B2 * v + (1 - B2) * g * g, v, grads)
        plain = tree.map(
            lambda p, a, b, c, t=t, alpha=ALPHA * done: (
                p - RATE * ((a / (1 - B1**t) + alpha * b) / ((c / (1 - B2**t)).sqrt() + EPS) + DECAY * p)
            ),
            plain, m1, m2, v,
        )  # fmt: skip
    for got, wanted in zip(tree.leaves(fzero.unpartition(params)), tree.leaves(plain)):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-6)
    for got, wanted in zip(state.values(), tree.leaves(m2)):
        torch.testing.assert_close(fzero.unpartition(got), wanted, rtol=1e-4, atol=1e-7)


def test_the_average_of_bfloat16_gradients_is_float32() -> None:
    """In bfloat16 a b3 of 0.9999 is 1, and the average would stay 0."""
    step = fzero.simulate(train_step, MESH, passes=passes.insert(passes.defaults(stage=3), ademamix, before="bucket"))
    narrow, x = tree.map(lambda leaf: leaf.bfloat16(), weights()), torch.randn(8, 6).bfloat16()
    params = fzero.partition(narrow, MESH)
    opt_state = OPTIMIZER.init(params)
    state = step.init_pass_state(params, opt_state, x)
    _, state = step(params, opt_state, x, pass_state=state)
    for average, grad in zip(state.values(), tree.leaves(clip(fzero.grad(loss_of)(narrow, x)))):
        torch.testing.assert_close(fzero.unpartition(average), 1e-4 * grad.float(), rtol=0.1, atol=1e-6)


def test_a_step_without_adam_and_wrong_options_are_refused_by_name() -> None:
    step = fzero.simulate(
        fzero.grad(loss_of), MESH, passes=passes.insert(passes.defaults(stage=3), ademamix, before="bucket")
    )
    with pytest.raises(FzeroError, match="pass 'ademamix': finds no update of Adam; use"):
        step.trace(fzero.partition(weights(), MESH), torch.ones(4, 6))
    for option, value in {"b3": 1.0, "alpha": -1.0, "warmup": -1}.items():
        with pytest.raises(FzeroError, match=f"pass 'ademamix': has {option}={value}; give "):
            partial(ademamix, **{option: value})(None)  # type: ignore
