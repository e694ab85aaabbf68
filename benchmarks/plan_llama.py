"""Seconds and memory to plan a training step of transformers' Llama of 405 billion parameters on 16,384 ranks that are
not there, in bfloat16 with AdamW, a row of 4,096 tokens for each rank, or each group of ranks that share layers.

    python benchmarks/plan_llama.py                          # stage 3
    python benchmarks/plan_llama.py --memory 80GiB           # a plan within a budget
    python benchmarks/plan_llama.py --layers 32 --ranks 64
    python benchmarks/plan_llama.py --tp 8                   # eight ranks share layers and rows, by transformers' plan

Parameters are on the meta device. A plan is a trace, its passes, and what the program keeps alive.
"""

from __future__ import annotations

import argparse
import resource
import time
from typing import Any

import torch
from machine import machine
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import fzero
import fzero.hf

GIB, LENGTH, VOCABULARY = 1 << 30, 4096, 128256
SIZES = {"hidden_size": 16384, "intermediate_size": 53248, "num_attention_heads": 128, "num_key_value_heads": 8}
ADAMW = fzero.optim.adamw(1e-4)


def main() -> None:
    """Prints seconds of the processor, and the peak of this process and of the step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=126)
    parser.add_argument("--ranks", type=int, default=16384)
    parser.add_argument("--tp", type=int, default=1, help="ranks that share layers; --ranks counts them too")
    parser.add_argument("--memory", help="a budget, in the place of stage 3")
    options = parser.parse_args()
    print(machine())
    torch.set_num_threads(1)
    rows = options.ranks // options.tp
    mesh = fzero.VirtualMesh(fsdp=rows, tp=options.tp) if options.tp > 1 else fzero.VirtualMesh(fsdp=rows)
    with torch.device("meta"):
        config = LlamaConfig(vocab_size=VOCABULARY, num_hidden_layers=options.layers, **SIZES)
        model = LlamaForCausalLM(config).to(torch.bfloat16).train()
        tokens = torch.zeros(rows, LENGTH, dtype=torch.int64)

    def train_step(params: Any, opt_state: Any, batch: Tensor) -> Any:
        loss_of = fzero.value_and_grad(lambda p: apply(p, input_ids=batch, labels=batch, use_cache=False).loss)
        loss, grads = loss_of(params)
        updates, opt_state = ADAMW.update(grads, opt_state, params)
        return fzero.optim.apply_updates(params, updates), opt_state, loss

    params, apply = fzero.hf.parallel(model, mesh, tp="tp" if options.tp > 1 else None, plan=None)
    args, start = (params, ADAMW.init(params), tokens), time.process_time()
    program = fzero.simulate(train_step, mesh, memory=options.memory, data=("fsdp",)).trace(*args)
    peak, seconds = program.memory().peak, time.process_time() - start
    numel = sum(leaf.numel() for leaf in fzero.tree.leaves(params))
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"{numel / 1e9:.1f} billion parameters, {options.ranks:,} ranks, {len(program.graph.nodes):,} nodes")
    print(
        f"{seconds:.1f} s of the processor, {held / GIB:.2f} GiB of this process; a step peaks at {peak / GIB:.1f} GiB"
    )
    moved: dict[str, int] = {}
    for entry in program.comm():
        moved[entry.axis] = moved.get(entry.axis, 0) + entry.nbytes
    print("moved a step: " + ", ".join(f"{nbytes / GIB:.1f} GiB over {axis}" for axis, nbytes in moved.items()))
    print(*program.remarks, sep="\n")


if __name__ == "__main__":
    main()
