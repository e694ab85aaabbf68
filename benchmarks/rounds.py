"""What commands have in common that plan large steps and time small ones: flags, a mesh of one rank, and rounds."""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from machine import machine
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


def parse(documentation: str | None, results: Path) -> argparse.Namespace:
    """The flags `--plan`, `--rounds` and `--json`; `results` is the file where none is named."""
    parser = argparse.ArgumentParser(description=(documentation or "").partition("\n")[0])
    parser.add_argument("--plan", action="store_true", help="nothing is timed, and nothing written")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, default=results)
    return parser.parse_args()


@contextmanager
def one_rank() -> Iterator[DeviceMesh]:
    """A mesh of this process alone, with one thread."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        yield init_device_mesh("cpu", (1,), mesh_dim_names=("fsdp",))
        dist.destroy_process_group()


def time_rounds(
    steps: Mapping[str, Callable[[], Any]], rounds: int, align: Callable[[], Any] = lambda: None
) -> dict[str, list[float]]:
    """Name -> the seconds of its step in each round. In a round each step runs once; `align` runs in front of it."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, run in steps.items():
            align()
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def write(path: Path, record: Mapping[str, Any]) -> None:
    """The record and the machine, as JSON."""
    path.write_text(json.dumps({**record, **machine()}) + "\n")
