"""State on the host or a disk: how fast the host updates it, what a step of a 7B model is predicted to take with it,
and steps that run beside DeepSpeed's.

    python benchmarks/offload.py                     # all three
    python benchmarks/offload.py --plan              # the prediction alone: nothing is timed
    python benchmarks/offload.py --batch 1 4 16      # sequences of 2,048 tokens a rank
    python benchmarks/offload.py --size M --steps 4  # of the steps that run

The first table has the bytes that AdamW's fused kernel reads and writes in a second, beside a plain copy that moves as
many. The second is a plan: parameters are on the meta device, rates are those that fzero guesses for a GPU
(`fzero.program.rates`), with a link of 25 GB/s between device and host and a disk of 3 GB/s for each rank. Nothing of
it X
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import flags
import torch
from contenders import able
from fzero_steps import ADAMW, training_step
from launch import run, run_each
from machine import machine
from quartiles import quartiles
from runs import Plan

import fzero
from fzero.optim.fused import make_update
from fzero.program.timeline import DISK, HOST, LINK

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from gpt import GPT, GPTConfig

MIB, GIB = 1 << 20, 1 << 30
CLIPPED = fzero.optim.chain(fzero.optim.clip_by_global_norm(1.0), ADAMW)
HOST_MEMORY, FILES = fzero.host(), fzero.disk("/tmp")  # a plan writes nothing
PLACES: dict[str, tuple[Any, Any, Any]] = {
    "all on the device": (None, None, ADAMW),
    "optimizer on the host": (None, HOST_MEMORY, ADAMW),
    "all on the host": (HOST_MEMORY, HOST_MEMORY, ADAMW),
    "optimizer on a disk": (None, FILES, ADAMW),
    "all on a disk": (FILES, FILES, ADAMW),
    "all on the device, clipped": (None, None, CLIPPED),
    "optimizer on the host, clipped": (None, HOST_MEMORY, CLIPPED),
    "optimizer on a disk, clipped": (None, FILES, CLIPPED),
}
"""Name -> where parameters and optimizer state lie, and the optimizer."""
CONTENDERS = "fzero-2,fzero-2-offload,fzero-3,fzero-3-offload,deepspeed-2-offload,deepspeed-3-offload"


def main(given: argparse.Namespace) -> None:
    """Measures, plans, prints the tables and writes the record."""
    record: dict[str, Any] = {}
    if not given.plan:
        record["update"] = rates = measure(given.mib)
        print(f"AdamW on {given.mib} MiB of parameters: {rates['update']:.1f} GB/s, a copy {rates['copy']:.1f} GB/s")
    record["plan"] = [plan(name, batch, given) for batch in given.batch for name in PLACES]
    print_plan(
        record["plan"], f"{given.layers} layers of width {given.dim} on {given.ranks} ranks, stage 3, bf16 compute"
    )
    if not given.plan:
        chosen = able(tuple(filter(None, given.contenders.split(","))), "cpu")
        steps = Plan(chosen, given.size, "time", rounds=4, steps=given.steps)
        record["times"] = run(steps, 2, given.timeout)
        record["peaks"] = run_each(replace(steps, meter="memory"), 2, given.timeout)
        print_steps(record["times"], record["peaks"], f"size {given.size}, two ranks")
    flags.write(given.json, record | machine())


def print_plan(rows: list[dict[str, Any]], title: str) -> None:
    """The second table. `more` is what state elsewhere adds to the step."""
    print(f"\n{title}; predicted")
    heads = ("batch", 5), ("where", 32), ("device GiB", 12), ("host", 6), ("disk", 6), ("ms", 7), ("more", 6)
    lanes = ("link ms", 9), ("host", 6), ("disk", 6), ("hidden", 8)
    print("".join(f"{name:>{width}}" for name, width in (*heads, *lanes)))
    for row in rows:
        resident = next(x for x in rows if x["batch"] == row["batch"] and x["is_clipped"] == row["is_clipped"])
        sizes = f"{row['peak'] / GIB:>12.1f}{row['on_host'] / GIB:>6.1f}{row['on_disk'] / GIB:>6.1f}"
        times = f"{1000 * row['seconds']:>7.0f}{1000 * (row['seconds'] - resident['seconds']):>6.0f}"
        busy = f"{1000 * row['link']:>9.0f}{1000 * row['host']:>6.0f}{1000 * row['disk']:>6.0f}{row['hidden']:>8.0%}"
        print(f"{row['batch']:>5}{row['where']:>32}{sizes}{times}{busy if row['link'] else ''}")


def print_steps(times: dict[str, Any], peaks: dict[str, Any], title: str) -> None:
    """The third table."""
    print(f"\n{title}; measured\n{'':<24}{'peak MiB':>10}{'ms a step':>11}")
    for name, result in times.items():
        seconds = quartiles([each for turn in result["seconds"] for each in turn]).median
        print(f"{name:<24}{peaks[name]['peak'] / MIB:>10.1f}{1000 * seconds:>11.1f}")


def measure(mib: int) -> dict[str, float]:
    """GB read and written in a second, by an update and by a copy, each the median of nine."""
    update, nbytes = make_update(mib * MIB // 4)
    source = torch.rand(nbytes // 8)
    target = torch.empty_like(source)
    return {name: nbytes / clock(do) / 1e9 for name, do in (("update", update), ("copy", lambda: target.copy_(source)))}


def clock(do: Callable[[], Any]) -> float:
    """The median of nine times, in seconds, after one more."""
    taken = []
    for _ in range(10):
        start = time.perf_counter()
        do()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[1:])


def plan(where: str, batch: int, given: argparse.Namespace) -> dict[str, Any]:
    """What a step needs and takes, as predicted. `hidden`: the part of the copies during which the device computes."""
    mesh, (of_params, of_state, optimizer) = fzero.VirtualMesh(fsdp=given.ranks), PLACES[where]
    config = GPTConfig(vocab=32000, seq=2048, dim=given.dim, layers=given.layers, heads=given.dim // 128)
    with torch.device("meta"):
        whole, apply = fzero.lower(GPT(config))
        tokens = torch.zeros(batch * given.ranks, config.seq, dtype=torch.int64)

    params = fzero.partition(whole, mesh, to=of_params)
    args = params, optimizer.init(params, to=of_state), {"inputs": tokens, "targets": tokens}
    program = fzero.simulate(training_step(apply, optimizer, bf16=True), mesh).trace(*args)
    memory, timeline = program.memory(), program.timeline()
    busy = {lane: sum(x.end - x.start for x in timeline.lanes.get(lane, ())) for lane in (LINK, HOST, DISK)}
    return {
        "where": where, "batch": batch, "is_clipped": optimizer is CLIPPED, "peak": memory.peak, "on_host": memory.host,
        "seconds": timeline.seconds, "compute": timeline.compute, "link": busy[LINK], "host": busy[HOST],
        "disk": busy[DISK], "hidden": timeline.hidden("to_host", "to_device", "read", "write"), "on_disk": memory.disk,
    }  # fmt: skip


def parse() -> argparse.Namespace:
    """The flags of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--plan", action="store_true", help="nothing is timed")
    parser.add_argument("--mib", type=int, default=128, help="of parameters, for the updates")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--dim", type=int, default=4096)
    parser.add_argument("--ranks", type=int, default=8, help="of the plan")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8], help="sequences a rank, of the plan")
    parser.add_argument("--contenders", default=CONTENDERS, help="of the steps that run")
    parser.add_argument("--size", default="S", help="of the steps that run")
    parser.add_argument("--steps", type=int, default=5, help="steps a turn, of which each contender has four")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for a launch")
    parser.add_argument("--json", type=Path, help="a file for every figure, the versions and the machine")
    return parser.parse_args()


if __name__ == "__main__":
    main(parse())
