"""Comm: the collectives of a program, from its graph, before anything runs."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Comm(NamedTuple):
    """One collective. `nbytes` is the size of the full buffer: the parts of all ranks together, padding included."""

    op: str  # the name of the collective, as of torch.distributed's: "all_gather", "all_to_all"
    axis: str
    bucket: str | None
    dtype: torch.dtype
    nbytes: int
