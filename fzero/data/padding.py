"""Padding: batches of fixed shapes from rows that are missing and sequences that are short."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate, default_convert

from fzero import FzeroError, tree
from fzero.base.arguments import check_arguments
from fzero.ranks.live import find_ranks

Number = int | float


@check_arguments
def pad(
    batch: tree.Tree,
    padding: tree.Tree,
    *,
    count: int | None = None,
    length: int | None = None,
    sequences: Sequence[str] | None = None,
) -> tree.Tree:
    """`batch` with padding in the place of rows from `count` on, and behind sequences shorter than `length`.

    `padding` has a number for each leaf, as a tree with the paths of `batch`; one number alone is for all leaves.
    Sequences lie along dim 1 of the leaves with the paths `sequences`, by default of all leaves with two dimensions or
    more.

        pad({"inputs": x, "labels": y}, {"inputs": 0, "labels": -100}, length=128)

    Raises:
        FzeroError: for a leaf that is no tensor, or without a number, or whose dtype cannot hold its number; for a
            sequence longer than `length`.
    """
    if count is not None and count < 0:
        raise FzeroError("count", f"is {count}", "give the number of rows that are no padding")
    leaves, treedef = tree.flatten(batch)
    paths = tree.paths(batch)
    numbers = match_padding(padding, batch)
    chosen = find_sequences(batch, sequences)
    padded = [
        _pad_leaf(path, leaf, number, count, length if path in chosen else None)
        for path, leaf, number in zip(paths, leaves, numbers)
    ]
    return tree.unflatten(treedef, padded)


def _pad_leaf(path: str, leaf: Tensor, number: Number, count: int | None, length: int | None) -> Tensor:
    """One leaf, as it is where nothing is missing."""
    shape, rows = list(leaf.shape), leaf.shape[0] if count is None else count
    if length is not None and shape[1] > length:
        problem = f"has sequences of {shape[1]}, longer than {length}"
        raise FzeroError(f"batch {path}".rstrip(), problem, "cut them, or give a greater length")
    target = [shape[0], shape[1] if length is None else length, *shape[2:]] if len(shape) > 1 else shape
    if target == shape and rows == shape[0]:
        return leaf
    padded = torch.full(target, number, dtype=leaf.dtype, device=leaf.device, pin_memory=leaf.is_pinned())
    kept = padded[:rows] if len(shape) == 1 else padded[:rows, : shape[1]]
    kept.copy_(leaf[:rows])
    return padded


@check_arguments
def round_up(length: int, ladder: Sequence[int], mesh: Any) -> int:
    """The first of the lengths `ladder` that the longest sequence of all ranks fits into, the same on all ranks.

    All ranks of the mesh call it together, outside of a step: one all-reduce of 24 bytes on the host. On a virtual mesh
    nothing moves. So a step on batches of these lengths has at most `len(ladder)` programs.

    Raises:
        FzeroError: on all ranks, where the longest sequence is longer than the ladder; for a ladder that does not
            ascend.
    """
    check_ladder(ladder)
    longest = find_ranks(mesh).find_largest(length, "the length of a batch")
    for rung in ladder:
        if longest <= rung:
            return rung
    problem = f"ends at {ladder[-1]}, and the longest sequence of all ranks has {longest}"
    raise FzeroError("ladder", problem, "cut sequences, or add a longer length")


def check_ladder(ladder: Sequence[int]) -> None:
    """Refuse lengths that do not ascend."""
    is_whole = len(ladder) > 0 and all(isinstance(rung, int) and rung > 0 for rung in ladder)
    if not is_whole or list(ladder) != sorted(set(ladder)):
        raise FzeroError("ladder", f"is {ladder!r}", "give lengths that ascend, as in (128, 256, 512)")


def match_padding(padding: tree.Tree, batch: tree.Tree) -> list[Number]:
    """The number of `padding` for each leaf of a batch.

    Raises:
        FzeroError: as `pad`.
    """
    numbers = dict(zip(tree.paths(padding), tree.leaves(padding)))
    found = []
    for path, leaf in zip(tree.paths(batch), tree.leaves(batch)):
        where = f"batch {path}".rstrip()
        if not isinstance(leaf, Tensor) or not leaf.ndim:
            got = "a number" if isinstance(leaf, Tensor) else f"a {type(leaf).__name__}"
            raise FzeroError(where, f"is {got}, and only tensors of rows are padded", "leave it out in collate_fn")
        number = numbers.get(path, numbers.get("") if len(numbers) == 1 else None)
        if number is None:
            problem = f"has no padding among {sorted(map(str, numbers))}"
            raise FzeroError(where, problem, f"give a number for it, as in padding={{{path!r}: 0}}")
        if not _can_hold(leaf.dtype, number):
            raise FzeroError(where, f"is {leaf.dtype}, which cannot hold its padding {number!r}", "give another number")
        found.append(number)
    return found


def find_sequences(batch: tree.Tree, sequences: Sequence[str] | None) -> set[str]:
    """The paths of the leaves whose dim 1 is a length.

    Raises:
        FzeroError: for a path without a leaf of two dimensions or more.
    """
    dims = {path: leaf.ndim for path, leaf in zip(tree.paths(batch), tree.leaves(batch)) if isinstance(leaf, Tensor)}
    if sequences is None:
        return {path for path, ndim in dims.items() if ndim > 1}
    for path in sequences:
        if dims.get(path, 0) < 2:
            problem = f"is in sequences, and is no leaf of [rows, length, ...] among {sorted(dims)}"
            raise FzeroError(f"batch {path}".rstrip(), problem, "name leaves of the batch by their paths")
    return set(sequences)


def find_longest(batch: tree.Tree, sequences: Sequence[str] | None) -> int:
    """The length of the longest sequence of a batch."""
    chosen = find_sequences(batch, sequences)
    return max((x.shape[1] for path, x in zip(tree.paths(batch), tree.leaves(batch)) if path in chosen), default=0)


class Collate:
    """torch's `default_collate`, with sequences padded to the longest of the rows first. Sequences lie along dim 0 of
    an example. An error is returned: torch would change the class of an error that a worker raises."""

    def __init__(self, padding: tree.Tree, sequences: Sequence[str] | None) -> None:
        self.padding, self.sequences = padding, sequences

    def __call__(self, examples: list[Any]) -> Any:
        try:
            return self._collate(examples)
        except FzeroError as error:
            return error

    def _collate(self, examples: list[Any]) -> Any:
        rows = [tree.map(_add_row, default_convert(example)) for example in examples]
        longest = max(find_longest(row, self.sequences) for row in rows)
        padded = [pad(row, self.padding, length=longest, sequences=self.sequences) for row in rows]
        return default_collate([tree.map(lambda x: x[0], row) for row in padded])


def _add_row(x: Any) -> Any:
    """[...] -> [1, ...]. A number has the dtype that `default_collate` gives it."""
    if isinstance(x, float):
        return torch.tensor([x], dtype=torch.float64)
    return x[None] if isinstance(x, Tensor) else torch.tensor([x]) if isinstance(x, int) else x


def check_numbers(padding: tree.Tree) -> None:
    """Refuse padding that is no tree of numbers."""
    for path, number in zip(tree.paths(padding), tree.leaves(padding)):
        if not isinstance(number, Number):
            raise FzeroError(f"padding {path}".rstrip(), f"is a {type(number).__name__}", "give a number")


def _can_hold(dtype: torch.dtype, number: Number) -> bool:
    if dtype.is_floating_point or dtype.is_complex:
        return True
    if not math.isfinite(number) or number != int(number):
        return False
    if dtype == torch.bool:
        return number in (0, 1)
    return torch.iinfo(dtype).min <= number <= torch.iinfo(dtype).max
