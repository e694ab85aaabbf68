"""Homes: where values outside of a step are: on this rank of a mesh, or on all virtual ranks in this process."""

from __future__ import annotations

from typing import Any, Protocol

from fzero.base.errors import FzeroError
from fzero.base.mesh import VirtualMesh
from fzero.ranks.live import Live, live
from fzero.ranks.virtual import Virtual, virtual

Home = Live | Virtual


class OnMesh(Protocol):
    """What has a mesh: a home, or the trace of a step."""

    mesh: VirtualMesh


def find_home(mesh: Any) -> Home:
    """The one home of a mesh: a `DeviceMesh` has one on each rank, and the first call is collective.

    Raises:
        FzeroError: as `live` does.
    """
    return virtual(mesh) if isinstance(mesh, VirtualMesh) else live(mesh)


def check_rank(where: str, rank: int, on: OnMesh) -> None:
    """Refuse a global rank that a mesh does not have."""
    ranks = on.ranks if isinstance(on, Live) else range(on.mesh.size())
    if rank not in ranks:
        raise FzeroError(where, f"is {rank}, the mesh has ranks {list(ranks)}", "name one of them")
