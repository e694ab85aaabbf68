"""Seconds of a step of a Llama by its own tensor plan, on two gloo ranks: `fzero.hf.parallel` beside transformers.

    python benchmarks/hf_parallel.py                # width 1,024
    python benchmarks/hf_parallel.py --width 256

A Llama of two layers in float32, AdamW, eager in both. The contenders have the same weights and batches,
and take turns in the same processes. Seconds are medians. The floor is a plain Llama of half the heads, columns and
vocabulary: the products and the update that each rank has to compute, and no word to the other one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import flags
import torch
import torch.distributed as dist
import transformers
from machine import machine
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.distributed import DistributedConfig

import fzero
import fzero.hf

RANKS, ROWS, LENGTH, RATE = 2, 2, 128, 1e-4
VOCABULARY = 4096
Step = Callable[[Tensor], Tensor]


def make_config(width: int, parts: int = 1) -> LlamaConfig:
    """A Llama, or what one of `parts` ranks has of it."""
    count = width // 64 // parts
    heads = {"num_attention_heads": count, "num_key_value_heads": count, "head_dim": 64, "num_hidden_layers": 2}
    sizes = {"vocab_size": VOCABULARY // parts, "hidden_size": width, "intermediate_size": 4 * width // parts}
    return LlamaConfig(**sizes, **heads, tie_word_embeddings=False)


def theirs(folder: str) -> Step:
    model = LlamaForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(tp_size=RANKS))
    groups: dict[bool, list[Any]] = {}
    for parameter in model.parameters():  # one list operation takes tensors of one mesh, or plain ones
        groups.setdefault(hasattr(parameter, "device_mesh"), []).append(parameter)
    optimizer = torch.optim.AdamW([{"params": each} for each in groups.values()], RATE, weight_decay=0.01, fused=True)
    return train_eagerly(model, optimizer)


def floor(width: int) -> Step:
    model = LlamaForCausalLM(make_config(width, RANKS))
    optimizer = torch.optim.AdamW(model.parameters(), RATE, weight_decay=0.01, fused=True)
    step = train_eagerly(model, optimizer)
    return lambda ids: step(ids % (VOCABULARY // RANKS))


def train_eagerly(model: Any, optimizer: torch.optim.Optimizer) -> Step:
    def step(ids: Tensor) -> Tensor:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def ours(folder: str) -> Step:
    mesh = init_device_mesh("cpu", (1, RANKS), mesh_dim_names=("fsdp", "tp"))
    params, apply = fzero.hf.parallel(LlamaForCausalLM.from_pretrained(folder), mesh)
    optimizer = fzero.optim.adamw(RATE, b1=0.9, b2=0.999, weight_decay=0.01)
    state = optimizer.init(params)

    def train(params: Any, state: Any, ids: Tensor) -> tuple[Any, Any, Tensor]:
        def loss_of(params: Any) -> Tensor:
            return apply(params, input_ids=ids, labels=ids, use_cache=False).loss

        loss, grads = fzero.value_and_grad(loss_of)(params)
        updates, state = optimizer.update(grads, state, params)
        return fzero.optim.apply_updates(params, updates), state, loss

    sharded = fzero.shard(train, mesh, data=("fsdp",))

    def step(ids: Tensor) -> Tensor:
        nonlocal params, state
        params, state, loss = sharded(params, state, ids)
        return loss

    return step


def run_rank(folder: str, width: int, steps: int) -> None:
    """One rank: seconds and losses of each contender, in turn."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    dist.init_process_group("gloo")
    contenders = {"transformers": theirs(folder), "fzero": ours(folder), "floor": floor(width)}
    draws = torch.Generator().manual_seed(0)
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    losses: dict[str, list[float]] = {name: [] for name in contenders}
    for i in range(steps + 1):
        ids = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=draws)
        for name, step in contenders.items():
            dist.barrier()
            begin = time.perf_counter()
            losses[name].append(float(step(ids)))
            if i > 0:  # the first traces
                seconds[name].append(time.perf_counter() - begin)
    if dist.get_rank() == 0:
        Path(folder, "out.json").write_text(json.dumps({"seconds": seconds, "losses": losses}))
    dist.barrier()  # gloo aborts ranks whose peers leave early
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--folder", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.folder:
        return run_rank(args.folder, args.width, args.steps)
    with TemporaryDirectory() as folder:
        torch.manual_seed(0)
        LlamaForCausalLM(make_config(args.width)).save_pretrained(folder)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
        command += ["--nproc-per-node", str(RANKS), __file__, "--folder", folder, "--steps", str(args.steps)]
        command += ["--width", str(args.width)]
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        found = json.loads(Path(folder, "out.json").read_text())
    medians = {name: statistics.median(each) for name, each in found["seconds"].items()}
    apart = max(abs(a - b) for a, b in zip(found["losses"]["transformers"], found["losses"]["fzero"]))
    for name, each in medians.items():
        print(f"{name:<13} {each:7.3f} s a step, last loss {found['losses'][name][-1]:.6f}")
    print(f"fzero takes {medians['fzero'] / medians['transformers']:.2f} of the time; losses differ by {apart:.1e}")
    print(f"the floor, which exchanges nothing, takes {medians['floor'] / medians['transformers']:.2f} of the time")
    flags.write(args.json, {**found, "medians": medians, "ranks": RANKS, "width": args.width} | machine())


if __name__ == "__main__":
    main()
