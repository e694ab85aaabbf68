"""Chunk plans, by hand: what the laws of property_tests/layout/test_chunks.py leave open, and one example."""

from __future__ import annotations

import pytest

from fzero.base.errors import FzeroError
from fzero.base.mesh import VirtualMesh
from fzero.layout.chunks import Overlap, chunks, overlaps, rank_overlaps
from fzero.layout.layout import Layout, Leaf

# w 0..6, u 6..13, padded to 15: ranks own 0..5, 5..10, 10..15
THREE = Layout("layer", (Leaf("w", (2, 3)), Leaf("u", (7,)), Leaf("none", (0,))), VirtualMesh(fsdp=3), align=1)
W, U, NONE = 0, 1, 2


def test_overlaps_of_a_chunk_with_ranks() -> None:
    assert list(overlaps(THREE, W, range(0, 6))) == [
        Overlap(W, range(0, 5), 0),
        Overlap(W, range(5, 6), 1),
    ]
    assert list(overlaps(THREE, U, range(3, 6))) == [
        Overlap(U, range(3, 4), 1),
        Overlap(U, range(4, 6), 2),
    ]


def test_nothing_of_an_empty_chunk_is_owned() -> None:
    assert not list(overlaps(THREE, U, range(3, 3)))
    assert not list(overlaps(THREE, NONE, range(0)))


def test_a_rank_without_part_has_no_overlaps() -> None:
    assert not list(rank_overlaps(THREE, U, 0, 3))
    assert not list(rank_overlaps(THREE, NONE, 1, 3))


def test_all_ranks_together_own_every_chunk() -> None:
    assert list(rank_overlaps(THREE, U, None, 4)) == [
        Overlap(U, range(0, 4), None),
        Overlap(U, range(4, 7), None),
    ]


def test_each_rank_owns_all_of_a_replicated_leaf() -> None:
    layout = Layout("layer", THREE.leaves, THREE.mesh, replicated=True)
    assert list(overlaps(layout, U, range(2, 5))) == [Overlap(U, range(2, 5), rank) for rank in range(3)]
    assert list(rank_overlaps(layout, W, 2, 9)) == [Overlap(W, range(0, 6), 2)]


@pytest.mark.parametrize("size", [0, -1])
def test_a_chunk_has_an_element(size: int) -> None:
    with pytest.raises(FzeroError, match=rf"chunks of {size} elements; a chunk is at least 1 element"):
        chunks(7, size)
    with pytest.raises(FzeroError, match=rf"chunks of {size} elements; a chunk is at least 1 element"):
        rank_overlaps(THREE, U, 0, size)


@pytest.mark.parametrize("chunk", [range(-1, 2), range(5, 8)])
def test_a_chunk_outside_the_leaf_is_refused(chunk: range) -> None:
    with pytest.raises(
        FzeroError, match=r"u: a chunk is range\(-?\d, \d\), of 7 elements; take chunks from fzero.layout.chunks"
    ):
        overlaps(THREE, U, chunk)
