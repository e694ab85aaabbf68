"""A contender that raises in the middle of its steps: dry runs show that nobody else loses by it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from training import Batch, Contender, Setup


def broken(build: Callable[[], nn.Module], mesh: DeviceMesh, bf16: bool) -> Contender:
    """Steps that compute nothing, the fourth of which raises."""
    steps = count(1)

    def step(batch: Batch) -> Tensor:
        if next(steps) == 4:
            raise RuntimeError("this contender is broken")
        return torch.zeros((), device=mesh.device_type)

    return Contender(step)


CONTENDERS: dict[str, Setup] = {"broken": broken}
