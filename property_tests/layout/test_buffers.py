"""Laws of buffers: leaves that go in come out with the same bits, for complete and for partial wires."""

from __future__ import annotations

import torch
from hypothesis import example, given
from torch import Tensor

from fzero.base.mesh import VirtualMesh
from fzero.layout.buffers import block_of, blocks_of, flat_parts, join_leaf, slice_of
from fzero.layout.layout import Layout, Leaf, Wire, wire
from fzero.state.fill import copy_slices
from property_tests.strategies import wires_with_leaves

Drawn = tuple[Wire, list[Tensor]]

ROW = Layout("bucket", tuple(Leaf(f"leaf{i}", (1,)) for i in range(3)), VirtualMesh(fsdp=1), align=1)
GAP = wire(ROW, (0, 2)), [torch.tensor([1.0]), torch.tensor([2.0])]  # in one memory, with another leaf between them

ROWS = Layout(
    "bucket", (Leaf("b", (3,)), Leaf("w", (3, 4), 4)), VirtualMesh(fsdp=2), align=1
)  # b b b . w w w w | w w ..
APART = wire(ROWS, (0, 1)), [torch.arange(1.0, 4), torch.arange(4.0, 16).view(3, 4)]


def equal(a: Tensor, b: Tensor) -> bool:
    """Same dtype, shape and bits."""
    return a.dtype == b.dtype and torch.equal(a, b)


def slices(sent: Wire, leaves: list[Tensor], rank: int) -> list[Tensor]:
    """The part of each leaf that `rank` owns, each in memory of its own."""
    return [leaf.reshape(-1)[p.start : p.stop].clone() for leaf, p in zip(leaves, sent.parts(rank))]


def placed(sent: Wire, leaves: list[Tensor], rank: int) -> list[Tensor]:
    """The same slices as views of one buffer, the rank's slice of the whole bucket. Leaves not sent are ones."""
    ones = {i: torch.ones(leaf.shape, dtype=leaves[0].dtype) for i, leaf in enumerate(sent.layout.leaves)}
    everything = list((ones | dict(zip(sent.leaves, leaves))).values())
    held = copy_slices(dict(enumerate(everything)), sent.layout, rank)
    return [held[leaf] for leaf in sent.leaves]


def start_of(sent: Wire, rank: int) -> int:
    """Where the rank's part of the wire's first leaf begins in that leaf."""
    return sent.parts(rank)[0].start


@given(wires_with_leaves())
def test_gathered_blocks_hold_each_leaf_whole(drawn: Drawn) -> None:
    sent, leaves = drawn
    buffer = torch.cat([block_of(slices(sent, leaves, rank), sent, rank) for rank in range(sent.layout.world)])
    assert buffer.shape == (sent.numel,)
    assert all(equal(join_leaf(buffer, sent, i, leaf.shape), leaf) for i, leaf in enumerate(leaves))


@given(wires_with_leaves())
@example(GAP)
def test_gathered_placed_slices_hold_each_leaf_whole(drawn: Drawn) -> None:
    sent, leaves = drawn
    buffer = torch.cat([block_of(placed(sent, leaves, rank), sent, rank) for rank in range(sent.layout.world)])
    assert all(equal(join_leaf(buffer, sent, i, leaf.shape), leaf) for i, leaf in enumerate(leaves))


@given(wires_with_leaves())
def test_blocks_of_whole_leaves_hold_the_slices_of_each_rank(drawn: Drawn) -> None:
    sent, leaves = drawn
    for rank, block in enumerate(blocks_of(leaves, sent).view(sent.layout.world, sent.stride)):
        expected = slices(sent, leaves, rank)
        assert all(equal(slice_of(block, sent, rank, i), piece) for i, piece in enumerate(expected))


@given(wires_with_leaves())
def test_what_is_scattered_and_what_is_gathered_lie_alike(drawn: Drawn) -> None:
    sent, leaves = drawn
    buffer = blocks_of(leaves, sent)
    assert all(equal(join_leaf(buffer, sent, i, leaf.shape), leaf) for i, leaf in enumerate(leaves))


@given(wires_with_leaves())
def test_padding_of_blocks_is_zero(drawn: Drawn) -> None:
    sent, leaves = drawn
    assert int(blocks_of(leaves, sent).count_nonzero()) == sum(leaf.numel() for leaf in leaves)


@given(wires_with_leaves())
def test_padding_of_a_packed_block_is_zero(drawn: Drawn) -> None:
    sent, leaves = drawn
    for rank in range(sent.layout.world):
        given = slices(sent, leaves, rank)
        filled = sum(x.numel() for x in given)
        if filled < sent.stride:
            assert int(block_of(given, sent, rank)[filled:].count_nonzero()) == 0


