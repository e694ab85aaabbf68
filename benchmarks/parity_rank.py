"""One rank of `parity.py`, started by `launch.py`: the losses of each contender in each precision."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import corpus
import torch
import torch.distributed as dist
from corpus import Cut
from gpt import GPT, GPTConfig
from means import mean
from parity_steps import CONTENDERS
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

CONFIG = GPTConfig(vocab=256, seq=32, dim=64, layers=2, heads=2)
WINDOWS = 16  # a step, of all ranks together
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
OVERFLOW, FACTOR = 5, 1e30
"""The step whose gradients overflow in fp16, and what its loss is multiplied by."""


def main(given: dict[str, Any], out: Path) -> None:
    """Writes {precision: {contender: losses}}: the loss before the first step and after each."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),), mesh_dim_names=("fsdp",))
    found = {
        precision: {name: losses(name, DTYPES[precision], given["steps"], mesh) for name in given["contenders"]}
        for precision in DTYPES
    }
    if dist.get_rank() == 0:
        out.write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def losses(name: str, compute: torch.dtype, steps: int, mesh: DeviceMesh) -> list[float]:
    """[steps + 1] means over the whole batch; the last is that of a batch that nobody trains on."""
    step, text = CONTENDERS[name](build, mesh, compute), corpus.stdlib().train
    cut = Cut(WINDOWS, CONFIG.seq) if "one device" in name else Cut(WINDOWS, CONFIG.seq, mesh.get_rank(), mesh.size())
    found = []
    for index in range(steps + 1):
        factor = FACTOR if compute == torch.float16 and index == OVERFLOW else 1.0
        found.append(mean(step(corpus.train_batch(text, cut, seed=0, step=index), factor)))
    return found


def build() -> nn.Module:
    torch.manual_seed(0)
    return GPT(CONFIG)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
