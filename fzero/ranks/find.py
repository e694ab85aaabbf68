"""Find: the one `Ranks` of a mesh."""

from __future__ import annotations

from typing import Any

from fzero.base.mesh import VirtualMesh
from fzero.ranks.live import live
from fzero.ranks.ranks import Ranks
from fzero.ranks.virtual import virtual


def find_ranks(mesh: Any) -> Ranks:
    """The one `Ranks` of a mesh: a `DeviceMesh` has one in each process, and the first call is collective.

    Raises:
        FzeroError: as `live` does.
    """
    return virtual(mesh) if isinstance(mesh, VirtualMesh) else live(mesh)
