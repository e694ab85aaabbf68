"""Ranks that are about to run different steps: each rank raises at once, with the first difference and its ranks.

All ranks can go on afterwards.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from processes import Outcome, run_cases, values
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import fzero
from fzero import tree

WORLD, ODD = 4, "ranks 1, 3"
SOON = 20.0
"""Seconds, of which a busy machine may need some. A collective that a rank does not join waits three times as long."""


class Refusal(NamedTuple):
    """The error of a step, after how many seconds it came, and the loss of a later step that all ranks take alike."""

    kind: str
    message: str
    seconds: float
    loss_after: float


def full_params(width: int = 6) -> dict[str, Any]:
    return {"layers": [{"w": torch.full((5, width), 0.1), "b": torch.ones(width)}]}


def loss_of(params: dict[str, Any], x: Tensor) -> Tensor:
    for layer in params["layers"]:
        x = x.to(layer["w"].dtype) @ layer["w"] + layer["b"]
    return x.square().mean()


def descend(params: Any, x: Tensor) -> Any:
    loss, grads = fzero.value_and_grad(loss_of)(params, x)
    return tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def steps_on(mesh: DeviceMesh, params: Any, x: Tensor, step: Callable[..., Any] = descend) -> Refusal:
    """Run a step on this rank's arguments, then a step on arguments that are equal on all ranks."""
    sharded = fzero.partition(params, mesh)
    start = time.monotonic()
    kind, message = "nothing", "was raised"
    try:
        fzero.shard(step, mesh)(sharded, x)
    except Exception as error:
        kind, message = type(error).__name__, str(error)
    seconds = time.monotonic() - start
    _, loss = going_on(mesh)(fzero.partition(full_params(), mesh), torch.ones(2, 5))
    return Refusal(kind, message, seconds, float(loss))


@functools.cache
def going_on(mesh: DeviceMesh) -> Callable[..., Any]:
    """The step at the end of each case, traced once for all cases."""
    return fzero.shard(descend, mesh)


def is_odd(mesh: DeviceMesh) -> bool:
    return mesh.get_rank() % 2 == 1


def another_batch(mesh: DeviceMesh) -> Refusal:
    return steps_on(mesh, full_params(), torch.ones(3 if is_odd(mesh) else 2, 5))


def another_dtype_of_the_batch(mesh: DeviceMesh) -> Refusal:
    return steps_on(mesh, full_params(), torch.ones(2, 5, dtype=torch.bfloat16 if is_odd(mesh) else torch.float32))


def another_dtype_of_the_model(mesh: DeviceMesh) -> Refusal:
    dtype = torch.float64 if is_odd(mesh) else torch.float32
    return steps_on(mesh, tree.map(lambda leaf: leaf.to(dtype), full_params()), torch.ones(2, 5))


def another_width(mesh: DeviceMesh) -> Refusal:
    return steps_on(mesh, full_params(8 if is_odd(mesh) else 6), torch.ones(2, 5))


def another_depth(mesh: DeviceMesh) -> Refusal:
    params = full_params(5)
    return steps_on(mesh, {"layers": params["layers"] * (2 if is_odd(mesh) else 1)}, torch.ones(2, 5))


def another_shape_among_many(mesh: DeviceMesh) -> Refusal:
    """The last leaf of many in a bucket."""
    leaves = [torch.ones(2 + is_odd(mesh) if i == 60 else 2) for i in range(61)]

    def step(params: Any, x: Tensor) -> Any:
        return x.sum()

    return steps_on(mesh, {"layers": [leaves]}, torch.ones(2, 5), step)


def another_key(mesh: DeviceMesh) -> Refusal:
    """The same shapes in the same order, under other names."""
    layer = full_params()["layers"][0]

    def step(params: Any, x: Tensor) -> Any:
        return descend({"layers": [dict(zip("bw", params.values()))]}, x)

    return steps_on(mesh, {"b": layer["b"], "weight" if is_odd(mesh) else "w": layer["w"]}, torch.ones(2, 5), step)


def another_order_of_keys(mesh: DeviceMesh) -> Refusal:
    (layer,) = full_params()["layers"]
    names = sorted(layer, reverse=is_odd(mesh))
    return steps_on(mesh, {"layers": [{name: layer[name] for name in names}]}, torch.ones(2, 5))


