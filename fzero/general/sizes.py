"""Sizes in which calls of a step differ: those that a general program leaves open."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

from fzero.base.formulas import LEAST
from fzero.tracing.signatures import Signature, is_batch
from fzero.tracing.trace import OpenForm
from fzero.values.sharded import Form

Place = tuple[int, int]
"""A dimension: the position of a leaf among the arguments, and of the dimension in its shape. Behind the dimensions of
its shape come those of its strides."""


def find_changes(known: Signature, new: Signature, least: int = LEAST) -> dict[Place, tuple[int, int]] | None:
    """The dimensions of batches in which two signatures differ -> both sizes. None where anything else differs, and
    where a size is below `least`. Strides that follow from sizes do not count. Where rows lie in longer ones, as in
    `tokens[:, :-1]`, the stride from row to row does."""
    if known[:2] != new[:2] or len(known[2]) != len(new[2]):
        return None
    found: dict[Place, tuple[int, int]] = {}
    for i, (a, b) in enumerate(zip(known[2], new[2])):
        if a == b:
            continue
        if not (is_batch(a) and is_batch(b)) or a[1:3] != b[1:3] or a[4:] != b[4:] or len(a[0]) != len(b[0]):
            return None
        own, own_of_new = list_own_strides(a), list_own_strides(b)
        if own != own_of_new:
            return None
        dims = [*range(len(a[0])), *(len(a[0]) + dim for dim in own)]
        pairs = (((i, dim), ((*a[0], *a[3])[dim], (*b[0], *b[3])[dim])) for dim in dims)
        found |= {place: pair for place, pair in pairs if pair[0] != pair[1]}
    return found if min(map(min, found.values()), default=least) >= least else None


def is_constant(described: Any) -> bool:
    """Whether this is the description of what is no tensor."""
    return not is_batch(described) and not isinstance(described, Form)


def list_own_strides(described: Any) -> list[int]:
    """The dimensions whose strides do not follow from the sizes and strides behind them."""
    shape, stride = described[0], described[3]
    return [dim for dim in range(len(shape)) if stride[dim] != _follow_stride(shape, stride, dim)]


def _follow_stride(shape: Sequence[Any], stride: Sequence[Any], dim: int) -> Any:
    """The stride of a dimension of which one step passes all that the next dimension has."""
    return 1 if dim == len(shape) - 1 else shape[dim + 1] * stride[dim + 1]


class Sizes(NamedTuple):
    """The sizes in which a `signature` differs from others that have the same program. A size stands at several
    `places`, where sizes were equal in each of the signatures."""

    signature: Signature
    places: tuple[tuple[Place, ...], ...]

    def find(self, signature: Signature, known: int | None = None, least: int = LEAST) -> list[int] | str:
        """The sizes of a call. Where the call differs in anything else, and where a size is below `least`, the reason.
        Behind the leaf `known` the signature is this one's, and says nothing about sizes that stand at other places
        too."""
        changes = find_changes(self.signature, signature, least)
        if changes is None:
            return "other arguments than sizes of batches differ"
        if changes.keys() - {place for places in self.places for place in places}:
            return "another size changes"
        sizes: list[int] = []
        for places in self.places:
            said = [place for place in places if known is None or place[0] < known] or places
            found = {find_size(signature, place) for place in said}
            if len(found) > 1:
                return f"sizes that were equal differ: {sorted(found)}"
            sizes += found
        return sizes

    def has(self, places: Iterable[Place]) -> bool:
        """Whether all of these places are open."""
        return {place for own in self.places for place in own}.issuperset(places)

    def list_closed(self) -> list[tuple[Place, int]]:
        """The places of batches that are not open, with their sizes."""
        batches = ((i, x[0]) for i, x in enumerate(self.signature[2]) if is_batch(x))
        each = (((i, dim), size) for i, shape in batches for dim, size in enumerate(shape))
        return [(place, size) for place, size in each if not self.has([place])]

    def count(self, sizes: Sequence[int]) -> int:
        """The product of those that are no strides and no numbers: it grows with the elements of batches."""

        def is_size(place: Place) -> bool:
            return place[1] < len(self.signature[2][place[0]][0]) and not is_number(self.signature, place)

        return prod(size for size, places in zip(sizes, self.places) if any(map(is_size, places)))


def is_number(signature: Signature, place: Place) -> bool:
    """Whether a place is that of a number which was read. Numbers that are equal in some calls are so by chance."""
    return signature[2][place[0]][1] is int


def list_read(signature: Signature) -> list[Place]:
    """The places that elements of the batch decide: the rows of what was read, and the numbers. They are open also
    where calls have not differed in them yet."""
    first = signature[1].num_leaves
    return [(i, 0) for i, x in enumerate(signature[2]) if i >= first and is_batch(x) and x[0]]


def find_size(signature: Signature, place: Place) -> int:
    shape, _, _, stride, *_ = signature[2][place[0]]
    return (*shape, *stride)[place[1]]


def open_form(described: Any, opened: Mapping[Place, Any], i: int) -> OpenForm:
    """The shape of the leaf at `i`, and its strides, with open sizes."""
    shape, stride, count = described[0], list(described[3]), len(described[0])
    sizes, own = [opened.get((i, dim), size) for dim, size in enumerate(shape)], list_own_strides(described)
    for dim in reversed(range(count)):
        known = stride[dim] if dim in own else _follow_stride(sizes, stride, dim)
        stride[dim] = opened.get((i, count + dim), known)
    return sizes, stride
