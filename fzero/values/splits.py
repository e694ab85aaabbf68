"""Splits: what knows no leaves that are split over model axes refuses them, by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fzero.base.errors import FzeroError

if TYPE_CHECKING:
    from fzero.values.sharded import Sharded


def check_unsplit(x: Sharded, what: str) -> None:
    """Refuse a leaf that is split over model axes, for what does not know its parts."""
    axis = x.form.layout.split_axis
    if axis:
        problem = f"is split over {axis!r}, and {what} knows no split leaves yet"
        raise FzeroError(x.path, problem, "leave the leaf out of split= of fzero.partition")
