"""State on the host: how fast the host updates it, and what a step of a 7B model is predicted to take with it.

    python benchmarks/offload.py                     # both
    python benchmarks/offload.py --mib 256           # updates of so many MiB of parameters
    python benchmarks/offload.py --batch 1 4 16      # sequences of 2,048 tokens a rank

The first table has the bytes that AdamW's fused kernel reads and writes in a second, beside a plain copy that moves as
many. The second table is a plan: parameters are on the meta device, rates are those that fzero guesses for a GPU
(`fzero.program.rates`), with a link of 25 GB/s between device and host. Nothing of it has run.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flags
import torch
from fzero_steps import ADAMW, training_step
from machine import machine

import fzero
from fzero.optim.fused import fused_adamw_
from fzero.program.timeline import HOST, LINK

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from gpt import GPT, GPTConfig

MIB, GIB = 1 << 20, 1 << 30
PLACES = {
    "all on the device": (None, None),
    "optimizer on the host": (None, fzero.host()),
    "parameters and optimizer on the host": (fzero.host(), fzero.host()),
}


def main(given: argparse.Namespace) -> None:
    """Measures, plans, prints both tables and writes the record."""
    rates = measure(given.mib)
    print(f"AdamW on {given.mib} MiB of fp32 parameters: {rates['update']:.1f} GB/s, a copy {rates['copy']:.1f} GB/s")
    rows = [plan(name, batch, given) for batch in given.batch for name in PLACES]
    print(f"\n{given.layers} layers of width {given.dim} on {given.ranks} ranks, stage 3, bf16 compute; predicted")
    heads = ("batch", 5), ("where", 40), ("device GiB", 12), ("host GiB", 10), ("ms", 8), ("link ms", 9), ("host ms", 9)
    print("".join(f"{name:>{width}}" for name, width in heads))
    for row in rows:
        sizes = f"{row['peak'] / GIB:>12.1f}{row['on_host'] / GIB:>10.1f}"
        times = f"{1000 * row['seconds']:>8.0f}{1000 * row['link']:>9.0f}{1000 * row['host']:>9.0f}"
        print(f"{row['batch']:>5}{row['where']:>40}{sizes}{times}")
    flags.write(given.json, {"update": rates, "plan": rows} | machine())


def measure(mib: int) -> dict[str, float]:
    """GB read and written in a second, by an update and by a copy, each the median of nine."""
    numel = mib * MIB // 4
    params, grads, mu, nu = ([torch.rand(numel)] for _ in range(4))
    count, source = torch.ones((), dtype=torch.int32), torch.rand(7 * numel // 2)
    target = torch.empty_like(source)

    def update() -> None:
        fused_adamw_(params, grads, mu, nu, count, 1e-3, 0.9, 0.95, 1e-8, 0.1)

    nbytes = 7 * 4 * numel  # reads params, gradients and both means, writes all but gradients
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
    """What a step needs and takes, as predicted."""
    mesh, (of_params, of_state) = fzero.VirtualMesh(fsdp=given.ranks), PLACES[where]
    config = GPTConfig(vocab=32000, seq=2048, dim=given.dim, layers=given.layers, heads=given.dim // 128)
    with torch.device("meta"):
        whole, apply = fzero.lower(GPT(config))
        tokens = torch.zeros(batch * given.ranks, config.seq, dtype=torch.int64)

    params = fzero.partition(whole, mesh, to=of_params)
    args = params, ADAMW.init(params, to=of_state), {"inputs": tokens, "targets": tokens}
    program = fzero.simulate(training_step(apply, bf16=True), mesh).trace(*args)
    memory, timeline = program.memory(), program.timeline()
    busy = {lane: sum(x.end - x.start for x in timeline.lanes.get(lane, ())) for lane in (LINK, HOST)}
    return {
        "where": where, "batch": batch, "peak": memory.peak, "on_host": memory.host, "seconds": timeline.seconds,
        "compute": timeline.compute, "link": busy[LINK], "host": busy[HOST],
    }  # fmt: skip


def parse() -> argparse.Namespace:
    """The flags of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mib", type=int, default=128, help="of parameters, for the updates")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--dim", type=int, default=4096)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8], help="sequences a rank")
    parser.add_argument("--json", type=Path, help="a file for every figure, the versions and the machine")
    return parser.parse_args()


if __name__ == "__main__":
    main(parse())
