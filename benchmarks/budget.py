"""Seconds of a training step over the bytes that it needs: budgets from the least to the most beside the stages, FSDP2
and DeepSpeed.

    python benchmarks/budget.py                                          # size S
    python benchmarks/budget.py --size M --json benchmarks/results/budget-m.json --png benchmarks/results/budget-m.png
    python benchmarks/budget.py --budgets 4 --contenders fsdp2           # fewer points
    python benchmarks/budget.py --plan 80                                # seconds to choose for 80 layers on 8 ranks
    python benchmarks/budget.py --to-host 32                             # 7B planned, state on the host or not

Each contender has processes of its own, one after the other, and new ones in each round: processes of one contender
differ by more than its steps. `worker.py` and `examples/measure.py` say what is counted.
A step with a budget is calibrated first, so that its predicted seconds are those of this machine. The least budget is 2
% above the least peak that fzero plans, and the most is the peak of stage 2.

The table ends with the contenders that no budget dominates: none needs at most as much memory and at most as much time.

`--to-host` measures nothing: parameters are on the meta device, rates are those that fzero guesses for a GPU, a link
has 25 GB/s. It prints what budgets take with `to=fzero.host()` and without, on 8 ranks.
"""

from __future__ import annotations

import argparse
import gc
import math
import re
import sys
import time
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import flags
import torch
from contenders import BUDGET, able
from fzero_steps import ADAMW, training_step
from launch import run_each
from machine import machine
from quartiles import quartiles
from runs import SIZES, Plan, Size

import fzero

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from gpt import GPT, GPTConfig

OTHERS = "fzero-1,fzero-2,fzero-3,fsdp2,fsdp2-keep,deepspeed-2,deepspeed-3,deepspeed-2-offload,deepspeed-3-offload"
MIB, GIB = 2**20, 2**30
ABOVE_LEAST = 1.02
STEPS = {"tiny": 3, "S": 10}  # 4 for larger sizes


class Row(NamedTuple):
    """What a contender's step needs; the predictions are fzero's, None of others."""

    name: str
    peak: float  # MiB
    predicted_peak: float | None
    milliseconds: float
    predicted_milliseconds: float | None
    is_budget: bool


def main(given: argparse.Namespace) -> None:
    """Measures, prints the table, writes the record and the picture."""
    if given.plan:
        print(time_choices(given.plan))
        return
    if given.to_host:
        plans = plan_to_host(given.to_host, given.budgets)
        print(table_of_plans(plans))
        flags.write(given.json, {"layers": given.to_host, "plans": [plan._asdict() for plan in plans]} | machine())
        if given.png:
            draw_plans(given.png, plans, f"{given.to_host} layers of width 4096 on 8 ranks, planned")
        return
    budgets = list_budgets(SIZES[given.size], given.ranks, given.budgets)
    names = [*(f"{BUDGET}{budget}" for budget in budgets), *filter(None, given.contenders.split(","))]
    contenders = able(tuple(names), given.device)
    steps = given.steps or STEPS.get(given.size, 4)
    plan = Plan(contenders, given.size, "budget", given.rounds, steps, given.device, given.bf16)
    rounds = [run_each(replace(plan, rounds=1), given.ranks, given.timeout) for _ in range(plan.rounds)]
    results = {name: join([each[name] for each in rounds]) for name in contenders}
    rows = [describe(name, result) for name, result in results.items()]
    print(table(plan, given.ranks, rows))
    flags.write(given.json, plan.record() | {"ranks": given.ranks, "results": results} | machine())
    if given.png:
        draw(given.png, rows, f"size {plan.size}: {SIZES[plan.size]}, {given.ranks} ranks on {plan.device}")


