"""Laws of order: reads and writes of the same memory keep their order, whatever a pass moves."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import event, given
from hypothesis import strategies as st
from programs import Case
from torch import Tensor, fx

import fzero
from fzero import FzeroError, passes, tree
from fzero.base.mesh import VirtualMesh
from fzero.passes.order import find_changes, find_dependences, find_held, list_accesses, reorder
from fzero.passes.run import check_moves
from fzero.program.records import storage
from property_tests.laws import slow
from property_tests.running import assert_equal

SIZE = 4
ROUNDING = 1e-9
"""Norms and gradients are summed slice by slice, in float64."""


class Line(NamedTuple):
    """A line of a step: an operation on two of the earlier values and a leaf, each modulo their number."""

    name: str
    x: int
    y: int
    leaf: int


def _whole(leaf: Any) -> Tensor:
    """A leaf in full; outside a sharded step the leaf itself."""
    return leaf.full_tensor() if isinstance(leaf, fzero.Sharded) else leaf


def _fit(y: Tensor, x: Tensor) -> Tensor:
    """`y` in the shape of `x`, or its sum where it has another."""
    return y if y.shape == x.shape else y.sum()


VALUES: dict[str, Callable[[Tensor, Tensor, Any], Tensor]] = {
    "zeros": lambda x, y, leaf: torch.zeros(SIZE, SIZE, dtype=torch.float64),
    "set": lambda x, y, leaf: torch.empty(SIZE, SIZE, dtype=torch.float64).copy_(_whole(leaf)),
    "clone": lambda x, y, leaf: x.clone(),
    "copy of a leaf": lambda x, y, leaf: _whole(leaf).clone(),
    "rows": lambda x, y, leaf: x[: len(x) // 2 + 1],
    "last rows": lambda x, y, leaf: x[-1:],
    "columns": lambda x, y, leaf: x.t(),
    "flat": lambda x, y, leaf: x.reshape(-1)[: SIZE * SIZE].view(1, -1) if x.is_contiguous() else x,
    "product": lambda x, y, leaf: torch.tanh(x.sum() * (leaf @ leaf)),
    "sum": lambda x, y, leaf: x * 0.5 + _fit(y, x),
    "uniform": lambda x, y, leaf: (leaf * leaf).sum() + x * 0,
}
"""What makes another value: memory of its own, or a view."""

WRITES: dict[str, Callable[[Tensor, Tensor, Any], Any]] = {
    "add": lambda x, y, leaf: x.add_(_fit(y, x).sin()),
    "copy": lambda x, y, leaf: x.copy_(_fit(y, x).clone()),
    "scale": lambda x, y, leaf: x.mul_(0.5),
    "zero": lambda x, y, leaf: x.zero_(),
    "norm": lambda x, y, leaf: x[0].copy_(leaf.norm()),
    "refill": lambda x, y, leaf: x.fill_(0.25).add_(leaf.sum()),
    "list": lambda x, y, leaf: torch._foreach_mul_([x], 0.75),
}
"""What writes into a value, and so into all views of its memory."""


def lines() -> st.SearchStrategy[list[Line]]:
    index = st.integers(0, 7)
    return st.lists(
        st.builds(Line, st.sampled_from([*VALUES, *WRITES, *WRITES]), index, index, index), min_size=3, max_size=14
    )


def step_of(program: list[Line]) -> Callable[..., Any]:
    """`step(params, x)` -> new parameters, and all values that the lines leave. Lines run on leaves of the parameters
    and of their gradients."""

    def step(params: tree.Tree, x: Tensor) -> Any:
        def loss(params: tree.Tree) -> Tensor:
            y = x
            for layer in params["layers"]:
                y = torch.tanh(y @ layer["w"] + layer["b"])
            return y.square().mean()

        grads = fzero.grad(loss)(params)
        leaves = [layer["w"] for source in (params, grads) for layer in source["layers"]]
        values = [x * 1]
        for line in program:
            x_, y_ = (values[at % len(values)] for at in (line.x, line.y))
            leaf = leaves[line.leaf % len(leaves)]
            if line.name in VALUES:
                values.append(VALUES[line.name](x_, y_, leaf))
            else:
                WRITES[line.name](x_, y_, leaf)
        return tree.map(lambda p, g: p - 0.1 * g, params, grads), [value * 1 for value in values]

    return step


def case_of(program: list[Line], world: int) -> Case:
    """The step on ranks that all have the same batch, so that the plain step has the same results."""
    draw = torch.Generator().manual_seed(0)
    params = {
        "layers": [
            {"w": torch.randn(SIZE, SIZE, generator=draw).double(), "b": torch.randn(SIZE, generator=draw).double()}
            for _ in range(2)
        ]
    }
    mesh = VirtualMesh(fsdp=world)
    x = torch.randn(SIZE, SIZE, generator=draw).double()
    return Case(step_of(program), mesh, (fzero.partition(params, mesh), torch.cat([x] * world)))


def find_held_by_walk(graph: fx.Graph) -> dict[fx.Node, Any]:
    """What `find_held` returns, by a walk over all nodes."""
    changed = find_changes(graph)
    return {node: storage(node) for node in graph.nodes if storage(node) in changed}


PASSES = st.tuples(st.sampled_from([1, 2, 3]), st.booleans())


@given(lines(), st.sampled_from([1, 2, 3]), PASSES)
@slow
def test_a_step_that_writes_into_memory_is_the_plain_step(program: list[Line], world: int, how: Any) -> None:
    case = case_of(program, world)
    stage, donate = how
    params, x = case.args
    expected = tree.leaves(case.step(fzero.unpartition(params), x[:SIZE]))
    step = fzero.simulate(case.step, case.mesh, passes=passes.defaults(stage=stage, in_place=donate))
    got = tree.leaves(fzero.unpartition(step(params, x)))
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine[: len(theirs)], theirs, rtol=ROUNDING, atol=ROUNDING)


@given(lines(), st.sampled_from([1, 2, 3]), st.sampled_from([1, 2, 3]))
@slow
def test_each_pass_keeps_results_bit_for_bit(program: list[Line], world: int, stage: int) -> None:
    case = case_of(program, world)
    before = case.trace()
    outputs = case.run(before)
    for rewrite in passes.defaults(stage=stage):
        name = getattr(rewrite, "func", rewrite).__name__
        accesses = list_accesses(find_held(before.graph))
        after = rewrite(before)
        after.graph.lint()
        check_moves(name, accesses, after.graph)
        assert find_held(after.graph) == find_held_by_walk(after.graph), name
        got = case.run(after)
        assert_equal(got, outputs, ROUNDING if name == "accumulate" else None)
        before, outputs = after, got


def shuffle(graph: fx.Graph, seed: int) -> list[fx.Node]:
    """The nodes in a random order in which each stands behind its inputs."""
    draw, order = random.Random(seed), graph.find_nodes(op="placeholder")
    placed = set(order)
    left = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    while left:
        ready = [node for node in left if placed.issuperset(node.all_input_nodes)]
        order.append(draw.choice(ready))
        placed.add(order[-1])
        left.remove(order[-1])
    return [*order, graph.output_node()]


@given(lines(), st.integers(0, 1000))
@slow
def test_a_program_in_any_order_that_reorder_allows_gives_the_same(program: list[Line], seed: int) -> None:
    case = case_of(program, 2)
    before = case.trace()
    after = before.copy()
    reorder(after.graph, shuffle(after.graph, seed))
    after.graph.lint()
    check_moves("shuffle", list_accesses(find_held(before.graph)), after.graph)
    assert_equal(case.run(after), case.run(before))


@given(lines(), st.integers(0, 1000))
@slow
def test_a_pass_that_swaps_two_dependent_nodes_is_refused(program: list[Line], seed: int) -> None:
    before = case_of(program, 2).trace()
    dependences = find_dependences(find_held(before.graph))
    pairs = [(first.name, node.name) for node, all_ in dependences.items() for first in all_]
    event(f"dependences: {bool(pairs)}")
    if not pairs:
        return
    first, second = random.Random(seed).choice(pairs)
    after = before.copy()
    nodes = {node.name: node for node in after.graph.nodes}
    nodes[second].append(nodes[first])
    with pytest.raises(FzeroError, match="pass 'swap': moves .* in front of"):
        check_moves("swap", list_accesses(find_held(before.graph)), after.graph)