@given(wires_with_leaves())
def test_placed_slices_are_the_parts(drawn: Drawn) -> None:
    sent, leaves = drawn
    for rank in range(sent.layout.world):
        assert all(map(equal, placed(sent, leaves, rank), slices(sent, leaves, rank)))


@given(wires_with_leaves(complete=True))
def test_placed_slices_are_sent_without_a_copy_and_padded_with_zeros(drawn: Drawn) -> None:
    sent, leaves = drawn
    for rank in range(sent.layout.world):
        given = placed(sent, leaves, rank)
        filled = [x for x in given if x.numel()]
        if filled:
            block = block_of(given, sent, rank)
            assert block.data_ptr() == filled[0].data_ptr()
            assert int(block.count_nonzero()) == sum(x.numel() for x in filled)


@given(wires_with_leaves(complete=True))
def test_leaves_of_a_whole_bucket_are_views(drawn: Drawn) -> None:
    sent, leaves = drawn
    buffer = blocks_of(leaves, sent)
    for i, leaf in enumerate(leaves):
        assert (
            join_leaf(buffer, sent, i, leaf.shape).untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
        )


@given(wires_with_leaves(max_block=7))
@example(APART)
def test_flat_parts_are_blocks_without_their_padding(drawn: Drawn) -> None:
    sent, leaves = drawn
    parts = flat_parts(leaves, sent)
    assert sent.is_complete or sum(part.numel() for part in parts) == sent.sent
    for rank, part in enumerate(parts):
        assert equal(part, torch.cat(slices(sent, leaves, rank))) and part.is_contiguous()
        assert len(sent.leaves) > 1 or part.data_ptr() in (
            0,
            leaves[0].data_ptr() + part.element_size() * start_of(sent, rank),
        )


@given(wires_with_leaves())
def test_leaves_need_not_be_contiguous(drawn: Drawn) -> None:
    sent, leaves = drawn
    strided = [leaf.mT.contiguous().mT if leaf.ndim > 1 else leaf for leaf in leaves]
    assert equal(blocks_of(strided, sent), blocks_of(leaves, sent))


@given(wires_with_leaves(max_block=7))
@example(APART)
def test_blocks_with_gaps_hold_each_leaf_whole(drawn: Drawn) -> None:
    sent, leaves = drawn
    for held in (slices, placed):
        buffer = torch.cat([block_of(held(sent, leaves, rank), sent, rank) for rank in range(sent.layout.world)])
        assert buffer.shape == (sent.numel,)
        assert all(equal(join_leaf(buffer, sent, i, leaf.shape), leaf) for i, leaf in enumerate(leaves))


@given(wires_with_leaves(max_block=7))
@example(APART)
def test_blocks_with_gaps_are_scattered_as_they_are_gathered(drawn: Drawn) -> None:
    sent, leaves = drawn
    buffer = torch.cat([block_of(slices(sent, leaves, rank), sent, rank) for rank in range(sent.layout.world)])
    assert equal(blocks_of(leaves, sent), buffer)
    for rank, block in enumerate(buffer.view(sent.layout.world, sent.stride)):
        assert all(equal(slice_of(block, sent, rank, i), x) for i, x in enumerate(slices(sent, leaves, rank)))


@given(wires_with_leaves(max_block=7))
@example(APART)
def test_gaps_are_zeros(drawn: Drawn) -> None:
    sent, leaves = drawn
    assert int(blocks_of(leaves, sent).count_nonzero()) == sum(leaf.numel() for leaf in leaves)


@given(wires_with_leaves(complete=True, max_block=7))
@example(APART)
def test_placed_slices_with_gaps_are_sent_without_a_copy(drawn: Drawn) -> None:
    sent, leaves = drawn
    for rank in range(sent.layout.world):
        given = placed(sent, leaves, rank)
        storages = {x.untyped_storage().data_ptr() for x in given if x.numel()}
        if storages:
            block = block_of(given, sent, rank)
            assert {block.untyped_storage().data_ptr()} == storages
            assert int(block.count_nonzero()) == sum(x.numel() for x in given)


@given(wires_with_leaves(complete=True, max_block=7))
@example(APART)
def test_leaves_of_a_bucket_with_gaps_are_views(drawn: Drawn) -> None:
    sent, leaves = drawn
    buffer = blocks_of(leaves, sent)
    for i, leaf in enumerate(leaves):
        assert (
            join_leaf(buffer, sent, i, leaf.shape).untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
        )


@given(wires_with_leaves(complete=True, max_block=7))
@example(APART)
def test_all_ranks_together_hold_the_bucket(drawn: Drawn) -> None:
    sent, leaves = drawn
    held = copy_slices(dict(enumerate(leaves)), sent.layout, None)
    for index, at in enumerate(sent.layout.leaf_ranges):
        assert held[index].numel() == 0 or held[index].storage_offset() == at.start
        assert equal(held[index], leaves[index].reshape(-1))
