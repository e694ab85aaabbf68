"""Optimizers that look at a whole leaf, and one step of all of them on leaves that are split over "tp", for tests on
virtual and on real ranks."""

from __future__ import annotations

from typing import Any

import torch
from axes import F64
from torch import Tensor

import fzero
from fzero import optim, tree

DRAW = torch.Generator().manual_seed(0)
SHAPES = {"up": (1024, 4), "down": (4, 1024), "gate_up": (64, 64), "experts": (4, 16, 64), "heads": (2, 64, 64)}
WHOLE = {name: torch.randn(shape, dtype=F64, generator=DRAW) / 8 for name, shape in SHAPES.items()}
WHOLE |= {"bias": torch.randn(12, dtype=F64, generator=DRAW), "norm": torch.ones(4, dtype=F64)}
SPLIT: dict[str, Any] = dict.fromkeys(("up", "experts", "bias"), ("tp", 0))
SPLIT |= {"down": ("tp", -1), "gate_up": ("tp", 0, 2), "heads": ("tp", 1)}
EXAMPLES = torch.randn(12, 4, dtype=F64, generator=DRAW)
ROWS = {"gate_up": (32, 32), "heads": (20, 44)}
"""The rows of the matrices in a leaf: equal to its parts, and others, which runs of its rows cross."""


def chain(optimizer: optim.GradientTransformation) -> optim.GradientTransformation:
    return optim.chain(optim.clip_by_global_norm(0.5), optimizer)


OPTIMIZERS = {
    "muon": chain(optim.muon(0.1, where=lambda path, leaf: leaf.ndim > 1, split=lambda path, leaf: ROWS.get(path))),
    "adafactor": chain(optim.adafactor(0.1)),
    "adamw8bit": chain(optim.adamw8bit(0.1)),
}


def init(params: Any) -> Any:
    return {name: each.init(params) for name, each in OPTIMIZERS.items()}


def step(params: Any, states: Any, x: Tensor) -> Any:
    """`(new parameters, states, rounded parameters)`: the mean of what the optimizers make of them."""

    def loss(params: Any) -> Tensor:
        hidden = (fzero.psum((x @ params["up"].T).relu() @ params["down"].T, "tp") * params["norm"]).square().mean()
        return hidden + sum(params[name].sin().square().sum() for name in ("gate_up", "experts", "heads", "bias"))

    grads, news, found = fzero.grad(loss)(params), {}, []
    for name, each in OPTIMIZERS.items():
        updates, news[name] = each.update(grads, states[name], params)
        found.append(optim.apply_updates(params, updates))
    narrow = tree.map(lambda w: w.bfloat16(), params)
    rounded = optim.apply_updates(narrow, tree.map(lambda g: g / 64, grads), bf16_stochastic_round=3)
    return tree.map(lambda *each: sum(each) / len(each), *found), news, rounded
