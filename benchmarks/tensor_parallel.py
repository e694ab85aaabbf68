"""Seconds of a step of tensor parallelism beside torch's `parallelize_module`, and the peak of a rank's memory.

    python benchmarks/tensor_parallel.py                    # 2 gloo ranks along tp
    python benchmarks/tensor_parallel.py --fsdp 2           # 4 ranks: FSDP2 with DTensor beside split leaves

A decoder of two layers of width 1,024 in float32, AdamW. The contenders take turns in the same processes, with the same
batch and the same weights. Seconds are medians; a peak is that of a process with one contender, beyond its imports.
On two ranks the floor is plain torch with what one rank has of the weights: the products and the update that both have
to compute, and no word to another rank, so its loss is of no meaning.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
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
import torch.nn.functional as F
from machine import machine
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fzero

LAYERS, WIDTH, HEADS, ROWS, LENGTH, RATE = 2, 1024, 16, 2, 128, 1e-4
Step = Callable[[Tensor], Tensor]
SPLIT = {f"*.{name}.weight": ("tp", 0) for name in ("q", "k", "v", "up")} | {
    f"*.{name}.weight": ("tp", 1) for name in ("o", "down")
}


class Layer(nn.Module):
    """Attention, then a perceptron. It has as many heads as its projections have room for."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        q, k, v = (part(y).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for part in (self.q, self.k, self.v))
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(heads.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.second(x))))


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer() for _ in range(LAYERS)))


def eager(mesh: Any) -> Step:
    """torch's tensor parallelism, and FSDP2 where there are ranks along it."""
    model = make_model()
    plan: dict[str, Any] = {name: ColwiseParallel() for name in ("q", "k", "v", "up")}
    plan |= {name: RowwiseParallel() for name in ("o", "down")}
    for layer in model:
        parallelize_module(layer, mesh["tp"], plan)
        if mesh["fsdp"].size() > 1:
            fully_shard(layer, mesh=mesh["fsdp"])
    if mesh["fsdp"].size() > 1:
        fully_shard(model, mesh=mesh["fsdp"])
    groups: dict[Any, list[nn.Parameter]] = {}
    for parameter in model.parameters():  # one list operation takes tensors of one mesh, or plain ones
        groups.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    optimizer = torch.optim.AdamW([{"params": each} for each in groups.values()], RATE, weight_decay=0.01, fused=True)
    return train_eagerly(model, optimizer)


def train_eagerly(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def apply_layer(p: Any, x: Tensor) -> Tensor:
    """`Layer` with what this rank has of the projections."""
    y = F.layer_norm(x, (WIDTH,), p["first"]["weight"], p["first"]["bias"])
    q, k, v = (F.linear(y, p[n]["weight"]).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for n in "qkv")
    heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    x = x + fzero.psum(F.linear(heads.transpose(1, 2).flatten(-2), p["o"]["weight"]), "tp")
    y = F.layer_norm(x, (WIDTH,), p["second"]["weight"], p["second"]["bias"])
    return x + fzero.psum(F.linear(F.gelu(F.linear(y, p["up"]["weight"])), p["down"]["weight"]), "tp")


def ours(mesh: Any) -> Step:
    params, _ = fzero.lower(make_model())
    params = fzero.partition(params, mesh, split=SPLIT)
    optimizer = fzero.optim.adamw(RATE, b1=0.9, b2=0.999, weight_decay=0.01)
    state = optimizer.init(params)

    def loss_of(params: Any, x: Tensor) -> Tensor:
        for layer in params:
            x = apply_layer(layer, x)
        return x.square().mean()

    def train(params: Any, state: Any, x: Tensor) -> tuple[Any, Any, Tensor]:
        loss, grads = fzero.value_and_grad(loss_of)(params, x)
        updates, state = optimizer.update(grads, state, params)
        return fzero.optim.apply_updates(params, updates), state, loss

    sharded = fzero.shard(train, mesh, data=("fsdp",))

    def step(x: Tensor) -> Tensor:
        nonlocal params, state
        params, state, loss = sharded(params, state, x)
        return loss

    return step


def floor(mesh: Any) -> Step:
    """One rank's parts of the weights in plain torch, where none is cut along fsdp."""
    model, ranks = make_model(), mesh["tp"].size()
    for name, module in model.named_modules():
        leaf = name.rpartition(".")[2]
        if isinstance(module, nn.Linear):
            part = module.weight.detach().chunk(ranks, 1 if leaf in ("o", "down") else 0)[0]
            module.weight = nn.Parameter(part.clone())
    optimizer = torch.optim.AdamW(model.parameters(), RATE, weight_decay=0.01, fused=True)
    return train_eagerly(model, optimizer)


CONTENDERS: dict[str, Callable[[Any], Step]] = {"dtensor": eager, "fzero": ours, "floor": floor}


def list_contenders(fsdp: int) -> list[str]:
    return [name for name in CONTENDERS if fsdp == 1 or name != "floor"]


def run_rank(fsdp: int, steps: int, only: str, out: Path) -> None:
    """One rank: seconds of each contender in turn, or the peak of one."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (fsdp, dist.get_world_size() // fsdp), mesh_dim_names=("fsdp", "tp"))
    generator = torch.Generator().manual_seed(mesh.get_coordinate()[0])
    x = torch.randn(ROWS, LENGTH, WIDTH, generator=generator)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    contenders = {name: CONTENDERS[name](mesh) for name in list_contenders(fsdp) if name.startswith(only)}
    losses = {name: [float(step(x))] for name, step in contenders.items()}
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(steps):
        for name, step in contenders.items():
            dist.barrier()
            begin = time.perf_counter()
            losses[name].append(float(step(x)))
            seconds[name].append(time.perf_counter() - begin)
    if dist.get_rank() == 0:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        medians = {name: statistics.median(each) for name, each in seconds.items()}
        last = {name: each[-1] for name, each in losses.items()}
        out.write_text(json.dumps({"seconds": medians, "MiB": (peak - before) / 1024, "loss": last}))
    dist.barrier()  # gloo aborts ranks whose peers leave early
    dist.destroy_process_group()


def launch(args: argparse.Namespace, only: str) -> Any:
    with TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
        command += ["--nproc-per-node", str(2 * args.fsdp)]
        given = ["--fsdp", str(args.fsdp), "--steps", str(args.steps), "--only", only, "--rank-out", str(out)]
        subprocess.run([*command, __file__, *given], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        return json.loads(out.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fsdp", type=int, default=1, help="ranks along fsdp, beside two along tp")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", default="", help=argparse.SUPPRESS)
    parser.add_argument("--rank-out", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank_out is not None:
        return run_rank(args.fsdp, args.steps, args.only, args.rank_out)
    found = launch(args, "")
    peaks = {name: launch(args, name)["MiB"] for name in list_contenders(args.fsdp)}
    for name, seconds in found["seconds"].items():
        print(f"{name:<8} {seconds:7.3f} s a step, peak {peaks[name]:6.0f} MiB, loss {found['loss'][name]:.6f}")
    ratio, memory = (each["fzero"] / each["dtensor"] for each in (found["seconds"], peaks))
    print(
        f"fzero takes {ratio:.2f} of the time of DTensor, and {memory:.2f} of its memory, on {2 * args.fsdp} gloo ranks"
    )
    if "floor" in peaks:
        least = found["seconds"]["floor"] / found["seconds"]["dtensor"]
        print(f"the floor, which exchanges nothing, takes {least:.2f} of the time of DTensor")
    flags.write(args.json, {**found, "peaks": peaks, "ranks": 2 * args.fsdp, "steps": args.steps} | machine())


if __name__ == "__main__":
    main()
