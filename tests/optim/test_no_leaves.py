"""Stages around others that choose none of the leaves, some, or all: state keeps its shapes, and steps one program."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fzero
from fzero import VirtualMesh, optim, tree

MESH = VirtualMesh(fsdp=2)
PARAMS = {"w": torch.arange(1.0, 17.0).view(4, 4) / 16, "b": torch.ones(4) / 2}
MASKS: dict[str, Callable[[str, Any], bool]] = {
    "none": lambda path, leaf: False,
    "some": lambda path, leaf: leaf.ndim > 1,
    "all": lambda path, leaf: True,
}


def counting() -> optim.GradientTransformation:
    """A stage of a user, whose state is of plain tensors."""
    zeros = {"steps": torch.zeros((), dtype=torch.int64), "last": torch.zeros(3)}

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        return updates, {"steps": state["steps"] + 1, "last": state["last"] + state["steps"]}

    return optim.GradientTransformation(lambda params: zeros, update)


INNER: dict[str, optim.GradientTransformation] = {
    "adam": optim.adam(0.1),
    "a schedule": optim.sgd(optim.linear_schedule(0.1, 0.0, 9), momentum=0.9),
    "a rate by hand": optim.inject_hyperparams(optim.adamw)(torch.tensor(0.1), b1=optim.constant_schedule(0.9)),
    "nadam": optim.nadam(0.1),
    "amsgrad": optim.amsgrad(0.1),
    "adafactor": optim.adafactor(0.1),
    "adamw8bit": optim.adamw8bit(0.1),
    "ema": optim.ema(0.9),
    "schedule_free": optim.schedule_free(optim.sgd(0.1), 0.1),
    "clip_by_global_norm": optim.clip_by_global_norm(0.1),
    "clip_by_block_rms": optim.clip_by_block_rms(0.1),
    "apply_if_finite": optim.apply_if_finite(optim.lion(0.1), 2),
    "a user's": counting(),
}
Mask = Callable[[str, Any], bool]
AROUND: dict[str, Callable[[optim.GradientTransformation, Mask], optim.GradientTransformation]] = {
    "masked": optim.masked,
    "multi_transform": lambda x, mask: optim.multi_transform({True: x, False: optim.set_to_zero()}, mask),
    "chain": lambda x, mask: optim.chain(optim.masked(x, mask), optim.scale(0.5)),
    "apply_if_finite": lambda x, mask: optim.apply_if_finite(optim.masked(x, mask), 2),
    "inject_hyperparams": lambda x, mask: optim.inject_hyperparams(
        lambda rate: optim.chain(optim.masked(x, mask), optim.scale_by_learning_rate(rate))
    )(optim.constant_schedule(0.1)),
    "schedule_free": lambda x, mask: optim.schedule_free(optim.masked(x, mask), 0.1),
    "cast_state": lambda x, mask: optim.cast_state(optim.masked(x, mask), torch.bfloat16),
    "masked twice": lambda x, mask: optim.masked(optim.masked(x, mask), MASKS["some"]),
}
"""Stages of other stages: an optimizer, and which leaves it gets -> the optimizer around it."""


def train(optimizers: dict[str, optim.GradientTransformation], params: Any, states: Any) -> tuple[Any, Any]:
    """One update by each optimizer, of the parameters themselves."""
    pairs = {name: optimizer.update(params, states[name], params) for name, optimizer in optimizers.items()}
    return {name: pair[0] for name, pair in pairs.items()}, {name: pair[1] for name, pair in pairs.items()}


def describe(states: Any) -> dict[str, Any]:
    """Path -> all of a leaf but its elements."""
    return dict(zip(tree.paths(states), (leaf.form for leaf in tree.leaves(states))))


@pytest.mark.parametrize("which", ["none", "all"])
def test_state_keeps_its_shapes_and_steps_their_program(which: str) -> None:
    """All in one step: each optimizer within `masked`, and one optimizer within each stage."""
    optimizers = {name: optim.masked(inner, MASKS[which]) for name, inner in INNER.items()}
    optimizers |= {name: around(INNER["adam"], MASKS[which]) for name, around in AROUND.items()}
    params = fzero.partition(PARAMS, MESH)
    states = {name: optimizer.init(params) for name, optimizer in optimizers.items()}
    expected = {name: optimizer.init(PARAMS) for name, optimizer in optimizers.items()}
    assert all(isinstance(leaf, fzero.Sharded) for leaf in tree.leaves(states))
    first = describe(states)
    step = fzero.simulate(lambda params, states: train(optimizers, params, states), MESH, stage=2)
    for _ in range(2):
        updates, states = step(params, states)
        wanted, expected = train(optimizers, PARAMS, expected)
        assert describe(states) == first
    assert len(step._pipeline._cache) == 1, "the second step is not traced again"
    got, known = fzero.unpartition((updates, states)), (wanted, expected)
    for path, a, b in zip(tree.paths(known), tree.leaves(got), tree.leaves(known), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, msg=path)


def test_state_that_was_made_elsewhere_has_numbers_on_the_device() -> None:
    params = fzero.partition(PARAMS, MESH)
    for around in AROUND.values():
        optimizer = around(optim.adam(0.1), MASKS["none"])
        there, here = optimizer.init(params, to=fzero.host()), optimizer.init(params)
        numbers = [path for path, leaf in zip(tree.paths(here), tree.leaves(here)) if not leaf.ndim]
        assert numbers and all(describe(there)[path] == describe(here)[path] for path in numbers)


def test_a_users_plain_state_is_not_the_steps(tmp_path: Path) -> None:
    """A step writes over the state that it was given: what a user's `init` returned stays."""
    optimizer, params = counting(), fzero.partition(PARAMS, MESH, to=fzero.disk(tmp_path))
    step = fzero.simulate(lambda params, state: optimizer.update(params, state)[1], MESH)
    state = step(params, step(params, optimizer.init(params)))
    assert [leaf.full_tensor().tolist() for leaf in tree.leaves(state)] == [[1.0] * 3, 2]
    assert [leaf.full_tensor().tolist() for leaf in tree.leaves(optimizer.init(params))] == [[0.0] * 3, 0]


def test_plain_parameters_have_plain_state() -> None:
    state = optim.masked(optim.adam(0.1), MASKS["none"]).init(PARAMS)
    assert [type(leaf) for leaf in tree.leaves(state)] == [Tensor]
