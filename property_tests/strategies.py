"""Strategies of the property tests."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from hypothesis import strategies as st

from fzero import tree
from fzero.base.mesh import VirtualMesh
from fzero.layout.layout import Layout, Leaf, Wire, wire
from property_tests.steps import (
    NAMES,
    OPERATIONS,
    OPTIMIZERS,
    PENALTIES,
    RIGHT,
    STEADY,
    THROUGH,
    Of,
    Op,
    Optimizer,
    Penalty,
    Step,
)


def ranges(*, max_stop: int = 20) -> st.SearchStrategy[range]:
    """Half-open ranges within [0, max_stop], empty ones included."""
    ends = st.tuples(st.integers(0, max_stop), st.integers(0, max_stop))
    return ends.map(lambda pair: range(min(pair), max(pair)))


def sizes(*, max_size: int = 9, max_count: int = 6) -> st.SearchStrategy[list[int]]:
    """Lengths of consecutive pieces, zeros included."""
    return st.lists(st.integers(0, max_size), max_size=max_count)


def leaf_shapes(*, max_dims: int = 3, max_side: int = 4) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes of leaves: 0-d, zero-size, and others."""
    return st.lists(st.integers(0, max_side), max_size=max_dims).map(tuple)


def meshes(*, max_world: int = 9) -> st.SearchStrategy[VirtualMesh]:
    """Meshes whose shard axis has up to `max_world` ranks: named fsdp, named otherwise, or the inner of two."""
    worlds = st.integers(1, max_world)
    return st.one_of(
        worlds.map(lambda world: VirtualMesh(fsdp=world)),
        worlds.map(lambda world: VirtualMesh(data=world)),
        st.builds(lambda replicas, world: VirtualMesh(replica=replicas, fsdp=world), st.integers(1, 3), worlds),
    )


def layouts(
    *, max_world: int = 9, max_leaves: int = 5, aligns: Sequence[int] = (1, 2, 3, 16), max_block: int = 1
) -> st.SearchStrategy[Layout]:
    """Layouts of one to `max_leaves` leaves, of blocks of up to `max_block` elements."""
    leaf = st.tuples(leaf_shapes(), st.integers(1, max_block) if max_block > 1 else st.just(1))
    drawn = st.lists(leaf, min_size=1, max_size=max_leaves)
    leaves = drawn.map(lambda drawn: tuple(Leaf(f"leaf{i}", *given) for i, given in enumerate(drawn)))
    return st.builds(Layout, st.just("bucket"), leaves, meshes(max_world=max_world), st.sampled_from(aligns))


@st.composite
def layouts_with_ranks(draw: st.DrawFn, *, max_world: int = 9, max_block: int = 1) -> tuple[Layout, int]:
    """A layout and one of its ranks."""
    layout = draw(layouts(max_world=max_world, max_block=max_block))
    return layout, draw(st.integers(0, layout.world - 1))


@st.composite
def wires(draw: st.DrawFn, *, max_world: int = 5, complete: bool = False, max_block: int = 1) -> Wire:
    """Wires of one leaf of a layout or more, in order; of all leaves if `complete`."""
    layout = draw(layouts(max_world=max_world, max_block=max_block))
    everything = range(len(layout.leaves))
    chosen = everything if complete else draw(st.sets(st.sampled_from(everything), min_size=1))
    return wire(layout, tuple(sorted(chosen)))


def dtypes() -> st.SearchStrategy[torch.dtype]:
    """What leaves are made of."""
    return st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.int64])


@st.composite
def wires_with_leaves(
    draw: st.DrawFn, *, complete: bool = False, max_block: int = 1
) -> tuple[Wire, list[torch.Tensor]]:
    """A wire and the leaves that it carries, in full. No element is zero, so that padding differs from all of them."""
    sent, dtype = draw(wires(complete=complete, max_block=max_block)), draw(dtypes())
    shapes = [sent.layout.leaves[leaf].shape for leaf in sent.leaves]
    numbers = torch.arange(1, sum(map(math.prod, shapes)) + 1).to(dtype).split([math.prod(shape) for shape in shapes])
    return sent, [flat.view(shape) for flat, shape in zip(numbers, shapes)]


