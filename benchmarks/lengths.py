"""Seconds of batches whose lengths change from step to step, as a collator that pads to the longest makes them.

    python benchmarks/lengths.py                                  # 30 batches on 1 rank and on 2 gloo ranks
    python benchmarks/lengths.py --ranks 2 --layers 16 --steps 300 --json benchmarks/results/lengths.json
    python benchmarks/lengths.py --restart                        # fzero's programs come from a folder
    python benchmarks/lengths.py --ranks 2 --apart                # each rank's batches have lengths of their own
    python benchmarks/lengths.py --ranks 2 --kv-cache             # the model is called without use_cache=False

transformers' Llama in float32. The contenders run one after the other in the same processes, with the same batches:
plain torch (one rank only), FSDP2, and fzero. Seconds of a step at a length that was seen before and at a new length
are medians; the first and the second length stand apart, because fzero traces at both.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import flags
import torch
import torch.distributed as dist
from machine import machine
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import fzero

VOCABULARY, ROWS, SHORTEST, LONGEST, RATE = 512, 4, 32, 512, 1e-4
Step = Callable[[Tensor], Any]


def make_model(layers: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 344, "num_attention_heads": 4, "num_key_value_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, num_hidden_layers=layers, **sizes)).train()


def choose(given: dict[str, Any]) -> dict[str, Any]:
    """The options with which every contender calls the model. By default it makes a cache of keys and values."""
    return {} if given["kv_cache"] else {"use_cache": False}


def eager(given: dict[str, Any], mesh: Any) -> Step:
    """Plain torch; FSDP2 where there is a mesh."""
    model, options = make_model(given["layers"]), choose(given)
    for module in (*model.model.layers, model) if mesh is not None else ():
        fully_shard(module, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), RATE, fused=True)

    def step(batch: Tensor) -> Tensor:
        loss = model(input_ids=batch, labels=batch, **options).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def ours(given: dict[str, Any], mesh: Any) -> Step:
    (params, apply), options = fzero.lower(make_model(given["layers"])), choose(given)
    params = fzero.partition(params, mesh)
    optimizer = fzero.optim.adamw(RATE, b1=0.9, b2=0.999, weight_decay=0.01)
    state = optimizer.init(params)

    def loss_of(params: Any, batch: Tensor) -> Tensor:
        return apply(params, input_ids=batch, labels=batch, **options).loss

    def train(params: Any, state: Any, batch: Tensor) -> tuple[Any, Any, Tensor]:
        loss, grads = fzero.value_and_grad(loss_of)(params, batch)
        updates, state = optimizer.update(grads, state, params)
        return fzero.optim.apply_updates(params, updates), state, loss

    sharded = fzero.shard(train, mesh, max_programs=64, cache=given["cache"])

    def step(batch: Tensor) -> Tensor:
        nonlocal params, state
        params, state, loss = sharded(params, state, batch)
        return loss

    return step


def run_rank(given: dict[str, Any], out: Path) -> None:
    """One rank: every contender on the same lengths."""
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (given["ranks"],), mesh_dim_names=("fsdp",))
    rank, world = dist.get_rank(), given["ranks"]
    contenders = {"eager": (eager, None)} if world == 1 else {"fsdp2": (eager, mesh)}
    contenders |= {"fzero": (ours, mesh)}
    draw = random.Random(rank if given["apart"] else 0)
    lengths = [draw.randint(SHORTEST, LONGEST) for _ in range(given["steps"])]
    found: dict[str, Any] = {"lengths": lengths}
    for name, (make, where) in contenders.items():
        step, seconds, losses = make(given, where), [], []
        for i, length in enumerate(lengths):
            seed = torch.Generator().manual_seed(i * world + rank)
            batch = torch.randint(VOCABULARY, (ROWS, length), generator=seed)
            start = time.perf_counter()
            losses.append(float(step(batch)))
            seconds.append(time.perf_counter() - start)
        mean = torch.tensor(losses, dtype=torch.float64)  # FSDP2's losses are those of a rank
        dist.all_reduce(mean)
        found[name] = {"seconds": seconds, "losses": (mean / world).tolist()}
    if rank == 0:
        out.write_text(json.dumps(found))
    dist.barrier()  # gloo aborts ranks whose peers leave early
    dist.destroy_process_group()


def summarize(found: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Contender -> seconds: in all, of the first and the second length, and medians of later steps."""
    lengths = found["lengths"]
    is_new = [length not in lengths[:i] for i, length in enumerate(lengths)]
    rows = {}
    for name in found.keys() - {"lengths"}:
        seconds = found[name]["seconds"]
        new = [x for x, fresh in zip(seconds[2:], is_new[2:]) if fresh]
        old = [x for x, fresh in zip(seconds[2:], is_new[2:]) if not fresh]
        rows[name] = {
            "all": sum(seconds),
            "first": seconds[0],
            "second": seconds[1],
            "new": statistics.median(new or [0.0]),
            "longest new": max(new or [0.0]),
            "known": statistics.median(old or [0.0]),
        }
    return rows


def launch(given: dict[str, Any]) -> dict[str, Any]:
    with TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
        run += ["--nproc-per-node", str(given["ranks"]), __file__, "--rank-of", json.dumps(given), "--out", str(out)]
        subprocess.run(run, check=True, timeout=given["timeout"], env={**os.environ, "OMP_NUM_THREADS": "1"})
        return json.loads(out.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", default="1,2")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--restart", action="store_true", help="run twice with one folder, print the second")
    parser.add_argument("--apart", action="store_true", help="ranks draw lengths of their own")
    parser.add_argument("--kv-cache", action="store_true", help="models make a cache, as by default")
    parser.add_argument("--timeout", type=float, default=900)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank_of:
        return run_rank(json.loads(given.rank_of), given.out)
    record: dict[str, Any] = {
        name: getattr(given, name) for name in ("layers", "steps", "restart", "apart", "kv_cache")
    } | machine()
    for ranks in map(int, given.ranks.split(",")):
        plan = {name: getattr(given, name) for name in ("layers", "steps", "timeout", "apart", "kv_cache")}
        plan |= {"ranks": ranks, "cache": None}
        if given.restart:
            with TemporaryDirectory() as folder:
                launch({**plan, "cache": folder})
                found = launch({**plan, "cache": folder})
        else:
            found = launch(plan)
        rows = summarize(found)
        record[f"{ranks} ranks"] = rows
        print(f"Llama of {given.layers} layers, {given.steps} lengths of {SHORTEST} to {LONGEST}, {ranks} rank(s)")
        print("".join(f"{x:>14}" for x in ("seconds", *next(iter(rows.values())))))
        for name, row in sorted(rows.items()):
            print(f"{name:>14}" + "".join(f"{x:>14.3f}" for x in row.values()), flush=True)
        first, *others = (found[name]["losses"] for name in sorted(rows))
        apart = max((abs(a - b) / abs(a) for other in others for a, b in zip(first, other)), default=0.0)
        print(f"losses apart by {apart:.1e}")
        if apart > 1e-3:
            sys.exit("the contenders did not train alike")
    flags.write(given.json, record)


if __name__ == "__main__":
    main()
