"""Laws of owners: every matrix comes together once, and no rank has much more work than it must."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from fzero.base.mesh import VirtualMesh
from fzero.layout.layout import Layout, Leaf
from fzero.layout.owners import Owners, plan_owners
from fzero.layout.parts import cut_into_parts, join_parts
from fzero.layout.splits import Split
from fzero.testing.strategies import meshes


def cube(rows: int, columns: int) -> int:
    return rows * columns * min(rows, columns)


@st.composite
def owners(draw: st.DrawFn, *, max_world: int = 9, max_leaves: int = 4, max_side: int = 5) -> Owners:
    """Owners of matrices of leaves in one or two layouts, whose rows are cut anywhere. The leaves may be split over a
    model axis."""
    ranks = draw(st.integers(1, 3))
    mesh, sides = draw(meshes(max_world=max_world // ranks)), st.integers(0, max_side)
    if is_split := mesh.shard_axis == "fsdp" and draw(st.booleans()):
        axes = draw(st.permutations([*mesh.sizes.items(), ("tp", ranks)]))
        mesh = VirtualMesh(**dict(axes))
    places, rows = [], list[int]()
    for bucket in range(draw(st.integers(1, 2))):
        shapes = draw(
            st.lists(st.tuples(sides, sides) | st.tuples(sides, sides, sides), min_size=1, max_size=max_leaves)
        )
        leaves = []
        for i, shape in enumerate(shapes):
            split = None
            if is_split:
                split = Split("tp", draw(st.integers(0, len(shape) - 1)), draw(st.integers(1, 2)))
                shape = tuple(size * split.parts ** (dim == split.dim) for dim, size in enumerate(shape))
            leaves.append(Leaf(f"{bucket}.{i}", shape, draw(st.integers(1, 3)), split=split))
        is_replicated = not is_split and draw(st.booleans())
        layout = Layout(str(bucket), tuple(leaves), mesh, draw(st.sampled_from([1, 4])), replicated=is_replicated)
        for index in range(len(leaves)):
            places.append((layout, index))
            shape = layout.shape_of(index)
            left = math.prod(shape[:-1]) if math.prod(shape) else 0
            while left:
                rows.append(draw(st.integers(1, left)))
                left -= rows[-1]
    return plan_owners(tuple(places), tuple(rows), cube)


def elements_of(layout: Layout, leaf: int, rank: int) -> list[int]:
    """The elements of a whole leaf that a rank holds."""
    along, position = layout.cut_positions[rank]
    whole = torch.arange(math.prod(layout.shape_of(leaf)))
    parts = cut_into_parts(whole, torch.empty_like(whole), layout, leaf).view(layout.splits, -1)
    part = layout.part(leaf, along)
    return parts[position, part.start : part.stop].tolist()


@given(owners())
def test_every_matrix_comes_together_on_its_owner_once(plan: Owners) -> None:
    # Each element of a leaf is its own number: what arrives at an owner is the matrix.
    for rank in range(plan.world):
        route = plan.route(rank)
        buffer = torch.full((sum(len(at) for _, at in route.matrices),), -1)
        pieces = [(rank, piece) for piece in route.kept]
        pieces += [(peer, piece) for peer, each in enumerate(route.borrowed) for piece in each]
        for holder, piece in pieces:
            held = torch.tensor(elements_of(*plan.places[piece.place], holder))
            assert (buffer[piece.owned.start : piece.owned.stop] == -1).all()
            buffer[piece.owned.start : piece.owned.stop] = held[piece.local.start : piece.local.stop]
        for matrix, at in route.matrices:
            whole = join_parts(buffer[at.start : at.stop], *plan.places[matrix.place], matrix.part)
            assert whole.tolist() == list(matrix.part)


@given(owners())
def test_what_one_rank_lends_another_borrows(plan: Owners) -> None:
    routes = [plan.route(rank) for rank in range(plan.world)]
    for a, mine in enumerate(routes):
        for b, other in enumerate(routes):
            assert [(p.matrix, len(p.local)) for p in mine.lent[b]] == [
                (p.matrix, len(p.local)) for p in other.borrowed[a]
            ]
    sent = [sum(len(piece.local) for each in route.lent for piece in each) for route in routes]
    taken = [sum(len(piece.local) for each in route.borrowed for piece in each) for route in routes]
    assert (plan.moved, plan.busiest) == (sum(sent), max(*sent, *taken, 0))
    assert plan.largest == max(sum(len(at) for _, at in route.matrices) for route in routes)


@given(owners())
def test_a_matrix_that_lies_on_one_rank_stays_there(plan: Owners) -> None:
    for matrix, owner in zip(plan.matrices, plan.owners):
        layout, leaf = plan.places[matrix.place]
        held = [set(elements_of(layout, leaf, rank)) for rank in range(plan.world)]
        holders = [rank for rank, elements in enumerate(held) if elements.issuperset(matrix.part)]
        assert (owner is None) == layout.replicated
        assert layout.replicated or not holders or holders == [owner]


@given(owners())
def test_no_rank_has_more_work_than_the_bound(plan: Owners) -> None:
    """Graham's bound: a share of all work and the largest matrix that moves, or else the matrices that lie there."""
    fixed, moving, shared = [0] * plan.world, [0], 0
    for matrix, cost, owner in zip(plan.matrices, plan.costs, plan.owners):
        if owner is None:
            shared += cost
        elif set(elements_of(*plan.places[matrix.place], owner)).issuperset(matrix.part):
            fixed[owner] += cost
        else:
            moving.append(cost)
    share = (sum(fixed) + sum(moving)) / plan.world
    assert plan.costliest <= shared + max(*fixed, share + max(moving) * (1 - 1 / plan.world))
