"""Move: state to another placement."""

from __future__ import annotations

from collections.abc import Mapping

from fzero.base.placement import Placement
from fzero.state.fill import allocate_slices, find_memory
from fzero.state.grouping import group_by_layout
from fzero.values.sharded import Sharded


def move(leaves: Mapping[int, Sharded], places: Mapping[int, Placement | None]) -> None:
    """Move the slices of these leaves to places, None for the device. Changes the leaves: each is the same object of
    the same elements, and its slice lies elsewhere.

    Slices of a bucket become views of one buffer, as `partition` makes them. An object that stands for several leaves
    goes to the place of the first.
    """
    first: dict[int, int] = {}
    for i, leaf in leaves.items():
        first.setdefault(id(leaf), i)
    own = {i: leaves[i] for i in first.values()}
    found = {i: (leaf.form.layout, leaf.index) for i, leaf in own.items()}
    for layout, members in group_by_layout(found, {i: (leaf.dtype, places[i]) for i, leaf in own.items()}):
        leaf, to = own[next(iter(members))], places[next(iter(members))]
        shapes = {index: own[i] for i, index in members.items()}
        slices = allocate_slices(shapes, layout, leaf.on.rank, leaf.dtype, *find_memory(to, leaf.device, False))
        for i, index in members.items():
            own[i].lie_in(to, slices[index].copy_(own[i].local))
