"""Metrics: torchtitan's names, numbers that are recomputed by hand, and ranks that agree on them."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import refusal, run_cases, values
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import fzero
from fzero import FzeroError, VirtualMesh, metrics, tree
from fzero.metrics.traces import PREDICTED, add_prediction
from fzero.metrics.values import Measured, join_ranks
from fzero.program.flops import count_flops, count_flops_again
from fzero.program.hardware import HARDWARE, find_hardware

WIDTH, ROWS, LAYERS = 16, 8, 3
PRODUCT = 2 * (ROWS // 2) * WIDTH * WIDTH
"""The flops of one product of a rank."""


def train_step(params: Any, x: Tensor, is_again: bool = False) -> Any:
    layer = fzero.remat(run_layer) if is_again else run_layer

    def loss_fn(params: Any, x: Tensor) -> Tensor:
        x, _ = fzero.scan(lambda x, _, weight: (layer(weight, x), None), x, layers=params["loop"])
        return layer(params["last"], x).square().mean()

    loss, grads = fzero.value_and_grad(loss_fn)(params, x)
    return tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def run_layer(weight: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(x @ weight) @ weight


def make_params(mesh: Any) -> Any:
    weights = torch.randn(LAYERS + 1, WIDTH, WIDTH, generator=torch.Generator().manual_seed(0))
    return fzero.partition({"loop": list(weights[:-1]), "last": weights[-1]}, mesh)


MESH = VirtualMesh(fsdp=2)


def measured(loss: float, **others: Any) -> Measured:
    nothing = {"tokens": None, "flops": None, "again": None, "peak_flops": None}
    given = {"means": {}, "largest": {}, "steps": 2, "seconds": 4.0, "loading": 1.0} | nothing
    return Measured(loss, **(given | others))


@pytest.fixture(scope="module")
def programs() -> list[Any]:
    params, x = make_params(MESH), torch.ones(ROWS, WIDTH)
    return [
        fzero.simulate(lambda p, x, again=again: train_step(p, x, again), MESH).trace(params, x)
        for again in (False, True)
    ]


def test_what_is_computed_again_is_counted_in_loops_too(programs: list[Any]) -> None:
    """Each layer has two products, and the backward pass needs the first again: the second is not used there."""
    plain, again = (sum(count_flops(program).values()) for program in programs)
    assert plain == (LAYERS + 1) * 6 * PRODUCT
    assert [count_flops_again(program) for program in programs] == [0, (LAYERS + 1) * PRODUCT]
    assert again - plain == (LAYERS + 1) * PRODUCT


@pytest.mark.filterwarnings("error")
def test_a_step_of_virtual_ranks_in_numbers(programs: list[Any], tmp_path: Path) -> None:
    """One process does the work of both ranks, in seconds that the metrics say."""
    path, said = tmp_path / "new" / "run.jsonl", list[str]()
    loss: Any = torch.tensor(0.5, requires_grad=True)
    tokens: Any = torch.tensor(ROWS)
    with metrics.Meter(MESH, metrics.jsonl(path), metrics.console(said.append), every=2, peak_flops=1e9) as meter:
        for number in range(1, 5):
            with meter.loading():
                time.sleep(0.01)
            found = meter.record(loss, tokens=tokens, program=programs[1], extra={"lr": number})
            assert (found is None) == (number == 3)
    assert found is not None
    seconds, flops = found["time_metrics/end_to_end(s)"], 2 * (LAYERS + 1) * 6 * PRODUCT
    assert found["loss_metrics/global_avg_loss"] == found["loss_metrics/global_max_loss"] == 0.5 and found["lr"] == 4
    assert found["throughput(tps)"] == pytest.approx(ROWS / seconds)
    assert found["tflops"] == pytest.approx(flops / seconds / 1e12)
    assert found["mfu(%)"] == pytest.approx(100 * flops / seconds / 1e9)
    assert found["hfu(%)"] == pytest.approx(found["mfu(%)"] * 7 / 6)
    assert 0.01 <= found["time_metrics/data_loading(s)"] <= seconds
    assert found["time_metrics/data_loading(%)"] == pytest.approx(100 * found["time_metrics/data_loading(s)"] / seconds)
    assert found["predicted/max_active(GiB)"] == programs[1].memory().peak / 2**30
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row.pop("step") for row in rows] == [1, 2, 4] and rows[-1] == found
    assert len(said) == 3 and said[-1].startswith("step:  4  loss:  0.5000  tps: ")


def test_what_a_step_does_not_tell_is_left_out(programs: list[Any]) -> None:
    meter = metrics.Meter(MESH, every=2, step=8)
    assert meter.record(1, tokens=4, program=programs[0]) is None
    found = meter.record(1)
    assert found is not None and found.keys() == {
        "loss_metrics/global_avg_loss", "loss_metrics/global_max_loss", "time_metrics/end_to_end(s)",
        "time_metrics/data_loading(s)", "time_metrics/data_loading(%)",
    }  # fmt: skip


def test_means_are_exact_and_ranks_that_share_tokens_count_once() -> None:
    """1e16 + 1 is no float: a sum in any order of floats is 1e16, and the mean of these numbers is 0.25."""
    ranks = [measured(loss, tokens=8, flops=10, again=2, peak_flops=5.0) for loss in (1e16, 1.0, -1e16, 0.0)]
    found = join_ranks(ranks, 2, "here")
    assert found["loss_metrics/global_avg_loss"] == 0.25 and found["loss_metrics/global_max_loss"] == 1e16
    assert found["throughput(tps)"] == 8 * 4 / 2 / 4.0 / 4 and found["tflops"] == 8e-12 / 4.0
    assert found["mfu(%)"] == 100 * 8 / (4.0 * 5.0) and found["hfu(%)"] == 100 * 10 / (4.0 * 5.0)
    for lost in (math.nan, math.inf):
        found = join_ranks([measured(lost), measured(1.0)], 1, "here")
        assert all(str(found[f"loss_metrics/global_{name}_loss"]) == str(lost) for name in ("avg", "max"))


def test_devices_are_found_by_torchs_names() -> None:
    assert find_hardware("NVIDIA H100 80GB HBM3") is HARDWARE["h100-sxm"]
    assert find_hardware("NVIDIA A100-SXM4-40GB") is HARDWARE["a100-sxm"]
    assert find_hardware("NVIDIA H100 PCIe") is find_hardware("NVIDIA H200 NVL") is None


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda meter, program: meter.record("0.5"), "metrics: loss: is str, and no number: '0.5'; give a number or"),
        (lambda meter, program: meter.record(10**400), "metrics: loss: is int, and no number"),
        (lambda meter, program: meter.record(torch.ones(2)), "metrics: loss: is Tensor, and no number"),
        (lambda meter, program: meter.record(1, program=3), "metrics: program: is 3; give what step.program"),
        (lambda meter, program: meter.record(1, tokens=1.5), "tokens: is 1.5"),
        (lambda meter, program: meter.record(1, tokens=1, extra={"throughput(tps)": 1}), "a name of the meter's own"),
        (lambda meter, program: meter.record(1, tokens=-5), "metrics: tokens: is -5; give a whole number from 0 on"),
        (lambda meter, program: meter.record(1, extra={"step": 9}), "metrics: extra: has 'step', a name of"),
        (lambda meter, program: meter.record(1, grad_norm=1, extra={"grad_norm": 2}), "extra: has 'grad_norm', a name"),
        (lambda meter, program: meter.record(1, extra={5: 1}), "metrics: extra: has the name 5; give each"),
        (lambda meter, program: meter.close() or meter.record(1), "metrics: the meter: is closed; record before close"),
        (lambda meter, program: metrics.Meter(MESH, peak_flops=0), "metrics: peak_flops: is 0; give flops a second"),
        (lambda meter, program: metrics.Meter(MESH, peak_flops=-5.0), "metrics: peak_flops: is -5.0; give flops a"),
        (lambda meter, program: metrics.Meter(MESH, every=0), "metrics: every: is 0; give a whole number from 1 on"),
        (lambda meter, program: metrics.Meter(MESH, "run.jsonl"), "metrics: a sink: is 'run.jsonl'; give"),
    ],
)
def test_mistakes_are_named(use: Any, message: str, programs: list[Any]) -> None:
    with pytest.raises(FzeroError, match=message.replace("(", r"\(").replace(")", r"\)")):
        use(metrics.Meter(MESH, every=1), programs[0])


# ranks


def log_steps(mesh: DeviceMesh, path: Path) -> Any:
    """What both ranks find, of losses of their own; then each disagreement, behind which the ranks go on."""
    params, rank = make_params(mesh), mesh.get_rank()
    step = fzero.shard(train_step, mesh)
    x = torch.ones(ROWS // 2, WIDTH)
    sink = metrics.jsonl(path)
    meter = metrics.Meter(mesh, sink, every=1)
    program = step.trace(params, x)
    params, loss = step(params, x)
    meter.record(loss, tokens=4, program=program)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        for _ in range(2):
            params, _ = step(params, x)
    metrics.export_trace(f"{path}.{rank}", seen, program)
    found = meter.record(torch.tensor(0.1 + rank), tokens=1 + rank, grad_norm=rank)
    failing = metrics.Sink("mine", lambda: metrics.Write(lambda step, values: 1 // 0, lambda: None))
    lacking = metrics.Sink("mine", lambda: None, ("no_such_package",) if rank else ())  # type: ignore[arg-type, return-value]
    alone = metrics.Meter(mesh, every=10)
    ways = {
        "names": lambda: meter.record(1, extra={"lr": 1} if rank else None),
        "numbers": lambda: meter.record("x" if rank else 1.0),
        "steps": lambda: (meter if rank else metrics.Meter(mesh, every=1)).record(1),
        "one logs": lambda: meter.record(1) if rank else step(params, x),
        "no program": lambda: alone.record(1, program=3) if rank else step(params, x),
        "writing": lambda: metrics.Meter(mesh, failing, every=1).record(1),
        "package": lambda: metrics.Meter(mesh, lacking),
        "path": lambda: metrics.Meter(mesh, metrics.jsonl(path.parent)),
    }
    refused = {name: refusal(way).message for name, way in ways.items()}
    meter.close()
    return found, float(loss), refused, float(step(params, x)[1])


@pytest.fixture(scope="module")
def on_ranks(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("metrics") / "run.jsonl"
    return path, values(run_cases(2, {"log": lambda_of(path)})["log"])


class lambda_of:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(self, mesh: DeviceMesh) -> Any:
        return log_steps(mesh, self.path)


def test_ranks_have_the_same_numbers_and_one_writes(on_ranks: Any) -> None:
    path, ((found, loss, _, later), (other, *_)) = on_ranks
    assert found == other and found["grad_norm"] == 0.5
    losses = [float(torch.tensor(0.1 + rank)) for rank in (0, 1)]
    assert found["loss_metrics/global_avg_loss"] == sum(losses) / 2 and found["loss_metrics/global_max_loss"] == max(
        losses
    )
    assert found["throughput(tps)"] == pytest.approx(3 / found["time_metrics/end_to_end(s)"] / 2)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(rows) == 2 and rows[1] == {"step": 2, **found}
    assert rows[0]["loss_metrics/global_avg_loss"] == rows[0]["loss_metrics/global_max_loss"] == loss
    assert rows[0]["tflops"] == pytest.approx((LAYERS + 1) * 6 * PRODUCT / rows[0]["time_metrics/end_to_end(s)"] / 1e12)
    assert later < loss


def test_a_trace_has_what_was_predicted_beside_what_was_measured(on_ranks: Any, programs: list[Any]) -> None:
    """At the first collective of each step, on lanes of a process of their own."""
    path, _ = on_ranks
    events = json.loads(Path(f"{path}.1").read_text())["traceEvents"]
    timeline = programs[0].timeline()
    first = min(timeline.transfers, key=lambda transfer: transfer.start)
    predicted, measured = (
        [x for x in events if (x.get("pid") == PREDICTED) == is_predicted and x.get("ph") == "X"]
        for is_predicted in (True, False)
    )
    assert len(predicted) == 2 * sum(map(len, timeline.lanes.values()))
    assert {x["args"]["name"] for x in events if x.get("pid") == PREDICTED and x["ph"] == "M"} >= {"predicted"}
    times = [sorted(x["ts"] for x in each if x["name"] == first.name) for each in (predicted, measured)]
    a_step = len(times[1]) // 2
    assert times[0][:: len(times[0]) // 2] == pytest.approx(times[1][::a_step]) and len(times[1]) == 2 * a_step
    with pytest.raises(FzeroError, match="has no collective of"):
        add_prediction({"traceEvents": []}, programs[0])


class Profile:
    """A profile that has one collective of a program."""

    def __init__(self, program: Any) -> None:
        self.name = min(program.timeline().transfers, key=lambda transfer: transfer.start).name

    def export_chrome_trace(self, path: str) -> None:
        event = {"cat": "user_annotation", "name": self.name, "ts": 1.0, "ph": "X", "pid": 1}
        Path(path).write_text(json.dumps({"traceEvents": [event]}))


def test_a_profile_that_has_not_ended_and_a_path_that_is_none_are_named(programs: list[Any], tmp_path: Path) -> None:
    def refused(seen: Any, path: Path) -> str:
        return refusal(lambda: metrics.export_trace(path, seen, programs[0])).message

    path, whole = tmp_path / "step.json", Profile(programs[0])
    seen = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    assert "metrics: seen: cannot be exported: AssertionError" in refused(seen, path)
    with seen:
        assert "metrics: seen: cannot be exported: AttributeError" in refused(seen, path)
    assert "has no collective of" in refused(seen, path)
    assert "metrics: seen: cannot be exported: RuntimeError" in refused(seen, path) and not path.exists()
    assert "No such file or directory" in refused(whole, tmp_path / "no" / "step.json")
    metrics.export_trace(path, whole, programs[0])
    assert len(json.loads(path.read_text())["traceEvents"]) > 1


@pytest.mark.parametrize(
    ("way", "words"),
    [
        ("names", "rank 1 gives 'lr', and rank 0 does not; give the same names on all ranks"),
        ("numbers", "rank 1 could not do it: metrics: loss: is str, and no number"),
        ("steps", "ranks call different functions"),
        ("one logs", "ranks call different functions"),
        ("no program", "metrics: program: is 3"),
        ("writing", "metrics, writing metrics of step 1: rank 0 could not do it: ZeroDivisionError"),
        ("package", "rank 1 could not do it: metrics.mine: needs no_such_package, which is not installed"),
        ("path", "metrics, opening the sinks: rank 0 could not do it: IsADirectoryError"),
    ],
)
def test_ranks_that_do_not_agree_raise_alike(on_ranks: Any, way: str, words: str) -> None:
    _, ranks = on_ranks
    for _, _, refused, _ in ranks:
        assert words in refused[way]
