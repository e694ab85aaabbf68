"""Disk, on ranks with an address space that is too small for their state."""

from __future__ import annotations

import ctypes
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from processes import run
from programs import training
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import fzero
from fzero import initializers, optim, tree
from fzero.base.placement import Placement

LAYERS, WIDTH, STEPS, ROOM = 40, 400, 10, 18 << 20
M_MMAP_THRESHOLD = -3
ADAMW = optim.adamw(1e-3)


class Training(NamedTuple):
    """What one rank found: losses in memory and from files, the bytes of its state and whether they could be allocated,
    and the bytes that were read and written."""

    in_memory: list[float]
    from_files: list[float]
    nbytes: int
    fits: bool
    counted: tuple[int, int]
    predicted: tuple[int, int]
    twice: tuple[Tensor, Tensor]


def begin(mesh: DeviceMesh, to: Placement | None) -> tuple[Any, Any]:
    with torch.device("meta"):
        shapes = {"layers": [{"w": torch.empty(WIDTH, WIDTH), "b": torch.empty(WIDTH)} for _ in range(LAYERS)]}
    draw = initializers.normal(WIDTH**-0.5)
    params = fzero.init(shapes, mesh, lambda path, leaf: draw if leaf.ndim > 1 else initializers.zeros(), to=to)
    return params, ADAMW.init(params)


def train(step: Any, state: Any, batch: Tensor, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        *state, loss = step(*state, batch)
        losses.append(loss.item())
    return losses


@contextmanager
def room_of(nbytes: int) -> Iterator[None]:
    """Let this process have so many bytes of addresses more than now."""
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + nbytes, resource.RLIM_INFINITY))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def train_in_little_room(mesh: DeviceMesh, disk: Placement) -> Training:
    """Ten steps in memory, and ten from files in as little room."""
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 16)  # else glibc would keep freed memory of tensors
    step = fzero.shard(training(ADAMW), mesh)
    batch = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(mesh.get_rank()))
    in_memory = train(step, begin(mesh, None), batch, STEPS)
    first = begin(mesh, disk)  # its files stay open, and their threads run
    copies = step.report(*first, batch).copies
    store = first[0]["layers"][0]["w"].local.extent.store
    with room_of(ROOM):
        state = begin(mesh, disk)
        nbytes = sum(leaf.local.nbytes for leaf in tree.leaves(state) if not leaf.is_replicated)
        before = store.counts
        from_files = train(step, state, batch, STEPS)
        counted = store.counts.read - before.read, store.counts.written - before.written
        fits = can_allocate(nbytes)
    predicted = STEPS * copies["read"], STEPS * copies["write"]
    return Training(in_memory, from_files, nbytes, fits, counted, predicted, update_twice(mesh, disk))


def update_twice(mesh: DeviceMesh, disk: Placement) -> tuple[Tensor, Tensor]:
    """The new values of a step that writes over two arguments, which are one value. A calibration leaves both."""
    given = fzero.partition([torch.arange(6.0)], mesh, to=disk)
    step = fzero.shard(lambda p, q: ([p[0] + 1], [q[0] * 2]), mesh)
    step.calibrate(given, given)
    (first,), (second,) = fzero.unpartition(step(given, given))
    return first, second


def can_allocate(nbytes: int) -> bool:
    try:
        torch.empty(nbytes, dtype=torch.uint8)
    except RuntimeError:
        return False
    return True


def test_state_of_four_times_the_room_trains_as_in_memory(tmp_path: Path) -> None:
    """Two ranks, ten steps: the same losses to the bit, and as many bytes read and written as predicted."""
    ranks = run(2, train_in_little_room, fzero.disk(tmp_path))
    assert sum(each.nbytes for each in ranks) > 4 * ROOM and not any(each.fits for each in ranks)
    for each in ranks:
        assert each.from_files == each.in_memory and len({*each.in_memory}) == STEPS
        assert each.counted == each.predicted
        assert torch.equal(each.twice[0], torch.arange(6.0) + 1) and torch.equal(each.twice[1], torch.arange(6.0) * 2)
