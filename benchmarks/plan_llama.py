"""Seconds and memory to plan a training step of transformers' Llama of 405 billion parameters on 16,384 ranks that are
not there, in bfloat16 with AdamW, a row of 4,096 tokens a rank.

    python benchmarks/plan_llama.py                          # stage 3
    python benchmarks/plan_llama.py --memory 80GiB           # a plan within a budget
    python benchmarks/plan_llama.py --layers 32 --ranks 64

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

GIB, LENGTH, VOCABULARY = 1 << 30, 4096, 128256
SIZES = {"hidden_size": 16384, "intermediate_size": 53248, "num_attention_heads": 128, "num_key_value_heads": 8}
ADAMW = fzero.optim.adamw(1e-4)


def main() -> None:
    """Prints seconds of the processor, and the peak of this process and of the step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=126)
    parser.add_argument("--ranks", type=int, default=16384)
    parser.add_argument("--memory", help="a budget, in the place of stage 3")
    options = parser.parse_args()
    print(machine())
    torch.set_num_threads(1)
    mesh = fzero.VirtualMesh(fsdp=options.ranks)
    with torch.device("meta"):
        config = LlamaConfig(vocab_size=VOCABULARY, num_hidden_layers=options.layers, **SIZES)
        whole, apply = fzero.lower(LlamaForCausalLM(config).to(torch.bfloat16).train())
        tokens = torch.zeros(options.ranks, LENGTH, dtype=torch.int64)

    def train_step(params: Any, opt_state: Any, batch: Tensor) -> Any:
        loss_of = fzero.value_and_grad(lambda p: apply(p, input_ids=batch, labels=batch, use_cache=False).loss)
        loss, grads = loss_of(params)
        updates, opt_state = ADAMW.update(grads, opt_state, params)
        return fzero.optim.apply_updates(params, updates), opt_state, loss

    params = fzero.partition(whole, mesh)
    args, start = (params, ADAMW.init(params), tokens), time.process_time()
    program = fzero.simulate(train_step, mesh, memory=options.memory).trace(*args)
    peak, seconds = program.memory().peak, time.process_time() - start
    numel = sum(leaf.numel() for leaf in fzero.tree.leaves(whole))
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"{numel / 1e9:.1f} billion parameters, {options.ranks:,} ranks, {len(program.graph.nodes):,} nodes")
    print(
        f"{seconds:.1f} s of the processor, {held / GIB:.2f} GiB of this process; a step peaks at {peak / GIB:.1f} GiB"
    )
    print(*program.remarks, sep="\n")


if __name__ == "__main__":
    main()
