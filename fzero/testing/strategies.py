"""Strategies of hypothesis: meshes, layouts, trees of leaves, models and train steps.

@given(strategies.train_steps())
def test_my_law(step): ...
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from fzero import tree
from fzero.base.errors import FzeroError
from fzero.base.mesh import VirtualMesh
from fzero.layout.layout import Layout, Leaf
from fzero.testing.steps import (
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
    TrainStep,
)

try:
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import strategies as st
except ImportError as error:
    raise FzeroError(
        "fzero.testing.strategies", "needs hypothesis, which is not installed", "pip install 'fzero[testing]'"
    ) from error

STATE_DTYPES = ("float64", "float64", "float64", "float32", "bfloat16")


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


def small_meshes(*, max_world: int = 16) -> st.SearchStrategy[VirtualMesh]:
    """Meshes of at most `max_world` ranks in all, on one axis or two, state sharded over either of them."""
    sides = st.integers(1, math.isqrt(max_world))
    return st.one_of(
        st.integers(1, max_world).map(lambda world: VirtualMesh(fsdp=world)),
        st.builds(lambda replicas, world: VirtualMesh(replica=replicas, fsdp=world), sides, sides),
        st.builds(lambda world, replicas: VirtualMesh(fsdp=world, replica=replicas), sides, sides),
    )


def layouts(
    *, max_world: int = 9, max_leaves: int = 5, aligns: Sequence[int] = (1, 2, 3, 16), max_block: int = 1
) -> st.SearchStrategy[Layout]:
    """Layouts of one to `max_leaves` leaves, of blocks of up to `max_block` elements."""
    leaf = st.tuples(leaf_shapes(), st.integers(1, max_block) if max_block > 1 else st.just(1))
    drawn = st.lists(leaf, min_size=1, max_size=max_leaves)
    leaves = drawn.map(lambda drawn: tuple(Leaf(f"leaf{i}", *given) for i, given in enumerate(drawn)))
    return st.builds(Layout, st.just("bucket"), leaves, meshes(max_world=max_world), st.sampled_from(aligns))


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
def train_steps(
    draw: st.DrawFn,
    *,
    max_world: int = 16,
    max_ops: int = 6,
    losses: Sequence[str] = RIGHT,
    stages: Sequence[int] = (1, 2, 3),
    dtypes: Sequence[str] = STATE_DTYPES,
    loops: Sequence[str] = ("",),
    compute: str = "float64",
) -> TrainStep:
    """Train steps with every option of `TrainStep`: `loops` among `LOOPS`, leaves of a layer of these `dtypes`, and
    activations of the dtype `compute`."""
    ops = tuple(draw(st.lists(operations(), min_size=1, max_size=max_ops)))
    chosen: Any = tuple(draw(st.lists(st.sampled_from(dtypes), min_size=len(NAMES), max_size=len(NAMES))))
    is_coarse = "bfloat16" in chosen or any(op.name == "low" or "rounded" in op.through for op in ops)
    # means over the examples of a microbatch, which ranks group otherwise
    takes_means = any(op.name == "center" for op in ops)
    loop = draw(st.sampled_from(loops))
    accumulates = loop in ("each", "once")
    return TrainStep(
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
        dtypes=chosen,
        compute=compute,
        loss=draw(st.sampled_from(losses)),
        averaged=draw(st.booleans()) and not accumulates,
        functorch=draw(st.booleans()) and not loop,
        loop=loop,
        stage=draw(st.sampled_from(stages)),
        donate=draw(st.booleans()),
    )


@st.composite
def models(
    draw: st.DrawFn, *, max_layers: int = 3, max_width: int = 6, dtypes: Sequence[torch.dtype] = (torch.float32,)
) -> torch.nn.Sequential:
    """Modules from [rows, width] to [rows, width]: linear layers with a bias or without, norms and activations between
    them, and sometimes two layers that share a weight. `model[0].in_features` is the width."""
    width = draw(st.integers(1, max_width))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(draw(st.integers(0, 99)))
        layers: list[torch.nn.Module] = []
        for _ in range(draw(st.integers(1, max_layers))):
            layers.append(torch.nn.Linear(width, width, bias=draw(st.booleans())))
            layers += draw(st.sampled_from([[], [torch.nn.Tanh()], [torch.nn.LayerNorm(width), torch.nn.GELU()]]))
        model = torch.nn.Sequential(*layers)
    if draw(st.booleans()):
        first, *_, last = [x for x in (layers[0], *layers) if isinstance(x, torch.nn.Linear)]
        last.weight = first.weight
    return model.to(draw(st.sampled_from(dtypes)))


def sample(strategy: st.SearchStrategy[Any], count: int) -> list[Any]:
    """So many values of a strategy, the same ones each time."""
    values = list[Any]()

    @settings(
        max_examples=count, phases=[Phase.generate], database=None, derandomize=True, deadline=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(strategy)
    def note(value: Any) -> None:
        values.append(value)

    note()
    return values
