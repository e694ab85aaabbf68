"""Likeness: ranks along a model axis take the same batch. They compare hashes before a step."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Sequence

from torch import Tensor

from fzero.base.errors import FzeroError
from fzero.ranks.agreement import Largest
from fzero.ranks.ranks import Ranks

_LEAST = -(2**63)


def check_alike(on: Ranks, model_axes: Sequence[str], batch: Sequence[tuple[str, Tensor]]) -> None:
    """Return once the tensors of a batch, each with its path, are the same on all ranks along model axes.

    One all-reduce on the host, of 16 bytes for each tensor and position along the data axes. A tensor of an accelerator
    is copied to the host.

    Raises:
        FzeroError: on all ranks, with the first tensor that differs, and the axes.
    """
    mesh = on.mesh
    axes = [axis for axis in model_axes if mesh.size(axis) > 1]
    if on.members.is_alone or not axes or not batch:
        return
    data = mesh.join(axis for axis in mesh.names if axis not in axes)
    at, count = mesh.position(on.number, data), mesh.size(data)
    numbers = [_LEAST] * (2 * count * len(batch))
    for i, (_, x) in enumerate(batch):
        number, start = hash_elements(x), 2 * (i * count + at)
        numbers[start : start + 2] = number, -number
    what = f"agreement on the batch along {mesh.join(axes)}"
    with on.members.begin(what):
        found = Largest(tuple(numbers)).run(on.members)
    for i, (path, _) in enumerate(batch):
        for position in range(count):
            largest, smallest = found[2 * (i * count + position) :][:2]
            if largest != -smallest:
                problem = f"differs between ranks along {mesh.join(axes)!r}, which take the same batch"
                way_out = "give these ranks one batch, or name the axis in data= where each takes its own"
                raise FzeroError(f"argument {path}", problem, way_out)


def hash_elements(x: Tensor) -> int:
    """A number of 62 bits for the form and the elements of a tensor."""
    flat = x.detach().cpu().reshape(-1).contiguous()
    hashed = hashlib.blake2b(f"{x.dtype} {list(x.shape)}".encode(), digest_size=8)
    if flat.numel():
        hashed.update((ctypes.c_char * flat.nbytes).from_address(flat.data_ptr()))
    return int.from_bytes(hashed.digest(), "big") >> 2
