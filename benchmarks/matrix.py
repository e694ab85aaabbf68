"""How fast a device multiplies matrices, measured in turns with what trains on it: the whole of which MFU is a part."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from training import Batch, Contender, Setup

SIDE = {"cuda": 8192, "cpu": 128}  # a core may need 25 ms for a product of 256 in bf16
PRODUCTS = 20  # a step: long enough that starting them costs nothing


def matrix(build: Callable[[], nn.Module], mesh: DeviceMesh, bf16: bool) -> Contender:
    """A contender that trains nothing: a step is `flops` of products of square matrices."""
    device = torch.device(mesh.device_type)
    side, dtype = SIDE[mesh.device_type], torch.bfloat16 if bf16 else torch.float32
    left, right = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(left)

    def step(batch: Batch) -> Tensor:
        for _ in range(PRODUCTS):
            torch.mm(left, right, out=out)
        return torch.zeros((), device=device)

    return Contender(step)


CONTENDERS: dict[str, Setup] = {"matrix": matrix}


def rate(mesh: DeviceMesh, bf16: bool) -> float:
    """Floating-point operations a second of the median of ten steps."""
    step, seconds = matrix(nn.Module, mesh, bf16).step, []
    for _ in range(12):
        begin = time.perf_counter()
        step({})
        if mesh.device_type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    del step
    if mesh.device_type == "cuda":
        torch.cuda.empty_cache()
    return flops(mesh.device_type) / median(seconds[2:])


def flops(device: str) -> int:
    """Floating-point operations of a step."""
    return PRODUCTS * 2 * SIDE[device] ** 3
