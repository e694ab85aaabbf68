"""Objects: Python values, and tensors, that ranks exchange on the host. torch's own exchange of Python values needs
numpy, which torch does not bring."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fzero.files.memory import memory_of


def gather_objects(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """The value of each rank of a group of the host, in the order of ranks: torch's `all_gather_object`."""
    said = pickle.dumps(value)
    sizes = gather_tensors(torch.tensor([len(said)], device="cpu"), group)
    padded = bytearray(said.ljust(max(map(int, sizes))))
    heard = gather_tensors(torch.frombuffer(padded, dtype=torch.uint8), group)
    return [pickle.loads(memory_of(x)[: int(size)]) for x, size in zip(heard, sizes)]


def gather_tensors(
    mine: Tensor, group: dist.ProcessGroup | None, wait: Callable[[dist.Work], object] = lambda work: work.wait()
) -> list[Tensor]:
    """The tensor of each rank of a group of the host, in the order of ranks. All have one size."""
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    wait(dist.all_gather(every, mine, group=group, async_op=True))
    return every
