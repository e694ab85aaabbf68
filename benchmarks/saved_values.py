"""Saved values: kept, computed again, or moved to the host and back. What a step needs and takes.

    python benchmarks/saved_values.py                    # both tables
    python benchmarks/saved_values.py --layers 8         # a smaller model for the plan
    python benchmarks/saved_values.py --budgets 24 32    # GiB of a rank, with and without the host

The first table is measured: the most bytes of live tensors that a rank of a small GPT has on the device and on the host
in a simulated step, beside the bytes that were predicted. The second table plans a model of 7 billion parameters: these
are on the meta device, rates are those that fzero guesses for a GPU (`fzero.program.rates`), with a link of 25 GB/s in
each direction between device and host. Nothing of it has run.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import flags
import torch
from fzero_steps import ADAMW, training_step
from machine import machine
from torch import Tensor

import fzero
from fzero.program.operation import Node
from fzero.program.places import find_places
from fzero.program.program import Program
from fzero.program.timeline import LINK

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from gpt import GPT, GPTConfig

GIB, KIB = 1 << 30, 1 << 10
POLICIES = {"kept": "keep", "computed again": None, "on the host": "offload"}


class Stack(GPT):
    """A GPT, each block of which is a region of `remat` with a policy, or none where that is "keep"."""

    def __init__(self, config: GPTConfig, policy: str | None) -> None:
        super().__init__(config)
        self.policy = policy

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x) if self.policy == "keep" else fzero.remat(block, self.policy)(x)
        return self.head(self.norm(x))


def main(given: argparse.Namespace) -> None:
    """Measures, plans, prints both tables and writes the record."""
    print("A GPT of 4 layers of width 64, 2 ranks, stage 3, fp32; KiB of a rank")
    print(f"{'saved values':<24}{'device, predicted':>20}{'measured':>10}{'host, predicted':>18}{'measured':>10}")
    small = [measure(name) for name in POLICIES]
    for row in small:
        sizes = [row[key] / KIB for key in ("peak", "device", "on_host", "host")]
        print(f"{row['name']:<24}{sizes[0]:>20.0f}{sizes[1]:>10.0f}{sizes[2]:>18.0f}{sizes[3]:>10.0f}")
    print(f"\n{given.layers} layers of width {given.dim} on {given.ranks} ranks, stage 3, bf16 compute; predicted")
    print(f"{'batch':>5}  {'saved values':<30}{'device GiB':>11}{'host GiB':>9}{'ms':>8}{'link ms':>9}{'hidden':>8}")
    plans = []
    for batch in given.batch:
        for name in POLICIES:
            plans.append(plan(name, batch, given))
        for size in given.budgets:
            plans += [plan("kept", batch, given, memory=size * GIB, to=to) for to in (None, fzero.host())]
    flags.write(given.json, {"measured": small, "plan": plans} | machine())


def begin(mesh: Any, config: GPTConfig, policy: str | None, batch: int) -> tuple[Any, tuple[Any, ...]]:
    """`(apply, arguments of a step)` with a batch of so many sequences a rank."""
    whole, apply = fzero.lower(Stack(config, policy))
    tokens = torch.zeros(batch * mesh.size(), config.seq, dtype=torch.int64)
    params = fzero.partition(whole, mesh)
    return apply, (params, ADAMW.init(params), {"inputs": tokens, "targets": tokens})


def measure(name: str) -> dict[str, Any]:
    """The bytes of a small model, predicted and measured."""
    mesh, config = fzero.VirtualMesh(fsdp=2), GPTConfig(vocab=256, seq=64, dim=64, layers=4, heads=2)
    apply, args = begin(mesh, config, POLICIES[name], batch=4)
    step = fzero.simulate(training_step(apply), mesh)
    program = step.trace(*args)
    most = {"device": 0, "host": 0}
    places = {node.name: where for node, where in find_places(program).items()}

    def watch(node: Node, ranks: list[dict[Node, Any]]) -> None:
        for held in ranks:
            now: dict[str, dict[int, int]] = {"device": {}, "host": {}}
            for each, value in held.items():
                is_batch = each.op == "placeholder" and value.dtype == torch.int64
                for x in list_tensors(value):
                    size = x.nbytes if is_batch else x.untyped_storage().nbytes()
                    now[places.get(each.name, "device")][x.untyped_storage()._cdata] = size
            for where, storages in now.items():
                most[where] = max(most[where], sum(storages.values()))

    step(*args, watch=watch)
    memory = program.memory()
    return {"name": name, "peak": memory.peak, "on_host": memory.host, **most}


def list_tensors(value: Any) -> list[Tensor]:
    """The tensors in a value of a program."""
    if isinstance(value, Tensor):
        return [value]
    is_list = not isinstance(value, (int, str)) and hasattr(value, "__iter__")
    return [x for item in value for x in list_tensors(item)] if is_list else []


def plan(name: str, batch: int, given: argparse.Namespace, **budget: Any) -> dict[str, Any]:
    """What a step of the large model needs and takes, as predicted. Prints a row of the table."""
    mesh = fzero.VirtualMesh(fsdp=given.ranks)
    config = GPTConfig(vocab=32000, seq=2048, dim=given.dim, layers=given.layers, heads=given.dim // 128)
    with torch.device("meta"):
        apply, args = begin(mesh, config, POLICIES[name], batch)
    start = time.perf_counter()
    program = fzero.simulate(training_step(apply, bf16=True), mesh, **budget).trace(*args)
    row = {"name": name, "batch": batch, "built_in": time.perf_counter() - start, **describe(program)}
    if budget:
        where = " and the host" if budget["to"] else ""
        row |= {"name": f"chosen for {budget['memory'] // GIB} GiB{where}", "remarks": program.remarks}
    sizes = f"{row['peak'] / GIB:>11.1f}{row['on_host'] / GIB:>9.1f}"
    times = f"{1000 * row['seconds']:>8.0f}{1000 * row['link']:>9.0f}{row['hidden']:>8.0%}"
    print(f"{batch:>5}  {row['name']:<30}{sizes}{times}", flush=True)
    return row


def describe(program: Program) -> dict[str, float]:
    """The bytes and seconds of a program."""
    memory, timeline = program.memory(), program.timeline()
    link = sum(x.end - x.start for x in timeline.lanes.get(LINK, ()))
    hidden = timeline.hidden("to_host", "to_device")
    return {
        "peak": memory.peak, "on_host": memory.host, "seconds": timeline.seconds, "link": link, "hidden": hidden
    }  # fmt: skip


def parse() -> argparse.Namespace:
    """The flags of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--dim", type=int, default=4096)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--batch", type=int, nargs="+", default=[4], help="sequences a rank")
    parser.add_argument("--budgets", type=int, nargs="*", default=[], help="GiB of a rank")
    parser.add_argument("--json", type=Path, help="a file for every figure, the versions and the machine")
    return parser.parse_args()


if __name__ == "__main__":
    main(parse())
