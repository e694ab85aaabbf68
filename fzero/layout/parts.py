"""Parts: what all ranks have of a leaf that is split over model axes, one part behind the other, and the whole leaf.

parts    |- gate 0 -|- up 0 -|- gate 1 -|- up 1 -|
whole    |- gate 0 -|- gate 1 -|- up 0 -|- up 1 -|
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import accumulate

import torch
from torch import Tensor

from fzero.layout.layout import Layout
from fzero.layout.splits import runs_in_parts
from fzero.layout.strides import Copy, view_to_view


def take_part(parts: Tensor, layout: Layout, position: int) -> Tensor:
    """[numel] what the rank at a position has of a split leaf, of the parts of all ranks: a view."""
    numel = parts.numel() // layout.splits
    return parts[position * numel : (position + 1) * numel] if layout.splits > 1 else parts


def join_parts(parts: Tensor, layout: Layout, leaf: int, elements: range | None = None) -> Tensor:
    """[numel] the whole leaf, or a range of its elements, of what the ranks' parts have of it: a new tensor, or that of
    a leaf that is not split."""
    flat = parts.reshape(-1)
    if layout.splits == 1:
        return flat
    whole = flat.new_empty(flat.numel())
    for part, run in _pair_runs(flat, whole, layout, leaf, elements):
        run.copy_(part)
    return whole


def cut_into_parts(whole: Tensor, parts: Tensor, layout: Layout, leaf: int, elements: range | None = None) -> Tensor:
    """The inverse of `join_parts`. Writes into the contiguous `parts`, and returns it."""
    if layout.splits == 1:
        parts.view(whole.shape).copy_(whole)
        return parts
    for part, run in _pair_runs(parts.view(-1), whole.reshape(-1), layout, leaf, elements):
        part.copy_(run)
    return parts


def find_copy(layout: Layout, leaf: int, position: int) -> Copy:
    """Which elements of the whole leaf are those of the part at a position. The leaf has elements."""
    run, ranks = layout.run_of(leaf), layout.splits
    runs = layout.leaves[leaf].numel // run
    (found,) = view_to_view([runs, run], [run, 1], [ranks * run, 1], 0, position * run)
    return found


def cut_out(values: Tensor, elements: range, layout: Layout, leaf: int, position: int) -> tuple[range, Tensor]:
    """`(elements of the part at a position, their values)` among the values, 1-d, of some elements of a whole leaf."""
    held = [layout.range_in_part(leaf, each, elements) for each in range(position + 1)]
    parts = cut_into_parts(values, torch.empty_like(values), layout, leaf, elements)
    return held[-1], parts[sum(map(len, held[:-1])) :][: len(held[-1])]


def _pair_runs(
    parts: Tensor, whole: Tensor, layout: Layout, leaf: int, elements: range | None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Views of the same elements of both: of all periods, in which each rank has a run, together, and of the runs in
    front of and behind these."""
    run, ranks = layout.run_of(leaf), layout.splits
    elements = range(math.prod(layout.shape_of(leaf))) if elements is None else elements
    period, start, stop = run * ranks, elements.start, elements.stop
    middle = range(-(-start // period) * period, stop // period * period)
    held = [layout.range_in_part(leaf, position, elements) for position in range(ranks)]
    begins = list(accumulate(map(len, held), initial=0))
    if middle:
        rows = whole[middle.start - start : middle.stop - start].view(-1, ranks, run)
        for position in range(ranks):
            at = begins[position] + middle.start // ranks - held[position].start
            yield parts[at : at + len(middle) // ranks].view(-1, run), rows[:, position]
    for rest in (range(start, middle.start), range(middle.stop, stop)) if middle else [elements]:
        done = rest.start - start
        for position, first, size in runs_in_parts(run, ranks, rest):
            at = begins[position] + first - held[position].start
            yield parts[at : at + size], whole[done : done + size]
            done += size
