"""Objects: Python values that ranks exchange. torch's own exchange of them needs numpy, which torch does not bring."""

from __future__ import annotations

import pickle
from typing import Any

import torch
import torch.distributed as dist

from fzero.files.memory import memory_of


def gather_objects(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """The value of each rank of a group of the host, in the order of ranks: torch's `all_gather_object`."""
    said, world = pickle.dumps(value), dist.get_world_size(group)
    sizes = [torch.zeros(1, dtype=torch.int64, device="cpu") for _ in range(world)]
    dist.all_gather(sizes, torch.tensor([len(said)], device="cpu"), group=group)
    largest = max(map(int, sizes))
    mine = torch.frombuffer(bytearray(said.ljust(largest)), dtype=torch.uint8)
    heard = [torch.empty_like(mine) for _ in sizes]
    dist.all_gather(heard, mine, group=group)
    return [pickle.loads(memory_of(x)[: int(size)]) for x, size in zip(heard, sizes)]
