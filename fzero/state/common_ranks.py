"""Common ranks: those of the one mesh that the leaves of a tree lie on, for what they do together."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fzero.base.errors import FzeroError
from fzero.ranks.ranks import Ranks
from fzero.ranks.virtual import ALONE
from fzero.values.sharded import Sharded


def find_common_ranks(leaves: Iterable[tuple[str, Any]]) -> Ranks:
    """The ranks that the `Sharded` leaves lie on, of leaves with their paths; `ALONE` where there are none.

    Raises:
        FzeroError: for leaves on several meshes, and for leaves inside of a step.
    """
    found: dict[Ranks, str] = {}
    for path, leaf in leaves:
        if not isinstance(leaf, Sharded):
            continue
        if leaf.on.is_tracing:
            raise FzeroError(path, "is saved inside of a step, where it has no values", "save what the step returns")
        found.setdefault(leaf.ranks, path)
        if len(found) > 1:
            (on, first), _ = found.items()
            problem = f"lies on {leaf.on.mesh}, {first} on {on.mesh}: other process groups"
            raise FzeroError(path, problem, "save the leaves of one mesh together")
    return next(iter(found), ALONE)