def join(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """What a contender needed in some rounds: all steps, the largest peak, and the mean of the predicted seconds."""
    planned = [each["planned_seconds"] for each in rounds if each["planned_seconds"] is not None]
    return rounds[0] | {
        "seconds": [turn for each in rounds for turn in each["seconds"]],
        "losses": [loss for each in rounds for loss in each["losses"]],
        "peak": max(each["peak"] for each in rounds),
        "predicted": max(each["predicted"] for each in rounds),
        "planned_seconds": fmean(planned) if planned else None,
    }


def list_budgets(size: Size, ranks: int, count: int) -> list[int]:
    """Bytes, from just above the least peak to the peak of stage 2."""
    step, mesh, args = make_step(size, ranks)
    most = fzero.simulate(step, mesh, stage=2).trace(*args).memory().peak
    least = ABOVE_LEAST * find_least(step, mesh, args)
    return [int(least + (most - least) * i / max(count - 1, 1)) for i in range(count)]


def make_step(size: Size, ranks: int, bf16: bool = False) -> tuple[Any, fzero.VirtualMesh, tuple[Any, ...]]:
    """A training step of a GPT, a mesh of virtual ranks, and arguments without data."""
    mesh = fzero.VirtualMesh(fsdp=ranks)
    config = GPTConfig(vocab=size.vocab, seq=size.seq, dim=size.dim, layers=size.layers, heads=size.dim // 64)
    with torch.device("meta"):
        params, apply = fzero.lower(GPT(config))
        tokens = torch.zeros(ranks * size.batch, size.seq, dtype=torch.int64)
    params = fzero.partition(params, mesh)
    return training_step(apply, bf16=bf16), mesh, (params, ADAMW.init(params), {"inputs": tokens, "targets": tokens})


def find_least(step: Any, mesh: fzero.VirtualMesh, args: tuple[Any, ...], **how: Any) -> int:
    """The least peak of a step, which the error of a budget of one byte names."""
    try:
        fzero.simulate(step, mesh, memory=1, **how).trace(*args)
    except fzero.FzeroError as error:
        return int(re.findall(r"at least (\d+) bytes", str(error))[0])
    raise AssertionError("a step fits into one byte")


def time_choices(layers: int) -> str:
    """Seconds of CPU until a step has its program, at stage 3 and with budgets, the least too, with all state on the
    device and where state may lie on the host, and what was chosen."""
    step, mesh, args = make_step(Size(layers=layers, dim=8192, seq=2048, batch=1, vocab=50304), 8)

    def trace(**how: Any) -> tuple[float, Any]:
        gc.collect()  # what the program before left
        start = time.process_time()
        program = fzero.simulate(step, mesh, **how).trace(*args)
        return time.process_time() - start, program

    plain, program = trace(stage=3)
    lines = [f"{layers} layers, {len(program.graph.nodes)} nodes: {plain:.1f} s at stage 3"]
    most = program.memory().peak
    for to in (None, fzero.host()):
        least = find_least(step, mesh, args, to=to) / most
        for part in (1.1, 0.95, 0.7, least):
            seconds, program = trace(memory=math.ceil(part * most), to=to)
            said = "\n".join(f"    {remark.strip()}" for remark in program.remarks)
            where = f"{part:.2f} of its peak" if to is None else f"{part:.2f} of its peak, to={to}"
            lines.append(f"  {where}: {seconds:.1f} s, {seconds - plain:.1f} more\n{said}")
    return "\n".join(lines)


class Planned(NamedTuple):
    """What a step takes within a budget, planned: with state on the host, and without where that fits. GiB, and ms."""

    budget: float
    resident: float | None
    with_host: float
    on_host: float
    remarks: tuple[str, ...]


def plan_to_host(layers: int, count: int) -> list[Planned]:
    """Budgets from the least with state on the host to the peak of stage 2."""
    size = Size(layers=layers, dim=4096, seq=2048, batch=1, vocab=32000)
    step, mesh, args = make_step(size, 8, bf16=True)
    least = ABOVE_LEAST * find_least(step, mesh, args, to=fzero.host())
    most = fzero.simulate(step, mesh, stage=2).trace(*args).memory().peak
    plans = []
    for i in range(count):
        budget = int(least + (most - least) * i / max(count - 1, 1))
        program = fzero.simulate(step, mesh, memory=budget, to=fzero.host()).trace(*args)
        try:
            resident = 1000 * fzero.simulate(step, mesh, memory=budget).trace(*args).timeline().seconds
        except fzero.FzeroError:
            resident = None
        seconds, on_host = program.timeline().seconds, program.memory().host / GIB
        plans.append(Planned(budget / GIB, resident, 1000 * seconds, on_host, program.remarks))
    return plans


def table_of_plans(plans: list[Planned]) -> str:
    """A line for each budget, and below it what was chosen."""
    lines = [f"{'budget GiB':>10}{'ms, on the device':>20}{'ms, to=host':>14}{'host GiB':>10}"]
    for plan in plans:
        resident = "impossible" if plan.resident is None else f"{plan.resident:.0f}"
        lines.append(f"{plan.budget:>10.1f}{resident:>20}{plan.with_host:>14.0f}{plan.on_host:>10.1f}")
        lines += [f"      {remark.strip()}" for remark in plan.remarks if " of " in remark and "layers" in remark]
    return "\n".join(lines)


def draw_plans(path: Path, plans: list[Planned], title: str) -> None:
    """Writes a picture of time over memory, planned: with state on the host, and without."""
    from matplotlib.figure import Figure  # here: no other part needs it

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot(xlabel="budget of a rank, GiB", ylabel="milliseconds a step, planned", title=title)
    possible = [(plan.budget, plan.resident) for plan in plans if plan.resident is not None]
    axes.plot([plan.budget for plan in plans], [plan.with_host for plan in plans], "o-", label="to=fzero.host()")
    axes.plot([x for x, _ in possible], [y for _, y in possible], "s--", label="state on the device")
    axes.legend()
    figure.savefig(path, dpi=120)


def describe(name: str, result: dict[str, Any]) -> Row:
    """The row of a contender."""
    times = [1000 * seconds for turn in result["seconds"] for seconds in turn]
    planned = result["planned_seconds"] if name.startswith(BUDGET) else None  # others are not calibrated
    return Row(
        name,
        result["peak"] / MIB,
        result["predicted"] / MIB if result["predicted"] >= 0 else None,
        quartiles(times).median,
        1000 * planned if planned is not None else None,
        name.startswith(BUDGET),
    )


def table(plan: Plan, ranks: int, rows: list[Row]) -> str:
    """What is compared, a line for each contender, and the contenders that no budget dominates."""
    title = f"size {plan.size}: {SIZES[plan.size]}, {ranks} rank(s) on {plan.device}"
    head = f"{'':<24}{'peak MiB':>10}{'predicted':>11}{'of peak':>9}{'ms a step':>11}{'predicted':>11}{'of time':>9}"
    left = [row.name for row in rows if not row.is_budget and not is_dominated(row, rows)]
    end = f"no budget dominates {', '.join(left)}" if left else "each other contender is dominated by a budget"
    return "\n".join([title, head, *map(line, rows), end])


def line(row: Row) -> str:
    """One line of the table; what is not predicted is a dash."""
    name = f"{int(row.name.removeprefix(BUDGET)) / MIB:.1f} MiB" if row.is_budget else row.name
    pairs = (row.predicted_peak, row.peak), (row.predicted_milliseconds, row.milliseconds)
    parts = [("-", "-") if said is None else (f"{said:.1f}", f"{said / seen:.3f}") for said, seen in pairs]
    peak, time = (f"{said:>11}{ratio:>9}" for said, ratio in parts)
    return f"{name:<24}{row.peak:>10.1f}{peak}{row.milliseconds:>11.1f}{time}"


def is_dominated(row: Row, rows: list[Row]) -> bool:
    """Whether some budget needs at most as much memory and at most as much time."""
    return any(x.is_budget and x.peak <= row.peak and x.milliseconds <= row.milliseconds for x in rows)


def draw(path: Path, rows: list[Row], title: str) -> None:
    """Writes a picture of time over memory: budgets as a line, other contenders as points."""
    from matplotlib.figure import Figure  # here: no other part needs it

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot(xlabel="peak of tensors on a rank, MiB", ylabel="milliseconds a step", title=title)
    budgets = sorted((row for row in rows if row.is_budget), key=lambda row: row.peak)
    axes.plot([row.peak for row in budgets], [row.milliseconds for row in budgets], "o-", label="fzero, memory=")
    said = [(row.predicted_peak, row.predicted_milliseconds) for row in budgets]
    axes.plot(*zip(*said), "--", color="gray", label="predicted")
    for row in rows:
        if not row.is_budget:
            axes.plot(row.peak, row.milliseconds, "x" if row.name.startswith("fzero") else "s", color="black")
            axes.annotate(row.name, (row.peak, row.milliseconds), textcoords="offset points", xytext=(4, 4))
    axes.margins(x=0.15)
    axes.legend()
    figure.savefig(path, dpi=120)


def parse() -> argparse.Namespace:
    """The flags of the command line."""
    parser = flags.parser(__doc__)
    parser.add_argument("--contenders", default=OTHERS, help="beside the budgets")
    parser.add_argument("--budgets", type=int, default=10, help="how many")
    parser.add_argument("--rounds", type=int, default=2, help="launches of each contender, in turns")
    parser.add_argument("--steps", type=int, help="steps a turn (10 for S, 4 for larger ones)")
    parser.add_argument("--plan", type=int, help="time the choice for so many layers, and measure nothing else")
    parser.add_argument("--to-host", type=int, help="plan so many layers of width 4096, and measure nothing")
    parser.add_argument("--png", type=flags.picture, help="a file for a picture; needs matplotlib")
    return flags.parsed(parser)


if __name__ == "__main__":
    main(parse())
