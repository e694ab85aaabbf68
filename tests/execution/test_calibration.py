"""Calibration: a timed step gives rates, and rates schedule a step."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run_cases, values
from programs import Case, apply, layers, loss, training
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fzero
from fzero import FzeroError, optim, tree
from fzero.base.mesh import VirtualMesh
from fzero.execution.calibration import MOVED, average_rates, fit_rates, measure_link, time_nodes
from fzero.passes import bucket
from fzero.program.program import Program
from fzero.program.rates import GUESSES, Rates
from fzero.ranks.link import AtOnce
from fzero.ranks.live import live

RATES = Rates(flops=3e6, memory=5e7, wire=2e5, launch=1e-4, latency=2e-3, link=1e10, host=1e10, attention=1e6)
"""With which products are bound by arithmetic."""


def narrow_loss(params: tree.Tree, x: Tensor) -> Tensor:
    return loss(tree.map(lambda leaf: leaf.to(torch.bfloat16), params), x.to(torch.bfloat16)).float()


def loss_with_attention(params: tree.Tree, x: Tensor) -> Tensor:
    heads = x.view(2, 128, 3, 50).transpose(1, 2)
    mixed = torch.nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
    return loss(params, mixed.transpose(1, 2).reshape(256, 150))


def program(world: int = 2, width: int = 150, rows: int = 256, of: Any = loss) -> Program:
    """The gradient of a loss of two layers, for `rows` examples of a rank. By default some operations are small."""
    mesh = VirtualMesh(fsdp=world)
    args = fzero.partition(layers(2, width=width), mesh), torch.ones(rows * world, width)
    return apply(Case(fzero.value_and_grad(of), mesh, args).trace(), bucket)


def durations(program: Program, rates: Rates) -> dict[Any, float]:
    """Node -> seconds by these rates, its collectives included."""
    costs = replace(program, measured=rates).costs()
    called = [node for node in program.graph.nodes if node.op == "call_function"]
    return {node: costs[node].seconds + sum(s for _, s in costs[node].comms) for node in called}


@pytest.mark.parametrize(("of", "attention"), [(loss, None), (narrow_loss, None), (loss_with_attention, 1e6)])
def test_rates_are_found_again_in_what_they_make_of_a_program(of: Any, attention: float | None) -> None:
    traced = program(of=of)
    got = fit_rates(traced, durations(traced, RATES))
    # small operations are taken for launches alone, and the shortest collective for a latency
    rest = (got._replace(attention=1.0)[:-1], RATES._replace(attention=1.0)[:-1])
    assert rest[0] == pytest.approx(rest[1], rel=0.02) and got.axes == ()
    assert got.attention == (attention and pytest.approx(attention, rel=0.02))


def test_each_axis_has_its_wire() -> None:
    """A reduce-scatter is followed by an all-reduce over the other axis, in one node: it has what time is left."""
    mesh = VirtualMesh(replica=2, fsdp=2)
    args = fzero.partition(layers(2, width=150), mesh), torch.ones(512, 150)
    traced = fzero.simulate(fzero.value_and_grad(loss), mesh).trace(*args)
    rates = RATES._replace(axes=(("fsdp", 4e5), ("replica", 1e5)))
    got = fit_rates(traced, durations(traced, rates))
    assert dict(got.axes) == pytest.approx(dict(rates.axes), rel=0.05)


def test_what_a_program_does_not_do_is_guess_rates() -> None:
    case = Case(lambda x: x * 2, VirtualMesh(fsdp=1), (torch.ones(2),))
    traced = replace(case.trace(), measured=RATES)
    (node,) = [node for node in traced.graph.nodes if node.op == "call_function"]
    assert fit_rates(traced, {node: 7.0}) == RATES._replace(launch=7.0)


def test_on_one_rank_nothing_is_learnt_about_the_wire() -> None:
    traced = program(world=1)
    got = fit_rates(traced, durations(traced, RATES))
    assert (got.wire, got.latency) == (traced.rates.wire, traced.rates.latency)


def test_ranks_have_the_mean_of_their_rates() -> None:
    reduced: list[str] = []

    def all_reduce(x: Tensor, op: str) -> Tensor:
        reduced.append(op)
        return (x + 2 * x) / 2 if op == "avg" else x  # beside a rank with rates twice as high

    rates = RATES._replace(axes=(("fsdp", 4.0), ("replica", 2.0)))
    mean = average_rates(rates, all_reduce, "cpu")
    assert mean[:-1] == tuple(1.5 * rate for rate in RATES[:-1]) and mean.axes == (("fsdp", 6.0), ("replica", 3.0))
    assert reduced == ["avg", "max"]


class SlowIn(AtOnce):
    """A link that takes its time in one direction."""

    def to_device(self, values: Sequence[Tensor], into: Sequence[Tensor] | None = None) -> list[Tensor]:
        time.sleep(0.05)
        return list(values)


def test_the_link_is_as_fast_as_its_slower_direction() -> None:
    assert 0 < measure_link(SlowIn(), torch.device("cpu")) < MOVED / 0.05


train_step = training(optim.adamw(0.1), lambda params, x: loss(params, torch.nn.functional.dropout(x, 0.1)))


def calibrate(mesh: DeviceMesh) -> dict[str, Any]:
    """Two steps with and without a calibration in front of the second."""
    found: dict[str, Any] = {}
    for name in ("plain", "calibrated"):
        torch.manual_seed(7)
        params = fzero.partition(layers(3), mesh)
        held: Any = (params, optim.adamw(0.1).init(params))
        step, x = fzero.shard(train_step, mesh), torch.ones(2, 5) * (1 + mesh.get_rank())
        *held, _ = step(*held, x)
        if name == "calibrated":
            before, drawn = [leaf.local.clone() for leaf in tree.leaves(held)], torch.get_rng_state()
            guess = step.trace(*held, x)
            found["rates"] = step.calibrate(*held, x)
            found["is_measured"] = step.trace(*held, x).rates == found["rates"] != guess.rates
            found["kept"] = all(torch.equal(a, b.local) for a, b in zip(before, tree.leaves(held)))
            found["drew"] = not torch.equal(drawn, torch.get_rng_state())
        *held, value = step(*held, x)
        found[name] = [value, *(leaf.local for leaf in tree.leaves(held))]
    return found


def hybrid(mesh: DeviceMesh) -> Rates:
    """On two axes, of a step that does not donate."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replica", "fsdp"))
    params = fzero.partition(layers(2), mesh)
    step = fzero.shard(train_step, mesh, donate=False)
    return step.calibrate(params, optim.adamw(0.1).init(params), torch.ones(2, 5))


