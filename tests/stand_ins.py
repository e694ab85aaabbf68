"""Ranks of a mesh without processes, for what a rank writes: as much of a `Live` as saving reads. A helper of the
tests."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

from fzero.base.mesh import VirtualMesh


def live_stand_ins(mesh: VirtualMesh) -> list[Any]:
    """The attributes of `Live` that saving reads, for every rank of a mesh, row by row."""
    return [
        SimpleNamespace(
            mesh=mesh,
            number=number,
            rank=dict(zip(mesh.names, ranks))[mesh.shard_axis],
            along=dict(zip(mesh.names, ranks)).__getitem__,
            is_tracing=False,
        )
        for number, ranks in enumerate(product(*(range(mesh.size(axis)) for axis in mesh.names)))
    ]
