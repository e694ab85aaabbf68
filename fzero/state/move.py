"""Move: state to another placement."""

from __future__ import annotations

from collections.abc import Mapping

from fzero.base.placement import Placement
from fzero.state.fill import allocate_slices
from fzero.state.grouping import group_by_layout
from fzero.values.sharded import Sharded


def move(leaves: Mapping[int, Sharded], places: Mapping[int, Placement | None]) -> None:
    """Move the slices of these leaves to places, None for the device. Changes the leaves: each is the same object of
    the same elements, and its slice lies elsewhere.

    Slices of a bucket become views of one buffer, as `partition` makes them. Each object stands for one leaf.
    """
    found = {i: (leaf.form.layout, leaf.index) for i, leaf in leaves.items()}
    for layout, members in group_by_layout(found, {i: (leaf.dtype, places[i]) for i, leaf in leaves.items()}):
        leaf, to = leaves[next(iter(members))], places[next(iter(members))]
        shapes = {index: leaves[i] for i, index in members.items()}
        slices = allocate_slices(shapes, layout, layout.rank_of(leaf.on), leaf.dtype, leaf.device, place=to)
        for i, index in members.items():
            leaves[i].lie_in(to, slices[index].copy_(leaves[i].local))
