"""How long a run takes to its first step: plain torch, a step that is traced, and a step whose program is in a folder.

    python benchmarks/start.py --layers 8 32 --ranks 1 --runs 3

Each start is a process of its own: imports of torch and of transformers, a narrow Llama, the first step. Medians.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

SIZES = {"hidden_size": 128, "intermediate_size": 344, "num_attention_heads": 4, "num_key_value_heads": 4}
WAYS = ("plain", "traced", "folder")


def start(way: str, layers: int, folder: str) -> None:
    """Print the seconds of each part of a start."""
    last, seconds = time.perf_counter(), dict[str, float]()

    def note(name: str) -> None:
        nonlocal last
        seconds[name], last = time.perf_counter() - last, time.perf_counter()

    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from transformers import LlamaConfig, LlamaForCausalLM

    note("imports")
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=512, num_hidden_layers=layers, **SIZES)).train()
    batch = torch.randint(512, (8, 64))
    note("model")
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    note("group")
    if way == "plain":
        wrapped = torch.nn.parallel.DistributedDataParallel(model) if dist.get_world_size() > 1 else model
        optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-4)
        wrapped(input_ids=batch, labels=batch, use_cache=False).loss.backward()
        optimizer.step()
    else:
        import fzero

        note("import of fzero")
        whole, apply = fzero.lower(model)
        adamw = fzero.optim.adamw(1e-4)
        args = (params := fzero.partition(whole, mesh)), adamw.init(params), batch
        note("birth")

        def train_step(params: Any, opt_state: Any, batch: torch.Tensor) -> Any:
            loss_of = fzero.value_and_grad(lambda p: apply(p, input_ids=batch, labels=batch, use_cache=False).loss)
            loss, grads = loss_of(params)
            updates, opt_state = adamw.update(grads, opt_state, params)
            return fzero.optim.apply_updates(params, updates), opt_state, loss

        fzero.shard(train_step, mesh, cache=folder if way == "folder" else None)(*args)
    note("first step")
    if dist.get_rank() == 0:
        print(repr(seconds))
    dist.barrier()  # gloo aborts ranks whose peers leave early
    dist.destroy_process_group()


def run(way: str, layers: int, ranks: int, folder: str) -> dict[str, float]:
    """The seconds of a start in processes of its own."""
    given = ["--way", way, "--layers", str(layers), "--folder", folder]
    launch = ["torch.distributed.run", "--nproc-per-node", str(ranks), "--standalone"]
    command = [sys.executable, "-m", *launch, __file__, *given]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    made: dict[str, float] = eval(done.stdout.strip().splitlines()[-1])
    return made | {"all": sum(made.values())}


def main() -> None:
    """Prints a column for each way, and the ratio of a start from a folder to a plain one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        return start(options.way, options.layers[0], options.folder)
    for layers in options.layers:
        folder = tempfile.mkdtemp()
        run("folder", layers, options.ranks, folder)  # writes the file
        taken = {way: [] for way in WAYS}  # type: dict[str, list[dict[str, float]]]
        for _ in range(options.runs):
            for way in WAYS:
                taken[way].append(run(way, layers, options.ranks, folder))
        shutil.rmtree(folder)
        medians = {
            way: {name: statistics.median(each[name] for each in rows) for name in rows[0]}
            for way, rows in taken.items()
        }
        print(f"{layers} layers, {options.ranks} ranks" + "".join(f"{way:>10}" for way in WAYS))
        for name in medians["folder"]:
            print(f"{name:18}" + "".join(f"{medians[way].get(name, 0.0):10.2f}" for way in WAYS))
        print(f"a start from a folder takes {medians['folder']['all'] / medians['plain']['all']:.2f} of a plain one")


if __name__ == "__main__":
    main()
