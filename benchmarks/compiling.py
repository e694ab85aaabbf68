"""Seconds of the first call of a compiled step, for models of more and more equal layers: it should hardly grow.

    python benchmarks/compiling.py                          # 6, 12 and 24 layers of size S's width, one rank
    python benchmarks/compiling.py --layers 6 24 --dim 768

Each model is compiled in a process of its own with an empty cache of inductor's, so nothing is compiled beforehand.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import flags
import torch
import torch.distributed as dist
from fzero_steps import sharded
from machine import machine
from torch.distributed.device_mesh import init_device_mesh

import fzero.transform

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from gpt import GPT, GPTConfig

Row = dict[str, float]


def first_call(layers: int, dim: int) -> Row:
    """Seconds of the first call of a step, those of it that inductor takes, and of the third; and how many functions
    were compiled."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("fsdp",))
    config = GPTConfig(vocab=2048, seq=128, dim=dim, layers=layers, heads=dim // 64)
    batch = {name: torch.zeros(1, config.seq, dtype=torch.int64) for name in ("inputs", "targets")}
    seconds: dict[str, list[float]] = {"step": [], "compile": []}

    def timed(name: str, do: Callable[..., Any], *args: Any) -> Any:
        start = time.perf_counter()
        result = do(*args)
        seconds[name].append(time.perf_counter() - start)
        return result

    fzero.transform.compile_fragment = partial(timed, "compile", fzero.transform.compile_fragment)
    contender = sharded(partial(GPT, config), mesh, False, stage=3, compile=True)
    for _ in range(3):
        timed("step", contender.step, batch)
    dist.destroy_process_group()
    first, _, third = seconds["step"]
    compiling = sum(seconds["compile"])
    return {
        "layers": layers, "functions": len(seconds["compile"]),
        "first": first, "compile": compiling, "rest": first - compiling - third, "third": third,
    }  # fmt: skip


def apart(layers: int, dim: int) -> Row:
    """`first_call` in a process of its own, with an empty cache."""
    with TemporaryDirectory() as cache:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            return pool.submit(first_call, layers, dim).result()


def main() -> None:
    """Prints a line for each number of layers, and writes the record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, nargs="+", default=[6, 12, 24])
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--json", type=Path, help="a file for every figure, the versions and the machine")
    options = parser.parse_args()
    rows = [apart(layers, options.dim) for layers in options.layers]
    print(f"GPT of width {options.dim}, seconds; the ratio is of first calls, to that of {options.layers[0]} layers")
    print(f"{'layers':>6}{'functions':>11}{'first call':>12}{'inductor':>10}{'trace etc.':>12}{'third':>8}{'ratio':>8}")
    for row in rows:
        cells = f"{row['first']:>12.2f}{row['compile']:>10.2f}{row['rest']:>12.2f}{row['third']:>8.3f}"
        print(f"{row['layers']:>6}{row['functions']:>11}{cells}{row['first'] / rows[0]['first']:>8.2f}")
    flags.write(options.json, {"dim": options.dim, "rows": rows} | machine())


if __name__ == "__main__":
    main()
