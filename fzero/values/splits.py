"""Splits: what knows no leaves that are split over model axes refuses them, by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fzero.base.errors import FzeroError

if TYPE_CHECKING:
    from fzero.values.sharded import Sharded


def check_unsplit(x: Sharded, what: str) -> None:
    """Refuse a leaf that is split over model axes, for what does not know its parts."""
    axes = x.form.layout.split_axes
    if axes:
        problem = f"is split over {x.form.layout.mesh.join(axes)!r}, and {what} knows no split leaves yet"
        raise FzeroError(x.path, problem, "leave the leaf out of split= of fzero.partition")
