"""`step.report`: the optimizer of each parameter, found in whatever tree the arguments are."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import fzero
from fzero import optim, tree
from fzero.base.errors import FzeroError
from fzero.base.mesh import VirtualMesh
from fzero.report import Report

MESH = VirtualMesh(fsdp=2)


class TrainState(NamedTuple):
    """As users write one: parameters, state and an average side by side."""

    step: Tensor
    params: Any
    opt_state: Any
    ema: Any


class Weights(NamedTuple):
    """Parameters that are a NamedTuple themselves."""

    head: Any
    rest: Any


def draw_params() -> Any:
    params = {
        "blocks": [{"up": torch.randn(8, 6), "bias": torch.randn(8)} for _ in range(2)],
        "head": torch.randn(4, 8),
    }
    return fzero.partition(params, MESH)


MATRICES = optim.muon(0.1, where=lambda path, leaf: ".up" in path, rest=optim.adamw())


def train(params: Any, state: Any, optimizer: Any = MATRICES) -> Any:
    updates, state = optimizer.update(params, state, params)
    return optim.apply_updates(params, updates), state


def stages(report: Report) -> dict[str, tuple[str, ...]]:
    return {path: leaf.stages for path, leaf in report.leaves.items()}


EXPECTED = {
    "blocks.0.up": ("scale_by_muon",),
    "blocks.0.bias": ("scale_by_adam",),
    "blocks.1.up": ("scale_by_muon",),
    "blocks.1.bias": ("scale_by_adam",),
    "head": ("scale_by_adam",),
}


def test_a_report_has_the_optimizer_of_each_leaf() -> None:
    params = draw_params()
    state = MATRICES.init(params)
    report = fzero.simulate(train, MESH).report(params, state)
    assert stages(report) == EXPECTED == optim.report(params, state)
    assert report.leaves["head"].shape == (4, 8) and report.leaves["head"].dtype == "float32"


def test_a_report_has_what_the_program_says() -> None:
    params = draw_params()
    step = fzero.simulate(train, MESH)
    report, program = step.report(params, MATRICES.init(params)), step.trace(params, MATRICES.init(params))
    assert report.peak == program.memory().peak and report.nodes == len(program.graph.nodes)
    moved = [comm for comm in program.comm() if comm.op == "all_to_all"]
    assert report.comm["all_to_all", "fsdp"] == sum(comm.nbytes for comm in moved) > 0
    assert report.largest == tuple(program.largest()) and len(report.largest) > 2
    assert str(report) == "\n".join([
        str(program).split("\n")[0],
        "  alive at the peak:",
        *(f"    {value.nbytes:>7} B of {value.what}" for value in report.largest),
        "  scale_by_adam: 3 leaves",
        "    blocks.*.bias  float32 [8], 2 times",
        "    head           float32 [4, 8]",
        "  scale_by_muon: 2 leaves",
        "    blocks.*.up  float32 [8, 6], 2 times",
    ])  # fmt: skip


def test_the_values_at_the_peak_are_all_of_it() -> None:
    """Arguments count as one value each: together they are what a deep model holds most of."""
    params, x = draw_params(), torch.randn(8, 6)

    def step(params: Any, x: Tensor) -> Any:
        def loss(params: Any) -> Tensor:
            h = sum(torch.tanh(x @ block["up"].T + block["bias"]) for block in params["blocks"])
            return (h @ params["head"].T).square().mean()

        return fzero.value_and_grad(loss)(params)

    program = fzero.simulate(step, MESH).trace(params, x)
    values = program.largest(1000)
    assert sum(value.nbytes for value in values) == program.memory().peak
    held = {value.what: value.nbytes for value in values if value.what.startswith("argument")}
    assert held == {"argument 0, 5 tensors": 4 * (2 * 32 + 16), "argument 1": 4 * 4 * 6}  # slices, with padding; rows
    assert values == sorted(values, key=lambda value: -value.nbytes) and any("test_report.py" in v.what for v in values)


def test_state_and_averages_may_stand_in_any_tree() -> None:
    params = draw_params()
    given = TrainState(torch.zeros(()), params, MATRICES.init(params), tree.map(lambda x: x + 0, params))

    def step(state: TrainState) -> TrainState:
        params, opt_state = train(state.params, state.opt_state)
        return TrainState(state.step + 1, params, opt_state, optim.incremental_update(params, state.ema, 0.1))

    assert stages(fzero.simulate(step, MESH).report(given)) == EXPECTED
    swapped = fzero.simulate(lambda state, params: train(params, state), MESH)
    assert stages(swapped.report(given.opt_state, params)) == EXPECTED


def test_parameters_may_be_a_namedtuple() -> None:
    params = fzero.partition(Weights(torch.randn(4, 8), {"w": torch.randn(8)}), MESH)
    optimizer = optim.chain(optim.clip_by_global_norm(1.0), optim.adafactor())
    report = fzero.simulate(lambda p, s: train(p, s, optimizer), MESH).report(params, optimizer.init(params))
    assert stages(report) == {"head": ("factored",), "rest.w": ("factored",)}


@pytest.mark.parametrize(
    ("optimizer", "stage"),
    [
        (optim.apply_if_finite(optim.adamw(), 3), "scale_by_adam"),
        (optim.cast_state(optim.lion(0.1), torch.bfloat16), "scale_by_lion"),
        (optim.masked(optim.trace(0.9), lambda path, leaf: True), "trace"),
        (optim.inject_hyperparams(optim.sgd)(optim.linear_schedule(1, 0, 9), momentum=0.9), "trace"),
        (optim.adamw8bit(1e-3), "scale_by_adam8bit"),
    ],
)
def test_wrapped_stages_are_found(optimizer: Any, stage: str) -> None:
    params = fzero.partition({"w": torch.randn(64, 64), "b": torch.randn(8)}, MESH, unit=256)
    report = fzero.simulate(lambda p, s: train(p, s, optimizer), MESH).report(params, optimizer.init(params))
    assert stages(report) == {"w": (stage,), "b": (stage,)}


def test_frozen_leaves_and_leaves_without_state_are_named() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    params, _ = fzero.lower(model)
    params, optimizer = fzero.partition(params, MESH), optim.sgd(0.1)

    def step(params: Any, state: Any, x: Tensor) -> Any:
        grads = fzero.grad(lambda p: (x @ p[1]["weight"].T).sum())(params)
        updates, state = optimizer.update(grads, state, params)
        return optim.apply_updates(params, updates), state

    report = fzero.simulate(step, MESH).report(params, optimizer.init(params), torch.randn(4, 4))
    assert {path: leaf.optimizer for path, leaf in report.leaves.items()} == {
        "0.weight": "frozen", "0.bias": "frozen", "1.weight": "no state", "1.bias": "no state"
    }  # fmt: skip


def test_a_muon_that_touches_no_leaf_is_refused() -> None:
    with pytest.raises(FzeroError, match=r"muon: where chooses none of 5 leaves"):
        optim.muon(where=lambda path, leaf: False).init(draw_params())
