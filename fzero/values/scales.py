"""Scales: one number for each block of a leaf, beside the codes of 8-bit optimizer state."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fzero.base.errors import FzeroError
from fzero.optim.quantized import BLOCK

if TYPE_CHECKING:
    from fzero.values.sharded import Sharded


def make_scales(x: Sharded) -> Sharded:
    """Zeros for the scales of a value's blocks.

    Raises:
        FzeroError: in a step, and where ranks, or the parts of a split leaf, cut blocks.
    """
    if x.on.is_tracing:
        raise FzeroError(x.path, "8-bit state is made in a step", "call optimizer.init outside, and pass its state in")
    layout = x.form.layout
    try:
        scales = layout.coarsen(BLOCK, x.index)
    except FzeroError as error:
        raise FzeroError(x.path, error.problem, error.way_out) from None
    parts = scales.splits if x.on.rank is None else 1  # of which this process has slices
    zeros = x.local.new_zeros(parts * len(scales.part(x.index, scales.rank_of(x.on))), dtype=torch.float32)
    return x.of_form(zeros, x.form._replace(layout=scales)).with_local(zeros)  # which may lie on a disk
