"""Streaming DiLoCo: fragments by the definition, beside plain loops; without delay and mixture it is DiLoCo."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import fzero
from fzero import FzeroError, optim, passes, tree
from fzero.variants.diloco import diloco
from fzero.variants.streaming_diloco import plan_step, streaming_diloco

pytestmark = pytest.mark.usefixtures("shared_traces")

MESH = fzero.VirtualMesh(replica=2, fsdp=2)
SGD = optim.sgd(0.3)


def weights() -> Any:
    draw = torch.Generator().manual_seed(0)
    return {name: {"w": torch.randn(6, 6, generator=draw) / 2} for name in "ab"}


def loss_of(params: Any, x: Tensor) -> Tensor:
    return ((x @ params["a"]["w"]).tanh() @ params["b"]["w"] - 1).square().mean()


def train_step(params: Any, x: Tensor) -> Any:
    updates, _ = SGD.update(fzero.grad(loss_of)(params, x), SGD.init(params), params)
    return optim.apply_updates(params, updates)


def batch_of(number: int) -> Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(number))


def train(rewrites: list[Any]) -> tuple[Any, list[int]]:
    """The weights that workers share behind some steps, each with a pass of its own, and the bytes over replicas."""
    params, state, moved = fzero.partition(weights(), MESH), None, []
    for number, rewrite in enumerate(rewrites):
        step = fzero.simulate(
            train_step, MESH, passes=passes.insert(passes.defaults(stage=3), rewrite, before="bucket")
        )
        moved.append(sum(x.nbytes for x in step.trace(params, batch_of(0)).comm() if x.axis == "replica"))
        state = state or step.init_pass_state(params, batch_of(0))
        params, state = step(params, batch_of(number), pass_state=state)
    return fzero.unpartition(params), moved


def test_fragments_are_those_of_the_definition() -> None:
    """Two fragments, each sent in every fourth step and taken one step later, of two workers beside two plain loops."""
    plans = [plan_step(number, every=4, fragments=2, delay=1) for number in range(6)]
    assert [(x["sends"], x["takes"]) for x in plans] == [
        ([], []), ([1], []), ([], [1]), ([0], []), ([], [0]), ([1], []),
    ]  # fmt: skip
    got, moved = train([partial(streaming_diloco, mix=0.25, **plan) for plan in plans[:5]])
    slices = 4 * 32  # the most that a rank has of 36 elements
    assert moved == [0, slices, 0, slices, 0]
    shared, momentum, mean = weights(), tree.map(torch.zeros_like, weights()), dict[str, Tensor]()
    workers = [weights() for _ in range(2)]
    for number, plan in enumerate(plans[:5]):
        workers = [train_step(each, x) for each, x in zip(workers, batch_of(number).chunk(2))]
        for name, fragment in (("a", 0), ("b", 1)):
            if fragment in plan["sends"]:
                mean[name] = torch.stack([each[name]["w"] for each in workers]).mean(0)
            if fragment in plan["takes"]:
                distance = shared[name]["w"] - mean[name]
                momentum[name]["w"] = 0.9 * momentum[name]["w"] + distance
                shared[name]["w"] = shared[name]["w"] - 0.7 * (distance + 0.9 * momentum[name]["w"])
                for each in workers:
                    each[name]["w"] = 0.25 * each[name]["w"] + 0.75 * shared[name]["w"]
    for a, b in zip(tree.leaves(got), tree.leaves(shared)):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_without_delay_and_mixture_it_is_diloco() -> None:
    plans = [plan_step(number, every=2, fragments=1, delay=0) for number in range(4)]
    got, _ = train([partial(streaming_diloco, mix=0.0, **plan) for plan in plans])
    expected, _ = train([partial(diloco, syncs=bool(plan["sends"])) for plan in plans])
    for a, b in zip(tree.leaves(got), tree.leaves(expected)):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_options_out_of_range_are_refused_by_name() -> None:
    with pytest.raises(FzeroError, match="pass 'streaming_diloco': has mix=2; give a part"):
        streaming_diloco(None, sends=[], takes=[], fragments=1, mix=2)  # type: ignore
    for wrong in (
        {"rate": float("nan")},
        {"momentum": 5},
        {"fragments": 0},
        {"fragments": 1.5},
        {"sends": [5]},
        {"takes": [7]},
    ):
        ((option, value),) = wrong.items()
        given: Any = {"sends": [], "takes": [], "fragments": 2} | wrong
        with pytest.raises(FzeroError, match=re.escape(f"pass 'streaming_diloco': has {option}={value}; give ")):
            streaming_diloco(None, **given)  # type: ignore
    with pytest.raises(FzeroError, match="pass 'streaming_diloco': has fragments=0; give a whole number from 1"):
        plan_step(0, every=4, fragments=0, delay=1)
    with pytest.raises(FzeroError, match="pass 'streaming_diloco': has delay=4; give a number of steps below every=4"):
        plan_step(0, every=4, fragments=2, delay=4)