def another_constant(mesh: DeviceMesh) -> Refusal:
    """A number that the step was written with."""

    def step(params: Any, x: Tensor) -> Any:
        return descend(params, x * (0.3 if is_odd(mesh) else 0.2))

    return steps_on(mesh, full_params(), torch.ones(2, 5), step)


def another_order_in_the_step(mesh: DeviceMesh) -> Refusal:
    """The end of a long line."""
    columns = [0, 1, 2, 4, 3] if is_odd(mesh) else [0, 1, 2, 3, 4]

    def step(params: Any, x: Tensor) -> Any:
        parts = x.split(1, 1)
        return descend(params, torch.cat([parts[i] for i in columns], 1))

    return steps_on(mesh, full_params(), torch.ones(2, 5), step)


def another_tensor_in_the_step(mesh: DeviceMesh) -> Refusal:
    def step(params: Any, x: Tensor) -> Any:
        return descend(params, x * torch.tensor([1.0, 2, 3, 4, 6 if is_odd(mesh) else 5]))

    return steps_on(mesh, full_params(), torch.ones(2, 5), step)


def errors_of_three_ranks(mesh: DeviceMesh) -> Refusal:
    def step(params: Any, x: Tensor) -> Any:
        if is_odd(mesh):
            raise KeyError("no such tokenizer")
        if mesh.get_rank() == 2:
            raise OSError("disk full")
        return descend(params, x)

    return steps_on(mesh, full_params(), torch.ones(2, 5), step)


PARTS = {
    another_batch: ("argument 1: ", "'argument 1: float32[2, 5]'", "'argument 1: float32[3, 5]'"),
    another_dtype_of_the_batch: ("argument 1: ", "float32[2, 5]", "bfloat16[2, 5]"),
    another_dtype_of_the_model: ("argument 0.layers.0.b: ", "float32[6] of layers.0", "float64[6] of layers.0"),
    another_width: ("argument 0.layers.0.b: ", "float32[6] of layers.0", "float32[8] of layers.0"),
    another_depth: ("argument 1: ", "'argument 0.layers.1.b: "),
    another_shape_among_many: ("argument 0.layers.0.60: ", "float32[2] of layers.0", "float32[3] of layers.0"),
    another_key: ("argument 0.w: ", "'argument 0.weight: "),
    another_constant: ("node mul", "0.2", "0.3"),
    another_order_in_the_step: ("node cat: ", "'...", "%getitem_2, %getitem_3,", "%getitem_2, %getitem_4,"),
    another_tensor_in_the_step: ("constant ", "5.0", "6.0"),
}


@pytest.fixture(scope="module")
def found() -> dict[str, list[Outcome]]:
    cases = [*PARTS, another_order_of_keys, errors_of_three_ranks]
    return run_cases(WORLD, {case.__name__: case for case in cases})


def assert_goes_on(refusals: list[Refusal]) -> None:
    expected = loss_of(full_params(), torch.ones(2, 5))
    for refusal in refusals:
        assert refusal.loss_after == pytest.approx(float(expected)) and refusal.seconds < SOON


@pytest.mark.parametrize("case", PARTS, ids=lambda case: case.__name__)
def test_every_rank_is_told_the_first_difference_and_its_ranks(case: Any, found: dict[str, list[Outcome]]) -> None:
    refusals = values(found[case.__name__])
    assert_goes_on(refusals)
    for refusal in refusals:
        assert refusal.kind == "FzeroError", refusal
        missing = [p for p in (*PARTS[case], "ranks 0, 2 have '", f"{ODD} have '") if p not in refusal.message]
        assert not missing, f"{missing} not in: {refusal.message}"
        assert len(refusal.message) < 1000


def test_the_order_of_keys_makes_no_difference(found: dict[str, list[Outcome]]) -> None:
    refusals = values(found["another_order_of_keys"])
    assert_goes_on(refusals)
    assert {refusal.kind for refusal in refusals} == {"nothing"}


def test_errors_of_several_ranks_reach_all(found: dict[str, list[Outcome]]) -> None:
    refusals = values(found["errors_of_three_ranks"])
    assert_goes_on(refusals)
    assert [refusal.kind for refusal in refusals] == ["FzeroError", "KeyError", "OSError", "KeyError"]
    told = refusals[0].message
    assert told.startswith("ranks 1, 2, 3: could not make the step: "), told
    assert f"{ODD} have \"KeyError: 'no such tokenizer'\", rank 2 has 'OSError: disk full'" in told
