"""Owners: by hand, and for the matrices of transformers."""

from __future__ import annotations

import pytest

from fzero.base.errors import FzeroError
from fzero.base.mesh import VirtualMesh
from fzero.layout.layout import Layout, Leaf
from fzero.layout.owners import Owners, Piece, balance, plan_owners


def volume(rows: int, columns: int) -> int:
    return rows * columns


def newton_schulz(rows: int, columns: int) -> int:
    short, long = sorted((rows, columns))
    return 4 * short * short * long + 2 * short**3


def layout_of(world: int, *shapes: tuple[int, ...], name: str = "blocks", align: int = 1) -> Layout:
    leaves = tuple(Leaf(f"{name}.{i}", shape) for i, shape in enumerate(shapes))
    return Layout(name, leaves, VirtualMesh(fsdp=world), align)


def test_pieces_by_hand() -> None:
    # a [2, 3] and b [3, 2] on 2 ranks of 6 elements, cut: a and b as they are. Both lie whole on one rank.
    layout = layout_of(2, (2, 3), (3, 2))
    plan = plan_owners(((layout, 0), (layout, 1)), (2, 3), volume)
    assert plan.owners == (0, 1) and plan.moved == plan.busiest == 0

    # c [4, 3] on 2 ranks: rank 0 has its first 6 elements, and owns all of it.
    layout = layout_of(2, (4, 3))
    plan = plan_owners(((layout, 0),), (4,), volume)
    assert plan.owners == (0,) and (plan.moved, plan.busiest, plan.largest) == (6, 6, 12)
    route = plan.route(0)
    assert route.kept == (Piece(0, 0, range(6), range(6)),)
    assert route.borrowed == ((), (Piece(0, 0, range(6), range(6, 12)),))
    assert plan.route(1).lent == ((Piece(0, 0, range(6), range(6, 12)),), ())
    assert plan.route(1).matrices == () == plan.route(1).kept


def test_rows_of_a_leaf_have_owners_of_their_own() -> None:
    layout = layout_of(3, (6, 2), align=4)  # 4 elements a rank
    plan = plan_owners(((layout, 0),), (2, 3, 1), volume)  # elements 0-3, 4-9, 10-11
    assert [(matrix.part, matrix.rows) for matrix in plan.matrices] == [
        (range(4), 2), (range(4, 10), 3), (range(10, 12), 1),
    ]  # fmt: skip
    assert plan.owners == (0, 1, 2)  # the first and the last are whole where they are, and rank 1 has no work yet
    assert plan.moved == 2 and plan.costliest == 6


def test_a_replicated_leaf_is_everywhere() -> None:
    mesh = VirtualMesh(fsdp=4)
    whole = Layout("whole", (Leaf("w", (3, 3)),), mesh, replicated=True)
    plan = plan_owners(((whole, 0), (layout_of(4, (4, 4)), 0)), (3, 4), volume)
    assert plan.owners == (None, 0) and plan.costliest == 9 + 16 and plan.largest == 25
    assert [len(plan.route(rank).matrices) for rank in range(4)] == [2, 1, 1, 1]


def test_the_costliest_come_first_and_homes_count() -> None:
    assert balance([3, 5, 4, 2], [None] * 4, 2) == [1, 0, 1, 0]
    assert balance([3, 5, 4, 2], [None, None, None, 0], 2) == [1, 1, 0, 0]
    assert balance([1], [None], 3) == [0]


@pytest.mark.parametrize("rows", [(3,), (2, 3), (4, 1), (0, 4)])
def test_rows_that_do_not_add_up_are_refused(rows: tuple[int, ...]) -> None:
    with pytest.raises(FzeroError, match=r"rows|more than its leaves"):
        plan_owners(((layout_of(2, (4, 3)), 0),), rows, volume)


def transformer(world: int, layers: int, width: int, split: bool) -> Owners:
    """A GPT's layers as `partition` places them: fused queries, keys and values, output, up and down."""
    shapes = ((3 * width, width), (width, width), (4 * width, width), (width, 4 * width))
    layouts = [layout_of(world, *shapes, name=str(layer), align=16) for layer in range(layers)]
    first = (width,) * 3 if split else (3 * width,)
    places = tuple((layout, leaf) for layout in layouts for leaf in range(4))
    return plan_owners(places, (*first, width, 4 * width, width) * layers, newton_schulz)


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize(("world", "layers", "width"), [(8, 12, 768), (8, 12, 64), (64, 96, 12288), (2, 4, 128)])
def test_transformers_are_balanced_within_a_tenth(world: int, layers: int, width: int, split: bool) -> None:
    plan = transformer(world, layers, width, split)
    assert plan.costliest <= 1.1 * max(sum(plan.costs) / world, max(plan.costs))
    assert plan.moved < sum(len(matrix.part) for matrix in plan.matrices)
