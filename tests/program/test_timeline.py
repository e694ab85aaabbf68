"""Timelines of small programs, against times worked out by hand."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import EVERY_STEP, MESH, apply, layers, on_ones, training, tried
from torch import Tensor

import fzero
from fzero import tree
from fzero.base.mesh import VirtualMesh
from fzero.passes import bucket, prefetch
from fzero.program.comm import Comm
from fzero.program.program import Program
from fzero.program.rates import GUESSES, Rates, bus_bytes, guess_rates
from fzero.program.timeline import Timeline, Transfer
from fzero.program.work import Work

RATES = Rates(flops=64.0, memory=1e30, wire=32.0, launch=0.0, latency=1.0)
"""A product of [2, 4] and [4, 4] takes 1 s, to gather or scatter a bucket of 32 floats on two ranks 1 + 64 / 32 s."""


def program(step: Callable[..., Any], mesh: VirtualMesh = MESH, count: int = 2) -> Program:
    """`step(weights, x)` of leaves [4, 4], each a bucket of 16 floats and as many of padding, and x [2, 4]."""
    params = {str(i): torch.ones(4, 4) for i in range(count)}
    return apply(on_ones(step, params, mesh).trace(), bucket)


def products(params: dict[str, Tensor], x: Tensor) -> Tensor:
    for weight in params.values():
        x = x @ weight
    return x


def moved(timeline: Timeline) -> list[tuple[str, float, float, float]]:
    """Name, start, end and exposed seconds of each collective."""
    return [(each.name, each.start, each.end, each.exposed) for each in timeline.transfers]


def computed(timeline: Timeline) -> list[tuple[str, float, float]]:
    return [(name, round(start, 9), round(end, 9)) for name, start, end in timeline.spans]


def test_two_products_wait_for_their_gathers() -> None:
    timeline = program(products).timeline(RATES)
    assert moved(timeline) == [("all_gather 0", 0, 3, 3), ("all_gather 1", 4, 7, 3)]
    assert computed(timeline) == [("mm", 3, 4), ("mm", 7, 8)]
    assert (timeline.seconds, timeline.compute, timeline.exposed, timeline.hidden()) == (8, 2, 6, 0)


def test_a_product_hides_the_next_gather() -> None:
    timeline = prefetch(replace(program(products), measured=RATES)).timeline()
    assert moved(timeline) == [("all_gather 0", 0, 3, 3), ("all_gather 1", 3, 6, 2)]  # one after the other
    assert computed(timeline) == [("mm", 3, 4), ("mm", 6, 7)]
    assert timeline.hidden() == 1 / 6
    assert timeline.transfers[1].seconds == 3 and timeline.transfers[1].hidden == 1


def test_a_step_with_gradients_and_a_mean() -> None:
    def step(params: dict[str, Tensor], x: Tensor) -> Any:
        return fzero.value_and_grad(lambda params: products(params, x).sum())(params)

    timeline = program(step, count=1).timeline(RATES)
    assert moved(timeline) == [
        ("all_gather 0", 0, 3, 3),
        ("reduce_scatter 0", 5, 8, 3),  # the gradient is another product
        ("all_reduce fsdp", 8, 8 + 1 + 4 / 32, 1 + 4 / 32),  # of the sum: twice half of 4 bytes
    ]
    assert timeline.hidden("all_reduce") == timeline.hidden("reduce_scatter") == 0


def test_a_scatter_is_averaged_over_other_axes_when_it_is_waited_for() -> None:
    def step(params: dict[str, Tensor], x: Tensor) -> Any:
        return fzero.grad(lambda params: products(params, x).sum())(params)

    timeline = program(step, VirtualMesh(replica=2, fsdp=2), count=1).timeline(RATES)
    assert moved(timeline)[1:] == [("reduce_scatter 0", 5, 8, 3), ("all_reduce 0", 8, 11, 3)]


def test_each_axis_has_its_wire() -> None:
    """Collectives over one axis do not hold up those over another; one over both waits for both."""

    def step(params: dict[str, Tensor], x: Tensor) -> Any:
        x = products(params, x)  # a gather of 3 s, and a product that takes 1 s
        return fzero.psum(x * fzero.axis_index("link"), "link").mean()

    mesh = VirtualMesh(fsdp=2, link=2)  # which is no link to the host
    params = fzero.partition({"0": torch.ones(4, 4)}, mesh)
    rates = RATES._replace(axes=(("link", 16.0),))
    traced = fzero.simulate(step, mesh, data=("fsdp",)).trace(params, torch.ones(4, 4))
    lanes = traced.timeline(rates).lanes
    times = {name: [(each.name, each.start, each.end) for each in entries] for name, entries in lanes.items()}
    assert times["communication over link"] == [("all_reduce link", 4, 7)]  # 1 + 32 / 16 s
    assert times["communication over fsdp"] == [("all_gather 0", 0, 3), ("all_reduce fsdp", 7, 8.125)]
    assert rates.wire_along("fsdp+link", mesh) == 16 and rates.wire_along("fsdp", mesh) == 32


def test_nothing_is_moved_on_one_rank() -> None:
    timeline = program(products, VirtualMesh(fsdp=1)).timeline(RATES)
    assert (timeline.seconds, timeline.exposed, timeline.hidden()) == (2, 0, 1)


def test_an_operation_is_bound_by_arithmetic_or_by_memory() -> None:
    rates = Rates(flops=10.0, memory=5.0, wire=1.0, launch=0.5, latency=0.0)
    assert rates.compute(Work(40, 10)) == 4.5
    assert rates.compute(Work(10, 10)) == 2.5
    assert rates.compute(Work(0, 0)) == 0
    assert rates.compute(Work(40, 10, attention=30)) == 4.5
    assert rates._replace(attention=5.0).compute(Work(40, 10, attention=30)) == 0.5 + 1 + 6


@pytest.mark.parametrize(("op", "sent"), [("all_gather", 75), ("reduce_scatter", 75), ("all_reduce", 150)])
def test_bytes_that_a_rank_of_four_sends(op: str, sent: float) -> None:
    comm = Comm(op, "fsdp", "w", torch.float32, 100)
    assert bus_bytes(comm, VirtualMesh(fsdp=4)) == sent
    assert RATES.communicate(comm, VirtualMesh(fsdp=4)) == 1 + sent / 32
    assert RATES.communicate(comm, VirtualMesh(fsdp=1)) == 0


def test_rates_are_guessed_where_they_are_not_measured() -> None:
    traced = program(products)
    assert traced.rates == guess_rates("cpu") == GUESSES["cpu"]
    assert guess_rates("meta") == GUESSES["cuda"]
    assert replace(traced, measured=RATES).rates == RATES
    assert str(traced.timeline()) == str(traced.timeline(GUESSES["cpu"]))


def test_a_timeline_prints_as_a_table() -> None:
    assert str(program(products).timeline(RATES)).splitlines() == [
        "products: 8000.00 ms, 2000.00 ms of compute and 6000.00 ms of waiting; 0.0% of gathers and scatters "
        "are hidden",
        "  collective                           start       end    hidden   exposed  ms",
        "  all_gather 0                          0.00   3000.00      0.00   3000.00",
        "  all_gather 1                       4000.00   7000.00      0.00   3000.00",
    ]


def test_a_chrome_trace_has_a_thread_for_each_lane(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    program(products).timeline(RATES).export_chrome_trace(path)
    events = json.loads(path.read_text())["traceEvents"]
    assert [event["args"]["name"] for event in events if event["ph"] == "M"] == ["compute", "communication"]
    spans = [(event["name"], event["tid"], event["ts"], event["dur"]) for event in events if event["ph"] == "X"]
    assert spans == [
        ("mm", 0, 3e6, 1e6),
        ("mm", 0, 7e6, 1e6),
        ("all_gather 0", 1, 0, 3e6),
        ("all_gather 1", 1, 4e6, 3e6),
    ]
    assert events[-1]["args"] == {"nbytes": 128, "exposed": 3e6}


@pytest.mark.parametrize("rates", [RATES, GUESSES["cpu"], GUESSES["cuda"]])
@pytest.mark.parametrize(("name", "world"), EVERY_STEP)
def test_a_step_computes_or_waits(name: str, world: int, rates: Rates) -> None:
    timeline = prefetch(bucket(tried(name, world).program)).timeline(rates)
    assert timeline.seconds == pytest.approx(timeline.compute + timeline.exposed)
    assert all(-1e-12 <= each.exposed <= each.seconds + 1e-12 for each in timeline.transfers)
    assert all(before.end <= after.start for before, after in zip(timeline.transfers, timeline.transfers[1:]))


def test_copies_and_the_host_have_lanes() -> None:
    """A gradient leaves, the host updates, and the parameter comes back; all of it behind the last product."""
    mesh, optimizer = VirtualMesh(fsdp=1), fzero.optim.sgd(0.5)

    def step(params: Any, state: Any, x: Tensor) -> Any:
        grads = fzero.grad(lambda p: (x @ p["w"]).square().sum())(params)
        updates, state = optimizer.update(grads, state, params)
        return fzero.optim.apply_updates(params, updates), state

    params = fzero.partition({"w": torch.ones(4, 4)}, mesh, to=fzero.host())
    traced = fzero.simulate(step, mesh).trace(params, optimizer.init(params), torch.ones(2, 4))
    rates = Rates(flops=1e30, memory=1e30, wire=1e30, launch=0.0, latency=0.0, link=32.0, host=48.0)
    timeline = traced.timeline(rates)
    copies = [(each.name, each.start, each.end) for each in timeline.lanes["link"]]
    assert copies == [("to_device link", 0, 2), ("to_host link", 2, 4)]  # 64 bytes each
    assert [(span.name, span.start, span.end) for span in timeline.on_host] == [("sgd_", 4, 8)]  # reads 2, writes 1
    assert timeline.seconds == timeline.exposed == 8 and timeline.compute == 0
    assert timeline.hidden("to_host") == 0 and timeline.hidden() == 1
    threads = [event["args"]["name"] for event in timeline.chrome_trace()["traceEvents"] if event["ph"] == "M"]
    assert threads == ["compute", "communication", "link", "host"]


def test_the_host_clips_in_one_pass() -> None:
    """A norm that is not finite makes gradients zero in a second one, which the host leaves out as a rule."""
    optimizer = fzero.optim.chain(fzero.optim.clip_by_global_norm(1.0), fzero.optim.adamw(0.1))
    params = fzero.partition(layers(1, width=64), VirtualMesh(fsdp=2))
    args = params, optimizer.init(params, to=fzero.host()), torch.ones(4, 64)
    program = fzero.simulate(training(optimizer), VirtualMesh(fsdp=2)).trace(*args)
    seconds = {span.name: span.end - span.start for span in program.timeline().on_host}
    list_bytes = 4 * (64 * 64 + 64) // 2  # of one number for each element of a rank's slice
    assert set(seconds) == {"_foreach_mul_", "adamw_"}
    assert seconds["_foreach_mul_"] * program.rates.host == pytest.approx(2 * list_bytes, abs=64)
    assert seconds["adamw_"] * program.rates.host == pytest.approx(7 * list_bytes, abs=64)


def test_a_disk_reads_and_writes_in_turn(tmp_path: Path) -> None:
    """A parameter is read for its product and, meanwhile, for its update, which waits for the gradient."""
    mesh, optimizer = VirtualMesh(fsdp=1), fzero.optim.sgd(0.5)

    def step(params: Any, state: Any, x: Tensor) -> Any:
        grads = fzero.grad(lambda p: (x @ p["w"]).square().sum())(params)
        updates, state = optimizer.update(grads, state, params)
        return fzero.optim.apply_updates(params, updates), state

    params = fzero.partition({"w": torch.ones(4, 4)}, mesh, to=fzero.disk(tmp_path))
    traced = fzero.simulate(step, mesh).trace(params, optimizer.init(params), torch.ones(2, 4))
    rates = Rates(flops=1e30, memory=1e30, wire=1e30, launch=0.0, latency=0.0, link=32.0, host=48.0, disk=16.0)
    timeline = traced.timeline(rates)
    moves = [(each.name, each.start, each.end) for each in timeline.lanes["disk"]]
    assert moves == [("read disk", 0, 4), ("read disk", 4, 8), ("write disk", 12, 16)]  # 64 bytes each
    copies = [(each.name, each.start, each.end) for each in timeline.lanes["link"]]
    assert copies == [("to_device link", 4, 6), ("to_host link", 6, 8)]
    assert [(span.name, span.start, span.end) for span in timeline.on_host] == [("sgd_", 8, 12)]
    assert timeline.seconds == 16 and timeline.hidden("write") == 0


def multiply_layers(params: tree.Tree, x: Tensor) -> Tensor:
    return fzero.scan(lambda h, _, layer: (h @ layer["w"], None), x, layers=params["layers"])[0]


def start_times(transfers: Sequence[Transfer]) -> list[tuple[int, int]]:
    return [(round(each.start), round(each.end)) for each in transfers]


def test_a_loop_copies_from_the_host_two_turns_early() -> None:
    """The copy and the all-gather of a layer take 2 s each, and what a turn computes takes 3 s. Only the copy and the
    gather of the first layer are exposed."""
    mesh, count = VirtualMesh(fsdp=2), 5
    params = fzero.partition({"layers": [{"w": torch.ones(16, 16)} for _ in range(count)]}, mesh, to=fzero.host())
    traced = fzero.simulate(multiply_layers, mesh).trace(params, torch.ones(2, 16))
    rates = Rates(flops=16 * 16 * 2 / 3, memory=1e30, wire=256.0, launch=0.0, latency=0.0, link=256.0)
    timeline = traced.timeline(rates)
    assert start_times(timeline.lanes["link"]) == [(0, 2), (2, 4), (4, 6), (7, 9), (10, 12)]
    assert start_times(timeline.lanes["communication"]) == [(2, 4), (4, 6), (7, 9), (10, 12), (13, 15)]
    assert timeline.exposed == pytest.approx(4) and timeline.compute == pytest.approx(3 * count)


def test_a_loop_reads_from_a_disk_three_turns_early(tmp_path: Path) -> None:
    """As above, with reads that take 2.5 s. The first three reads are exposed, because the third copy starts in front
    of the first turn. Beside a turn's own layer the host holds three that are being read, of 512 bytes a rank."""
    mesh, count = VirtualMesh(fsdp=2), 6
    whole = {"layers": [{"w": torch.ones(16, 16)} for _ in range(count)]}
    params = fzero.partition(whole, mesh, to=fzero.disk(tmp_path))
    traced = fzero.simulate(multiply_layers, mesh).trace(params, torch.ones(2, 16))
    rates = Rates(flops=16 * 16 * 2 / 3, memory=1e30, wire=256.0, launch=0.0, latency=0.0, link=256.0, disk=204.8)
    timeline = traced.timeline(rates)
    assert [each.start for each in timeline.lanes["disk"]] == pytest.approx([0, 2.5, 5, 7.5, 10, 12.5])
    assert timeline.compute == pytest.approx(3 * count) and timeline.exposed == pytest.approx(3 * 2.5)
    assert traced.memory().host == 4 * 512
