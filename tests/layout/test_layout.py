"""Layouts and wires, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fzero.base.errors import FzeroError
from fzero.base.mesh import VirtualMesh
from fzero.layout.layout import Layout, Leaf, replicated_layout
from fzero.layout.wires import wire

# w 0..6, b 6..10, u 10..15, padded to 18: ranks own 0..6, 6..12, 12..18
THREE = Layout("layer", (Leaf("w", (2, 3)), Leaf("b", (4,)), Leaf("u", (5,))), VirtualMesh(fsdp=3), align=2)
# b 0..3, a gap, rows of w 4..16: ranks own 0..8, 8..16
ROWS = Layout("layer", (Leaf("b", (3,)), Leaf("w", (3, 4), block=4)), VirtualMesh(fsdp=2), align=1)


def bounds(*ranges: range) -> list[tuple[int, int]]:
    """Starts and stops: all empty ranges compare equal."""
    return [(r.start, r.stop) for r in ranges]


def test_five_elements_on_four_ranks() -> None:
    layout = Layout("layer", (Leaf("w", (5,)),), VirtualMesh(fsdp=4), align=1)
    assert [len(layout.part(0, rank)) for rank in range(4)] == [2, 2, 1, 0]
    assert layout.padded == 8 and layout.shard == 2


def test_leaves_and_slices_in_the_bucket() -> None:
    assert THREE.numel == 15 and THREE.padded == 18 and THREE.shard == 6
    assert bounds(*THREE.leaf_ranges) == [(0, 6), (6, 10), (10, 15)]
    assert bounds(*(THREE.rank_range(rank) for rank in range(3))) == [(0, 6), (6, 12), (12, 18)]


def test_parts_count_from_the_start_of_the_leaf() -> None:
    assert bounds(*(THREE.part(0, rank) for rank in range(3))) == [(0, 6), (6, 6), (6, 6)]
    assert bounds(*(THREE.part(1, rank) for rank in range(3))) == [(0, 0), (0, 4), (4, 4)]
    assert bounds(*(THREE.part(2, rank) for rank in range(3))) == [(0, 0), (0, 2), (2, 5)]


def test_representative_ranks_begin_runs_of_equal_slices() -> None:
    wide = Layout("layer", (Leaf("w", (2000,)), Leaf("b", (4,))), VirtualMesh(fsdp=300), align=2)
    assert wide.shard == 8  # w is cut over ranks 0 to 249, which b has too little of to be cut: rank 250 has all of it
    assert wide.representative_ranks([0]) == {0, 1, 249, 250}
    assert wide.representative_ranks([1]) == {0, 250, 251}
    assert wide.representative_ranks([0, 1]) == {0, 1, 249, 250, 251}


def test_the_first_rank_represents_all_where_all_hold_the_same() -> None:
    assert THREE.representative_ranks([]) == replace(THREE, replicated=True).representative_ranks([0, 1, 2]) == {0}
    assert Layout("layer", (Leaf("w", (0,)),), VirtualMesh(fsdp=3)).representative_ranks([0]) == {0}


def test_default_alignment_is_sixteen_elements_a_rank() -> None:
    assert Layout("layer", (Leaf("w", (33,)),), VirtualMesh(fsdp=2)).padded == 64


def test_scalars_and_empty_leaves() -> None:
    layout = Layout("layer", (Leaf("scale", ()), Leaf("none", (0, 3))), VirtualMesh(fsdp=2), align=1)
    assert layout.numel == 1 and layout.padded == 2
    assert [len(layout.part(0, rank)) for rank in range(2)] == [1, 0]
    assert [len(layout.part(1, rank)) for rank in range(2)] == [0, 0]


def test_replicated_layout_is_whole_on_every_rank() -> None:
    layout = Layout("layer", THREE.leaves, THREE.mesh, replicated=True)
    assert layout.padded == layout.shard == 15
    assert bounds(layout.part(2, 1)) == [(0, 5)]


def test_a_replicated_value_is_one_leaf_without_a_name() -> None:
    assert replicated_layout([2, 3], THREE.mesh) == Layout(
        "replicated", (Leaf("", (2, 3)),), THREE.mesh, replicated=True
    )


def test_without_a_rank_a_part_is_the_whole_leaf() -> None:
    assert bounds(THREE.rank_range(None), THREE.part(1, None)) == [(0, 18), (0, 4)]


def test_state_is_cut_along_the_shard_axis_alone() -> None:
    mesh = VirtualMesh(fsdp=3, tensor=5)
    assert Layout("layer", THREE.leaves, mesh, align=2).part(2, 2) == THREE.part(2, 2)


def test_wire_of_all_leaves_is_the_bucket() -> None:
    sent = wire(THREE, (0, 1, 2))
    assert sent.stride == 6 and sent.numel == 18
    assert bounds(*sent.block(1)) == [(0, 0), (0, 4), (4, 6)]
    assert [bounds(*sent.pieces(i)) for i in range(3)] == [[(0, 6)], [(6, 10)], [(10, 15)]]


def test_wire_of_some_leaves_has_blocks_as_long_as_the_longest() -> None:
    sent = wire(THREE, (0, 2))  # ranks hold 6 + 0, 0 + 2 and 0 + 3 elements of w and u
    assert sent.stride == 6
    assert bounds(*sent.pieces(0)) == [(0, 6)]
    assert bounds(*sent.pieces(1)) == [(6, 8), (12, 15)]
    assert wire(THREE, (2,)).stride == 4  # 3, padded to 2


def test_a_partial_wire_is_scattered_without_padding() -> None:
    assert wire(THREE, (0, 1, 2)).sent == 18  # the bucket, padding included
    assert wire(THREE, (0, 2)).sent == 6 + 5 and wire(THREE, (0, 2)).numel == 18
    assert wire(THREE, (1,)).sent == 4 and wire(ROWS, (0,)).sent == 3
    assert wire(ROWS, (0, 1)).sent == 16  # gaps too


def test_wires_are_interned() -> None:
    twin = Layout("layer", THREE.leaves, VirtualMesh(fsdp=3), align=2)
    assert wire(twin, (0, 2)) is wire(THREE, (0, 2))


def test_what_a_wire_worked_out_is_remembered_in_models_of_many_leaves() -> None:
    leaves = tuple(Leaf(f"layer.{i}", (5,)) for i in range(300))
    sent = wire(Layout("layer", leaves, VirtualMesh(fsdp=2)), tuple(range(300)))
    first, second = ([sent.pieces(i) for i in range(300)] for _ in range(2))
    assert all(a is b for a, b in zip(first, second))


@pytest.mark.parametrize("change", [{"bucket": "other"}, {"align": 4}, {"replicated": True}])
def test_layouts_differ_in_any_argument(change: dict[str, object]) -> None:
    arguments = {"bucket": "layer", "leaves": THREE.leaves, "mesh": THREE.mesh, "align": 2}
    assert Layout(**arguments) == THREE and Layout(**arguments | change) != THREE


def test_hashes_tell_layouts_apart() -> None:
    assert len({hash(replace(THREE, align=align)) for align in range(1, 9)}) == 8


def test_a_boundary_falls_between_blocks() -> None:
    assert ROWS.numel == 15 and ROWS.padded == 16 and ROWS.shard == 8
    assert bounds(*ROWS.leaf_ranges) == [(0, 3), (4, 16)] and ROWS.has_gaps and not THREE.has_gaps
    assert bounds(*(ROWS.part(1, rank) for rank in range(2))) == [(0, 4), (4, 12)]


def test_slots_count_from_the_start_of_the_slice() -> None:
    assert bounds(ROWS.slot(0, 0), ROWS.slot(1, 0)) == [(0, 3), (4, 8)]
    assert bounds(ROWS.slot(0, 1), ROWS.slot(1, 1)) == [(0, 0), (0, 8)]
    assert bounds(ROWS.slot(0, None), ROWS.slot(1, None)) == [(0, 3), (4, 16)]
    assert bounds(*(THREE.slot(2, rank) for rank in range(3))) == [(6, 6), (4, 6), (0, 3)]


def test_wire_of_all_leaves_keeps_the_gaps() -> None:
    sent = wire(ROWS, (0, 1))
    assert sent.has_gaps and sent.stride == 8 and sent.numel == 16
    assert [bounds(*sent.block(rank)) for rank in range(2)] == [[(0, 3), (4, 8)], [(0, 0), (0, 8)]]
    assert [bounds(*sent.pieces(i)) for i in range(2)] == [[(0, 3)], [(4, 16)]]


def test_wire_of_some_leaves_has_no_gaps() -> None:
    sent = wire(ROWS, (1,))
    assert not sent.has_gaps and [bounds(*sent.block(rank)) for rank in range(2)] == [[(0, 4)], [(0, 8)]]
    assert bounds(*sent.pieces(0)) == [(0, 4), (8, 16)]


def test_a_replicated_layout_has_no_gaps() -> None:
    layout = replace(ROWS, replicated=True)
    assert layout.padded == 15 and bounds(*layout.leaf_ranges) == [(0, 3), (3, 15)] and not layout.has_gaps


def test_layouts_differ_in_blocks() -> None:
    other = replace(ROWS, leaves=(Leaf("b", (3,)), Leaf("w", (3, 4))))
    assert other != ROWS and hash(other) != hash(ROWS)


@pytest.mark.parametrize("block", [0, -2])
def test_a_block_has_an_element(block: int) -> None:
    with pytest.raises(FzeroError, match=f"w: has blocks of {block} elements; a block is at least 1 element"):
        Leaf("w", (3, 4), block)
