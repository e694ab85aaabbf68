"""Laws of buffers: leaves that go in come out with the same bits, for complete and for partial wires."""

from __future__ import annotations

import torch
from hypothesis import example, given
from torch import Tensor

from fzero.base.mesh import VirtualMesh
from fzero.layout.buffers import block_of, blocks_of, flat_parts, join_leaf, slice_of
from fzero.layout.layout import Layout, Leaf
from fzero.layout.wires import Wire, wire
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


@given(wires_with_leaves(max_block=7))
def test_placed_slices_are_the_parts(drawn: Drawn) -> None:
    sent, leaves = drawn
    for rank in range(sent.layout.world):
        assert all(map(equal, placed(sent, leaves, rank), slices(sent, leaves, rank)))


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
@example(GAP)
def test_gathered_blocks_hold_each_leaf_whole(drawn: Drawn) -> None:
    sent, leaves = drawn
    for held in (slices, placed):
        buffer = torch.cat([block_of(held(sent, leaves, rank), sent, rank) for rank in range(sent.layout.world)])
        assert buffer.shape == (sent.numel,)
        assert all(equal(join_leaf(buffer, sent, i, leaf.shape), leaf) for i, leaf in enumerate(leaves))


@given(wires_with_leaves(max_block=7))
@example(APART)
def test_what_is_scattered_lies_as_what_is_gathered(drawn: Drawn) -> None:
    sent, leaves = drawn
    buffer = torch.cat([block_of(slices(sent, leaves, rank), sent, rank) for rank in range(sent.layout.world)])
    assert equal(blocks_of(leaves, sent), buffer)
    for rank, block in enumerate(buffer.view(sent.layout.world, sent.stride)):
        assert all(equal(slice_of(block, sent, rank, i), x) for i, x in enumerate(slices(sent, leaves, rank)))


@given(wires_with_leaves(max_block=7))
@example(APART)
def test_gaps_and_padding_are_zeros(drawn: Drawn) -> None:
    sent, leaves = drawn
    assert int(blocks_of(leaves, sent).count_nonzero()) == sum(leaf.numel() for leaf in leaves)


@given(wires_with_leaves(complete=True, max_block=7))
@example(APART)
def test_placed_slices_are_sent_without_a_copy(drawn: Drawn) -> None:
    sent, leaves = drawn
    for rank in range(sent.layout.world):
        given = placed(sent, leaves, rank)
        storages = {x.untyped_storage().data_ptr() for x in given if x.numel()}
        if storages:
            block = block_of(given, sent, rank)
            assert {block.untyped_storage().data_ptr()} == storages
            assert int(block.count_nonzero()) == sum(x.numel() for x in given)
            assert sent.has_gaps or block.data_ptr() == next(x.data_ptr() for x in given if x.numel())


@given(wires_with_leaves(complete=True, max_block=7))
@example(APART)
def test_leaves_of_a_whole_bucket_are_views(drawn: Drawn) -> None:
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
