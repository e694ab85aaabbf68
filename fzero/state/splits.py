"""Splits: which leaves ranks along model axes have parts of, and one part, or all of them, of a whole value."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from fzero.base.arguments import is_whole
from fzero.base.errors import FzeroError
from fzero.base.mesh import VirtualMesh
from fzero.layout.layout import Layout
from fzero.layout.parts import cut_out, take_part
from fzero.layout.ranges import intersect
from fzero.layout.splits import Split, run_of, runs_in_whole
from fzero.program.blockwise import Coding
from fzero.ranks.ranks import Ranks
from fzero.state.exchange import Stretch
from fzero.state.sources import Source, TensorSource

UNIT = 2**14
"""Elements of a source that are read together, with others between them, sooner than run by run."""

Rules = Mapping[str, Sequence[Any]]
"""Path of a leaf, in which "*" stands for any text -> (axis, dim), or (axis, dim, parts)."""


def find_splits(rules: Rules | None, paths: Sequence[str], mesh: VirtualMesh) -> dict[str, Split]:
    """Path -> split, by the first rule that matches.

    Raises:
        FzeroError: for a rule that no path matches, that is no split, or whose axes the mesh does not have or cuts
            state over already.
    """
    found: dict[str, Split] = {}
    for rule, given in (rules or {}).items():
        split = _read_split(rule, given, mesh)
        matches = [path for path in paths if path == rule or fnmatchcase(path, rule)]
        if not matches:
            near = difflib.get_close_matches(rule, paths, 3, 0.0)
            raise FzeroError(f"split {rule!r}", "matches no leaf", f"near to it are {', '.join(near) or 'no leaves'}")
        for path in matches:
            found.setdefault(path, split)
    return found


def split_codes(
    rules: Rules | None, paths: Sequence[str], codings: Mapping[str, Coding], mesh: VirtualMesh
) -> Rules | None:
    """The split of each leaf that rules match, by its path: of a quantized leaf, whose path has a coding, that of its
    codes and scales. Scales that are codes of groups stay whole.

    Raises:
        FzeroError: as `find_splits`; for a quantized leaf as `split_of_codes`.
    """
    if not codings or not rules:
        return rules
    made = dict[str, Split]()
    for path, split in find_splits(rules, paths, mesh).items():
        if path in codings:
            made |= split_of_codes(path, codings[path], split, mesh)
        else:
            made[path] = split
    return made


def split_of_codes(path: str, coding: Coding, split: Split, mesh: VirtualMesh) -> dict[str, Split]:
    """The splits of the codes and the scales of a quantized leaf that is split so: they lie in runs as the leaf does.

    Raises:
        FzeroError: for a split that does not divide the leaf, or whose runs cut blocks.
    """
    part, (axis, dim, parts) = split_shape(path, coding.shape, split, mesh)
    run, ranks, (codes, scales) = run_of(part, dim, parts), mesh.size(axis), coding.keys
    if run % coding.block and ranks > 1:
        problem = f"is quantized in blocks of {coding.block}, which a split over {axis!r} into runs of {run} would cut"
        fitting = math.gcd(run, coding.block)
        smaller = f"quantize it with block={fitting}, or " if fitting >= 16 and not fitting % 2 else ""
        raise FzeroError(path, problem, f"{smaller}leave it out of split=")
    runs = Split(axis, 0, coding.numel // (run * ranks) if ranks > 1 else 1)  # one rank has all blocks, cut or not
    return {f"{path}.{key}": runs for key in ((codes,) if coding.double_quant else (codes, scales))}


def _read_split(rule: str, given: Any, mesh: VirtualMesh) -> Split:
    if not isinstance(given, (tuple, list)) or len(given) not in (2, 3) or not all(map(is_whole, given[1:])):
        way_out = 'give (axis, dim), as in ("tp", 0), or (axis, dim, parts)'
        raise FzeroError(f"split {rule!r}", f"is {given!r:.80}", way_out)
    axis = mesh.join((given[0],) if isinstance(given[0], str) else given[0])
    if set(mesh.shard_axes) <= set(mesh.split(axis)):
        problem = f"names {axis!r}, over which {mesh} cuts all state already"
        raise FzeroError(f"split {rule!r}", problem, "name a model axis, or let state lie along another axis besides")
    if len(given) == 3 and given[2] < 1:
        raise FzeroError(f"split {rule!r}", f"has {given[2]} parts", "give at least 1")
    return Split(axis, *given[1:])


def split_shape(path: str, shape: Sequence[int], split: Split, mesh: VirtualMesh) -> tuple[tuple[int, ...], Split]:
    """The shape of one part of a leaf, and its split with a dim from 0 on.

    Raises:
        FzeroError: for a dim that the leaf does not have, or that does not divide.
    """
    axis, dim, parts = split
    if not -len(shape) <= dim < len(shape):
        raise FzeroError(path, f"has the shape {list(shape)}, and is split along dim {dim}", "name a dim of the leaf")
    dim, ranks = dim % len(shape), mesh.size(axis)
    if shape[dim] % (parts * ranks):
        each = f"{parts} parts of it for each of " if parts > 1 else ""
        problem = f"has {shape[dim]} elements along dim {dim}, to be split into {each}{ranks} ranks along {axis!r}"
        largest = max(n for n in range(1, ranks + 1) if shape[dim] % (parts * n) == 0) if shape[dim] % parts == 0 else 0
        way_out = f"{largest} ranks divide it" if largest > 1 else "pad the dim, or leave the leaf whole"
        raise FzeroError(path, problem, way_out)
    return (*shape[:dim], shape[dim] // ranks, *shape[dim + 1 :]), Split(axis, dim, parts)


def list_parts(out: Tensor, source: Source, layout: Layout, leaf: int, on: Ranks) -> list[tuple[Tensor, Source]]:
    """The memory, within what this process has of a leaf, and the source of each part."""
    return [(each, part_of(source, layout, leaf, position)) for each, position in list_positions(out, layout, on)]


def list_positions(out: Tensor, layout: Layout, on: Ranks) -> list[tuple[Tensor, int]]:
    """The memory, within what this process has of a leaf, and the position along the split axes of each part."""
    if on.rank is not None or layout.splits == 1:
        return [(out, on.along(layout.split_axis) if layout.split_axis else 0)]
    return [(take_part(out, layout, position), position) for position in range(layout.splits)]


def put_values(out: Tensor, given: Stretch, layout: Layout, leaf: int, on: Ranks) -> None:
    """Copy the values of some elements of a whole leaf to where they belong in what this process has of the leaf."""
    mine, elements = layout.part(leaf, layout.rank_of(on)), range(given.start, given.start + len(given.values))
    for room, position in list_positions(out, layout, on):
        found = given
        if layout.splits > 1:
            held, values = cut_out(given.values, elements, layout, leaf, position)
            found = Stretch(held.start, values)
        here = intersect(range(found.start, found.start + len(found.values)), mine)
        if here:
            Stretch(mine.start, room).put(here, found.at(here))


def part_of(source: Source, layout: Layout, leaf: int, position: int) -> Source:
    """The source of the part that ranks at a position along the split axes have of a leaf."""
    split = layout.leaves[leaf].split
    if split is None or layout.splits == 1:
        return source
    if isinstance(source, TensorSource):
        part = view_parts(source.tensor, split, layout.splits)[position].reshape(layout.leaves[leaf].shape)
        return TensorSource(part, source.path, source.dtype, source.is_frozen)
    return _Part(source, layout, leaf, position)


def view_parts(whole: Tensor, split: Split, ranks: int) -> Tensor:
    """[ranks, ..., parts, size, ...]: a view of a whole leaf, part by part."""
    size = whole.shape[split.dim] // (split.parts * ranks)
    return whole.unflatten(split.dim, (split.parts, ranks, size)).movedim(split.dim + 1, 0)


class _Part:
    """A part of the values of a source, read in runs that are contiguous in the whole. Runs that are short beside the
    elements that the source makes at once are read together, with those of other parts between them."""

    def __init__(self, source: Source, layout: Layout, leaf: int, position: int) -> None:
        self._source, self._layout, self._leaf, self._position = source, layout, leaf, position
        self._unit: int = getattr(source, "unit", UNIT)
        self.shape, self.dtype, self.path = torch.Size(layout.leaves[leaf].shape), source.dtype, source.path

    def read(self, start: int, out: Tensor) -> None:
        run, ranks = self._layout.run_of(self._leaf), self._layout.splits
        together, wanted, done = self._unit // (run * ranks) * run, range(start, start + out.numel()), 0
        while done < out.numel():
            if together > run:
                done += self._read_together(wanted[done : done + together], out[done : done + together])
            else:
                begin, size = next(runs_in_whole(run, ranks, self._position, wanted[done:]))
                self._source.read(begin, out[done : done + size])
                done += size

    def _read_together(self, elements: range, out: Tensor) -> int:
        """Read some elements of the part, through all that lies between them. Returns their number."""
        run, ranks = self._layout.run_of(self._leaf), self._layout.splits
        (first, _), (last, _) = (next(runs_in_whole(run, ranks, self._position, elements[i:][:1])) for i in (0, -1))
        between = range(first, last + 1)
        values = out.new_empty(len(between))
        self._source.read(first, values)
        _, found = cut_out(values, between, self._layout, self._leaf, self._position)
        out.copy_(found)
        return len(elements)
