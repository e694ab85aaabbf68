"""Splits: where slices of leaves that are split over model axes lie in the whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor

from fzero.files import load
from fzero.layout.parts import cut_into_parts, join_parts

if TYPE_CHECKING:
    from fzero.values.sharded import Sharded


def find_places(leaves: Sequence[Sharded | None], is_gathered: Callable[[Sharded], bool]) -> tuple[Any, ...]:
    """`PLACES` of `fzero.optim.operations`: where this rank's slices lie in their leaves, or what it has of leaves that
    are gathered. None for a leaf that is whole."""
    lists: tuple[list[Any], ...] = ([], [], [], [], [], [], [], [])
    for x in leaves:
        if x is None:
            row: tuple[Any, ...] = 0, 0, 0, 1, "", "", 0, 0
        else:
            layout, axes = x.form.layout, x.form.layout.split_axis
            at = (0, 0) if is_gathered(x) else (layout.shard, layout.leaf_ranges[x.index].start)
            where = x.on.along(axes) if axes else 0, layout.rank_of(x.on)
            row = *at, layout.run_of(x.index), layout.splits, axes, layout.shard_axis, *where
        for column, item in zip(lists, row):
            column.append(item)
    return lists


def _has_all_parts(value: Sharded | None) -> TypeGuard[Sharded]:
    return value is not None and value.on.rank is None and value.form.layout.splits > 1


def join_here(x: Tensor, value: Sharded | None) -> Tensor:
    """A slice of the value, in the order of the whole leaf where this process has all parts of a split one."""
    return join_parts(load(x), value.form.layout, value.index) if _has_all_parts(value) else x


def cut_here(x: Tensor, value: Sharded | None) -> Tensor:
    """The inverse of `join_here`."""
    return cut_into_parts(x, torch.empty_like(x), value.form.layout, value.index) if _has_all_parts(value) else x
