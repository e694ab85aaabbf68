"""Common home: the one mesh that the leaves of a tree lie on, for what its ranks do together."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fzero.base.errors import FzeroError
from fzero.ranks.homes import Home
from fzero.ranks.live import Live
from fzero.ranks.virtual import Virtual
from fzero.values.sharded import Sharded


def find_common_home(leaves: Iterable[tuple[str, Any]]) -> Home | None:
    """The `Live` or `Virtual` that the `Sharded` leaves lie on, of leaves with their paths; None where there are none.

    Raises:
        FzeroError: for leaves on several meshes, and for leaves inside of a step.
    """
    sharded = [(path, leaf) for path, leaf in leaves if isinstance(leaf, Sharded)]
    for path, leaf in sharded:
        first, other = sharded[0]
        if leaf.on.is_tracing:
            raise FzeroError(path, "is saved inside of a step, where it has no values", "save what the step returns")
        if leaf.on is not other.on:
            problem = f"lies on {leaf.on.mesh}, {first} on {other.on.mesh}: other process groups"
            raise FzeroError(path, problem, "save the leaves of one mesh together")
    on = sharded[0][1].on if sharded else None
    return on if isinstance(on, (Live, Virtual)) else None
