"""Collectives by the name of a mesh axis: differentiable functions of trees, the identity outside `shard`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from fzero.base import tree
from fzero.values.moves import AllReduce, Extreme, Primitives

_current: ContextVar[Primitives | None] = ContextVar("fzero_primitives", default=None)


@contextmanager
def using(on: Primitives) -> Iterator[None]:
    """Within, the named-axis collectives below mean the mesh of `on`; outside they see one rank."""
    token = _current.set(on)
    try:
        yield
    finally:
        _current.reset(token)


def psum(x: tree.Tree, axis: str) -> tree.Tree:
    """The sum over ranks along a mesh axis, leaf by leaf; the same on every rank. The identity outside `shard`.

    Ranks hold [1, 2] and [10, 20]: both get [11, 22].
    """
    return _reduced(AllReduce, x, "sum", axis)


def pmean(x: tree.Tree, axis: str) -> tree.Tree:
    """The mean over ranks along a mesh axis, leaf by leaf; the same on every rank. The identity outside `shard`.

    Ranks hold [1, 2] and [3, 6]: both get [2, 4].
    """
    return _reduced(AllReduce, x, "avg", axis)


def pmax(x: tree.Tree, axis: str) -> tree.Tree:
    """The elementwise maximum over ranks along a mesh axis, leaf by leaf. The identity outside `shard`.

    Ranks hold [1, 9] and [3, 6]: both get [3, 9].
    """
    return _reduced(Extreme, x, "max", axis)


def axis_index(axis: str, device: torch.device | str = "cpu") -> Tensor:
    """This rank's position along a mesh axis, a 0-d int64 tensor; 0 outside `shard`."""
    on = _current.get()
    device = torch.device(device)
    if on is None:
        return torch.zeros((), dtype=torch.int64, device=device)
    on.mesh.size(axis)
    return on.axis_index(axis, device)


def _reduced(move: Any, x: tree.Tree, op: str, axis: str) -> tree.Tree:
    on = _current.get()
    if on is None:
        return x
    on.mesh.size(axis)  # an axis the mesh does not have is refused here
    return tree.map(lambda leaf: move.apply(leaf, on, op, (axis,)), x)
