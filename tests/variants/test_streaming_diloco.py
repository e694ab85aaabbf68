"""Streaming DiLoCo: fragments by the definition, beside plain loops; without delay and mixture it is DiLoCo."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import fzero
from fzero import FzeroError, ops, optim, passes, tree
from fzero.variants.means import start_mean
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
    """Two fragments, each sent in every fourth step and taken behind the next one, of two workers beside two plain
    loops."""
    plans = [plan_step(number, every=4, fragments=2, delay=2) for number in range(7)]
    assert [(x["sends"], x["takes"]) for x in plans] == [
        ([], []), ([], []), ([1], []), ([], [1]), ([0], []), ([], [0]), ([1], []),
    ]  # fmt: skip
    got, moved = train([partial(streaming_diloco, mix=0.25, **plan) for plan in plans[:6]])
    slices = 4 * 32  # the most that a rank has of 36 elements
    assert moved == [0, 0, slices, 0, slices, 0]
    close_to_loops(got, plans[:6], mix=0.25)


def test_a_fragment_may_be_taken_behind_the_step_that_sends_it() -> None:
    plans = [plan_step(number, every=2, fragments=1, delay=1) for number in range(4)]
    assert [(x["sends"], x["takes"]) for x in plans] == [([], []), ([], []), ([0], [0]), ([], [])]
    close_to_loops(train([partial(streaming_diloco, mix=0.5, **plan) for plan in plans])[0], plans, mix=0.5)


def close_to_loops(got: Any, plans: list[dict[str, Any]], mix: float) -> None:
    """Check the weights that workers share against those of two plain loops, with "a" and "b" as fragments in turn."""
    shared, momentum, mean = weights(), tree.map(torch.zeros_like, weights()), dict[str, Tensor]()
    workers = [weights() for _ in range(2)]
    for number, plan in enumerate(plans):
        sent = [name for at, name in enumerate("ab") if at % plan["fragments"] in plan["sends"]]
        mean |= {name: torch.stack([each[name]["w"] for each in workers]).mean(0) for name in sent}
        workers = [train_step(each, x) for each, x in zip(workers, batch_of(number).chunk(2))]
        for name in (name for at, name in enumerate("ab") if at % plan["fragments"] in plan["takes"]):
            distance = shared[name]["w"] - mean[name]
            momentum[name]["w"] = 0.9 * momentum[name]["w"] + distance
            shared[name]["w"] = shared[name]["w"] - 0.7 * (distance + 0.9 * momentum[name]["w"])
            for each in workers:
                each[name]["w"] = mix * each[name]["w"] + (1 - mix) * shared[name]["w"]
    for a, b in zip(tree.leaves(got), tree.leaves(shared)):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_fragment_travels_while_the_step_computes(stage: int) -> None:
    """The mean of a weight starts in front of its first matrix product, and what waits for it stands behind that."""
    rewrite = partial(streaming_diloco, sends=[0], takes=[0], fragments=1)
    chosen = passes.insert(passes.defaults(stage=stage), rewrite, before="bucket")
    program = fzero.simulate(train_step, MESH, passes=chosen).trace(fzero.partition(weights(), MESH), batch_of(0))
    nodes, starts = list(program.graph.nodes), program.find(start_mean)
    assert [len(ops.BucketMove(*node.args[:4]).leaves) for node in starts] == [1, 1]
    for start, product in zip(sorted(starts), program.find(torch.ops.aten.mm.default)):
        (waiting,) = start.users
        assert nodes.index(start) < nodes.index(product) < nodes.index(waiting)


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
    with pytest.raises(
        FzeroError, match="pass 'streaming_diloco': has delay=5; give a number of steps from 1 to every=4"
    ):
        plan_step(0, every=4, fragments=2, delay=5)