def on_disk(mesh: DeviceMesh, path: Path) -> dict[str, Any]:
    """Of a step with parameters in files below `path`. The last rank cannot write to the second disk."""
    params, x = fzero.partition(layers(3), mesh, to=fzero.disk(path)), torch.ones(2, 5)
    step, guess = fzero.shard(fzero.value_and_grad(loss), mesh), GUESSES["cpu"]
    before, reads = [leaf.local.clone() for leaf in tree.leaves(params)], step.trace(params, x).copies(mesh.get_rank())
    rates = step.calibrate(params, x)
    files = {file.name.partition(".")[0] for file in path.glob("*/*")}
    gone = path.with_name(f"gone-{mesh.get_rank()}")  # beside `path`, where the other rank does not look
    gone.mkdir()
    other = fzero.disk(gone)
    if mesh.get_rank() == mesh.size() - 1:
        gone.rmdir()
    with pytest.raises(FzeroError, match=r"disk: is fzero.host\(pin=True\); give fzero.disk\(path\)"):
        step.calibrate(params, x, disk=fzero.host())
    with pytest.raises(FzeroError) as raised:
        step.calibrate(params, x, disk=other)
    kept = all(map(torch.equal, before, (leaf.local.clone() for leaf in tree.leaves(params))))
    return {
        "rates": rates, "is_measured": rates.disk != guess.disk, "files": files, "error": str(raised.value),
        "kept": kept and reads == step.trace(params, x).copies(mesh.get_rank()),
    }  # fmt: skip


def timing(mesh: DeviceMesh) -> dict[str, Any]:
    """One timed step."""
    held = tree.flatten((fzero.partition(layers(2), mesh), torch.ones(2, 5)))[0]
    program = fzero.shard(fzero.value_and_grad(loss), mesh).trace(fzero.partition(layers(2), mesh), torch.ones(2, 5))
    aligned: list[int] = []
    tensors = [x.local if isinstance(x, fzero.Sharded) else x for x in held]
    seconds = time_nodes(program, live(mesh), tensors, lambda: aligned.append(1))
    called = [node for node in program.graph.nodes if node.op == "call_function"]
    return {
        "all": list(seconds) == called,
        "least": min(seconds.values()),
        "aligned": (sum(aligned), len(program.comm())),
    }


@pytest.fixture(scope="module")
def on_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    of_disk = partial(on_disk, path=tmp_path_factory.mktemp("disk"))
    cases = {"calibrate": calibrate, "hybrid": hybrid, "timing": timing, "disk": of_disk}
    return {name: values(found) for name, found in run_cases(2, cases).items()}


def test_every_operation_is_timed_and_ranks_meet_before_collectives(on_ranks: dict[str, list[Any]]) -> None:
    for found in on_ranks["timing"]:
        assert found["all"] and found["least"] > 0
        assert len(set(found["aligned"])) == 1


def test_ranks_agree_on_rates(on_ranks: dict[str, list[Any]]) -> None:
    first, second = (found["rates"] for found in on_ranks["calibrate"])
    assert first == second and all(rate > 0 for rate in first[:-1] if rate is not None)
    first, second = on_ranks["hybrid"]
    assert first == second and all(rate > 0 for rate in first[:-1] if rate is not None)


def test_a_disk_is_measured_in_a_file_that_is_gone_afterwards(on_ranks: dict[str, list[Any]]) -> None:
    first, second = on_ranks["disk"]
    assert first["rates"] == second["rates"]
    for found in (first, second):
        assert found["is_measured"] and found["kept"]
        assert found["files"] <= {"lock", "rank-0", "rank-1"}, "a file of the measurement is left"


def test_a_disk_that_fails_on_one_rank_is_an_error_on_all(on_ranks: dict[str, list[Any]]) -> None:
    first, second = on_ranks["disk"]
    assert re.search("rank 1.*FzeroError: disk .* is no folder", first["error"])
    assert re.match("disk .* is no folder; give the path", second["error"])


def test_calibration_leaves_everything_as_it_was(on_ranks: dict[str, list[Any]]) -> None:
    for found in on_ranks["calibrate"]:
        assert found["kept"] and not found["drew"]


def test_programs_have_the_rates_from_then_on(on_ranks: dict[str, list[Any]]) -> None:
    assert all(found["is_measured"] for found in on_ranks["calibrate"])


def test_a_calibrated_step_gives_the_same_bit_for_bit(on_ranks: dict[str, list[Any]]) -> None:
    for found in on_ranks["calibrate"]:
        for a, b in zip(found["plain"], found["calibrated"], strict=True):
            assert torch.equal(a, b)
