"""Where the first step of transformers' Llama goes, in seconds of the processor: its trace, each pass, code, agreement.

    python benchmarks/first_step.py                        # 8 and 32 layers, each three times: medians
    python benchmarks/first_step.py --layers 8 32 80 --runs 1
    python benchmarks/first_step.py --kv-cache             # the model is called without use_cache=False

Beside them stand the first call of the step as a user makes it, and the first step of plain torch. One rank, narrow
layers: what is counted is what Python does for a node, and a step of wide layers has as many nodes. Each number of
layers has a process of its own.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from machine import machine
from plan import apart
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

import fzero
from fzero.base.garbage import pause_garbage_collection
from fzero.execution.codegen import link
from fzero.linked import Lines
from fzero.passes import defaults, resolve
from fzero.passes.run import name_of_pass, run_passes
from fzero.ranks.live import live
from fzero.tracing.trace import trace

VOCABULARY = 512
SIZES = {"hidden_size": 128, "intermediate_size": 344, "num_attention_heads": 4, "num_key_value_heads": 4}
ADAMW = fzero.optim.adamw(1e-4, b1=0.9, b2=0.999, weight_decay=0.01)
Seconds = dict[str, float]
Options = dict[str, Any]
"""What the model is called with beside a batch."""


def measure(seconds: Seconds, name: str, do: Callable[..., Any], *args: Any) -> Any:
    """What `do(*args)` returns. Adds its seconds of the processor under a name."""
    start = time.process_time()
    result = do(*args)
    seconds[name] = seconds.get(name, 0.0) + time.process_time() - start
    return result


def make_model(layers: int) -> Any:
    """A Llama of these layers."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, num_hidden_layers=layers, **SIZES)).train()


def step_plainly(layers: int, batch: Tensor, options: Options) -> Seconds:
    """The seconds of the first step of plain torch."""
    model, seconds = make_model(layers), Seconds()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        model(input_ids=batch, labels=batch, **options).loss.backward()
        optimizer.step()

    measure(seconds, "plain torch", step)
    return seconds


def take_apart(layers: int, batch: Tensor, mesh: Any, options: Options) -> Seconds:
    """The seconds of each part of a first step, and of a first call of a step that nobody took apart."""
    (whole, apply), on, seconds = fzero.lower(make_model(layers)), live(mesh), Seconds()
    args = (params := fzero.partition(whole, mesh), ADAMW.init(params), batch)

    def train_step(params: Any, opt_state: Any, batch: Tensor) -> Any:
        loss_of = fzero.value_and_grad(lambda p: apply(p, input_ids=batch, labels=batch, **options).loss)
        loss, grads = loss_of(params)
        updates, opt_state = ADAMW.update(grads, opt_state, params)
        return fzero.optim.apply_updates(params, updates), opt_state, loss

    with pause_garbage_collection():
        program = measure(seconds, "trace", trace, train_step, args, on.mesh)
        program = measure(seconds, "resolve", resolve, program)
        for rewrite in defaults(stage=3):
            program = measure(seconds, name_of_pass(rewrite), run_passes, program, [rewrite])
    measure(seconds, "code", link, program, on)
    lines = measure(seconds, "agreement", Lines, program, [])
    values = [x for x in fzero.tree.leaves(args) if isinstance(x, (Tensor, fzero.Sharded))]
    measure(seconds, "agreement", lines.agree, on.members, values)
    seconds["nodes"] = len(program.graph.nodes)
    step = fzero.shard(train_step, mesh)
    made = measure(seconds, "first call", step, *args)
    measure(seconds, "second call", step, *made[:2], batch)
    return seconds


def run(layers: int, runs: int, options: Options) -> Seconds:
    """The medians of the seconds of all parts."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh, batch = init_device_mesh("cpu", (1,), mesh_dim_names=("fsdp",)), torch.randint(VOCABULARY, (8, 64))
    take_apart(1, batch, mesh, options)  # imports, and records of operations
    taken = [take_apart(layers, batch, mesh, options) | step_plainly(layers, batch, options) for _ in range(runs)]
    dist.destroy_process_group()
    return {name: statistics.median(each[name] for each in taken) for name in taken[0]}


def main() -> None:
    """Prints a column for each number of layers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--kv-cache", action="store_true", help="models make a cache, as by default")
    given = parser.parse_args()
    options = {} if given.kv_cache else {"use_cache": False}
    print(machine())
    rows = [apart(run, layers, given.runs, options) for layers in given.layers]
    print(f"{'layers':18}" + "".join(f"{layers:10}" for layers in given.layers))
    for name in rows[0]:
        print(f"{name:18}" + "".join(f"{row[name]:10.0f}" if name == "nodes" else f"{row[name]:10.3f}" for row in rows))


if __name__ == "__main__":
    main()
