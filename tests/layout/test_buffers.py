"""Buffers, by hand: which slices are sent where they lie, and which are copied first."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fzero.base.errors import FzeroError
from fzero.base.mesh import VirtualMesh
from fzero.layout.buffers import block_of, blocks_of, leaves_of, padding_of
from fzero.layout.layout import Layout, Leaf
from fzero.layout.wires import wire

PAIR = wire(Layout("layer", (Leaf("a", (2,)), Leaf("b", (2,))), VirtualMesh(fsdp=1), align=5), (0, 1))
# b b b . w w w w | w w w w w w w w
ROWS = wire(Layout("layer", (Leaf("b", (3,)), Leaf("w", (3, 4), block=4)), VirtualMesh(fsdp=2), align=1), (0, 1))


def is_view(block: Tensor, memory: Tensor) -> bool:
    return block.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr()


def test_slices_that_adjoin_are_sent_where_they_lie() -> None:
    memory = torch.arange(6.0)
    block = block_of([memory[:2], memory[2:4]], PAIR, 0)
    assert is_view(block, memory) and block.tolist() == [0, 1, 2, 3, 4]


def test_other_slices_are_copied_and_padded_with_zeros() -> None:
    memory, other = torch.arange(6.0), torch.arange(6.0)
    for slices in (
        [memory[:2], memory[3:5]],  # apart
        [memory[2:4], memory[:2]],  # in another order
        [memory[:2], other[2:4]],  # in two memories
        [memory.as_strided((2,), (2,)), memory[2:4]],  # with something between elements
        [memory[2:4], memory[4:6]],  # in a memory that ends before the block does
    ):
        block = block_of(slices, PAIR, 0)
        assert not is_view(block, memory) and not is_view(block, other)
        assert block.tolist() == [*slices[0].tolist(), *slices[1].tolist(), 0]


def test_slices_are_cast_into_a_block_of_their_own() -> None:
    memory = torch.arange(1.0, 8)
    block = block_of([memory[:2], memory[2:4]], PAIR, 0, torch.bfloat16)
    assert block.dtype == torch.bfloat16 and block.tolist() == [1, 2, 3, 4, 0]
    for slices, expected in (
        ([memory[:3], memory[3:7]], [1, 2, 3, 0, 4, 5, 6, 7]),
        ([memory[:3].int(), memory[3:7].double()], [1, 2, 3, 0, 4, 5, 6, 7]),
    ):
        assert block_of(slices, ROWS, 0, torch.float16).tolist() == expected
    assert block_of([memory[:0], torch.arange(8.0)], ROWS, 1, torch.float16).tolist() == list(range(8))


def test_slices_around_a_gap_are_sent_where_they_lie() -> None:
    memory = torch.tensor([9, 1, 2, 3, 0, 4, 5, 6, 7.0])
    block = block_of([memory[1:4], memory[5:9]], ROWS, rank=0)
    assert is_view(block, memory) and block.tolist() == [1, 2, 3, 0, 4, 5, 6, 7]
    second = block_of([memory[:0], memory[1:9]], ROWS, rank=1)
    assert is_view(second, memory) and second.tolist() == [1, 2, 3, 0, 4, 5, 6, 7]


def test_slices_that_adjoin_are_copied_around_a_gap() -> None:
    memory = torch.arange(1.0, 9)
    block = block_of([memory[:3], memory[3:7]], ROWS, rank=0)
    assert not is_view(block, memory) and block.tolist() == [1, 2, 3, 0, 4, 5, 6, 7]


def test_a_first_slice_behind_a_gap_needs_memory_before_it() -> None:
    leaves = (Leaf("b", (2,)), Leaf("w", (5,), block=2))  # b b . | . w w | w w w
    sent = wire(Layout("layer", leaves, VirtualMesh(fsdp=3), align=1), (0, 1))
    memory = torch.arange(1.0, 9)
    assert not is_view(block_of([memory[:0], memory[:2]], sent, rank=1), memory)
    assert is_view(block_of([memory[:0], memory[1:3]], sent, rank=1), memory)
    assert block_of([memory[:0], memory[:2]], sent, rank=1).tolist() == [0, 1, 2]


def test_leaves_are_put_around_gaps() -> None:
    sent = blocks_of([torch.ones(3), torch.full((3, 4), 2.0)], ROWS)
    assert sent.tolist() == [1, 1, 1, 0, *[2] * 12]


def test_leaves_come_back_and_padding_is_what_no_leaf_has() -> None:
    """Of all leaves of a bucket with gaps, and of some in a partial wire."""
    layout = Layout("b", (Leaf("x", (3, 5), 5), Leaf("y", (7,)), Leaf("z", (4, 2), 8)), VirtualMesh(fsdp=3), align=4)
    for along in (wire(layout, (0, 1, 2)), wire(layout, (0, 2)), wire(layout, (1,))):
        fulls = [torch.rand(layout.leaves[leaf].shape) + 1 for leaf in along.leaves]
        buffer = blocks_of(fulls, along)
        assert all(map(torch.equal, leaves_of(buffer, along), fulls))
        assert torch.equal(padding_of(along), buffer == 0)


def test_what_is_not_of_the_wire_is_named() -> None:
    for misuse, problem in {
        lambda: blocks_of(
            [torch.ones(3)], ROWS
        ): r"was given whole leaves of \[3\] elements for \[3, 12\]; give the who",
        lambda: blocks_of([torch.ones(3), torch.ones(3, 3)], ROWS): r"was given whole leaves of \[3, 9\] elements for",
        lambda: leaves_of(
            torch.ones(3), ROWS
        ): r"was given buffers of \[3\] elements for \[\d+\]; give the buffers that",
        lambda: block_of(
            [torch.ones(1)], ROWS, 0
        ): r"was given slices of rank 0 of \[1\] elements for \[\d+, \d+\]; give",
    }.items():
        with pytest.raises(FzeroError, match=problem):
            misuse()