def small_meshes(*, max_world: int = 16) -> st.SearchStrategy[VirtualMesh]:
    """Meshes of at most `max_world` ranks in all, on one axis or two, state sharded over either of them."""
    sides = st.integers(1, math.isqrt(max_world))
    return st.one_of(
        st.integers(1, max_world).map(lambda world: VirtualMesh(fsdp=world)),
        st.builds(lambda replicas, world: VirtualMesh(replica=replicas, fsdp=world), sides, sides),
        st.builds(lambda world, replicas: VirtualMesh(fsdp=world, replica=replicas), sides, sides),
    )


def leaves_to_fill(*, dtypes: Sequence[str] = ("float64", "float32", "bfloat16")) -> st.SearchStrategy[Of]:
    """Leaves yet to be filled: 0-d, without elements, of equal shapes, and others."""
    return st.builds(
        Of, st.sampled_from([(), (3,), (2, 3), (0, 2), (4, 4), (1, 17)]) | leaf_shapes(), st.sampled_from(dtypes)
    )


def param_trees(
    *, dtypes: Sequence[str] = ("float64", "float32", "bfloat16"), max_leaves: int = 6
) -> st.SearchStrategy[tree.Tree]:
    """Trees of leaves yet to be filled: dicts, lists and tuples in each other, some empty, or one leaf alone."""
    return st.recursive(
        leaves_to_fill(dtypes=dtypes),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3) | st.tuples(inner)
        ),
        max_leaves=max_leaves,
    )


def operations() -> st.SearchStrategy[Op]:
    """One operation of a step's forward pass, mostly on recent values."""
    return st.builds(
        Op,
        st.sampled_from(sorted(OPERATIONS)),
        st.just(-1) | st.integers(0, 4),
        st.integers(0, 4),
        st.integers(0, 2),
        st.lists(st.sampled_from(sorted(THROUGH)), max_size=3).map(tuple),
        st.booleans(),
    )


@st.composite
def steps(
    draw: st.DrawFn, *, max_world: int = 16, losses: Sequence[str] = RIGHT, stages: Sequence[int] = (1, 2, 3)
) -> Step:
    """Train steps with every option of `Step`."""
    ops = tuple(draw(st.lists(operations(), min_size=1, max_size=6)))
    dtypes = tuple(draw(st.lists(st.sampled_from(STATE_DTYPES), min_size=len(NAMES), max_size=len(NAMES))))
    is_coarse = "bfloat16" in dtypes or any(op.name == "low" or "rounded" in op.through for op in ops)
    takes_means = any(
        op.name == "center" for op in ops
    )  # over the examples of a microbatch, which ranks group otherwise
    return Step(
        mesh=draw(small_meshes(max_world=max_world)),
        ops=ops,
        penalties=tuple(
            draw(st.lists(st.builds(Penalty, st.sampled_from(sorted(PENALTIES)), st.integers(0, 20)), max_size=3))
        ),
        optimizer=draw(
            st.builds(
                Optimizer,
                st.sampled_from(STEADY if is_coarse else sorted(OPTIMIZERS)),
                st.sampled_from([None, 0.1, 10.0]),
                st.booleans(),
            )
        ),
        others=draw(param_trees(dtypes=("float64",), max_leaves=3)),
        layers=draw(st.integers(1, 3)),
        width=draw(st.integers(1, 6)),
        rows=draw(st.integers(1, 3)),
        microbatches=1 if takes_means else draw(st.integers(1, 3)),
        dtypes=dtypes,
        loss=draw(st.sampled_from(losses)),
        averaged=draw(st.booleans()),
        functorch=draw(st.booleans()),
        stage=draw(st.sampled_from(stages)),
        donate=draw(st.booleans()),
    )


STATE_DTYPES = ("float64", "float64", "float64", "float32", "bfloat16")
