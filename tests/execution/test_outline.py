"""Fragments: an outlined program gives the same results, and equal layers share one fragment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from programs import EVERY_STEP, MESH, Case, apply, assert_same, calls, dense, layers, rows, training, tried
from torch import Tensor, nn

import fzero
from fzero import ops, optim
from fzero.base.mesh import VirtualMesh
from fzero.execution.outline import Fragment, outline
from fzero.passes import defaults
from fzero.program.program import Program
from fzero.program.records import name_of, record


def fragments(program: Program) -> list[Fragment]:
    """What the calls of an outlined program are of, in order."""
    return [node.target for node in program.graph.nodes if isinstance(node.target, Fragment)]


def inside(program: Program) -> list[str]:
    """The names of all operations in fragments."""
    return [name_of(n) for f in fragments(program) for n in f.graph.nodes if n.op == "call_function"]


def outlined(step: Callable[..., Any], *args: Any, mesh: VirtualMesh = MESH) -> Program:
    """The outlined program of a step, by default on `rows`. Checks that results stay the same."""
    case = Case(step, mesh, args or (rows(mesh),))
    program = apply(case.trace(), *defaults(stage=3, in_place=True))
    result = apply(program, outline)
    assert_same(case.run(result), case.run(program))
    return result


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(("name", "world"), EVERY_STEP)
def test_results_are_the_same_bit_for_bit(name: str, world: int, stage: int) -> None:
    case, program, _ = tried(name, world)
    program = apply(program, *defaults(stage=stage, in_place=stage != 2))
    result = apply(program, outline)
    assert fragments(result)
    assert_same(case.run(result), case.run(program))


class Block(nn.Module):
    """A transformer block, [B, T, 8] -> [B, T, 8], with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + nn.functional.dropout(self.out(mixed.transpose(1, 2).flatten(2)), 0.1)


def transformer(depth: int, stage: int, remat: bool) -> tuple[Program, Program]:
    """The program of a training step of `depth` blocks, and the outlined program."""
    params, apply = fzero.lower(nn.Sequential(nn.Embedding(11, 8), *(Block() for _ in range(depth)), nn.Linear(8, 11)))
    optimizer = optim.chain(optim.clip_by_global_norm(0.5), optim.adamw(0.1))

    def loss(params: Any, tokens: Tensor) -> Tensor:
        return nn.functional.cross_entropy(apply(params, tokens).flatten(0, 1), tokens.flatten())

    params = fzero.partition(params, MESH)
    tokens = torch.arange(20).view(4, 5) % 11
    train_step = training(optimizer, fzero.remat(loss) if remat else loss)
    program = fzero.simulate(train_step, MESH, stage=stage).trace(params, optimizer.init(params), tokens)
    return program, outline(program)


@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_layers_are_one_fragment_however_many_there_are(stage: int, remat: bool) -> None:
    shallow, deep = (fragments(transformer(depth, stage, remat)[1]) for depth in (2, 4))
    assert set(shallow) == set(deep)
    assert len(deep) >= len(shallow) + 4  # forward and backward


def test_collectives_draws_and_writes_stay_outside_in_their_order() -> None:
    before, after = transformer(2, 3, remat=False)
    outside = [
        [n.target for n in program.graph.nodes if n.op == "call_function" and record(n).perform is not None]
        for program in (before, after)
    ]
    assert outside[0] == outside[1] != []
    assert not {name for name in inside(after) if name.endswith("_") or name in ("bernoulli", "native_dropout")}


def test_what_is_computed_from_slices_stays_outside() -> None:
    """The program shows the sizes of rank 0's slices; other ranks have other sizes."""

    def step(params: Any, x: Tensor) -> tuple[Tensor, Any]:
        (layer,) = params["layers"]
        decay = {name: (leaf.exp() + leaf.tanh()) * 0.1 for name, leaf in layer.items()}
        return (x.exp() + x.tanh()) * layer["w"].square().sum().sqrt().exp(), decay

    after = outlined(step, fzero.partition(layers(1), MESH), rows(MESH))
    assert {given.shape for fragment in fragments(after) for given in fragment.inputs} == {(2, 5)}


def test_a_view_of_what_a_fragment_gives_shares_its_memory() -> None:
    """A write into the view changes both, so the view is made outside of the fragment."""

    def step(x: Tensor) -> Any:
        y = (x.exp() + x.tanh()) * 2
        row, flat = y.t()[1], y.view(-1)
        flat.add_(1)
        return y * row.sum() + 1, flat.cos().sin()

    after = outlined(step)
    first = fragments(after)[0]
    assert [name_of(n) for n in first.graph.nodes if n.op == "call_function"] == ["exp", "tanh", "add", "mul"]
    assert len(calls(after, first)[0].users) == 1


def test_views_of_what_a_fragment_takes_are_made_outside() -> None:
    after = outlined(lambda x: (x.t()[1:].exp().sin(), x.view(-1)))
    (fragment,) = fragments(after)
    assert fragment.inputs[0][:2] == ((4, 2), (1, 5))


def test_items_of_one_operation_are_results() -> None:
    def step(x: Tensor) -> Any:
        values, indices = (x * 2).sort()
        left, right = values.exp().chunk(2)
        return left, right * indices[0], indices

    outlined(step)


def test_a_constant_is_given_to_a_fragment() -> None:
    after = outlined(lambda x: (x * torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])).exp())
    assert fragments(after)


@pytest.mark.parametrize(
    "step",
    [
        lambda x: x @ x.t(),
        lambda x: (x @ x.t()).exp(),
        lambda x: x.t()[1:],
        lambda x: x.to(torch.complex64).exp().sin().real,
    ],
)
def test_where_there_is_nothing_to_fuse_there_is_no_fragment(step: Any) -> None:
    assert not fragments(outlined(step, torch.ones(4, 2)))


def test_sums_in_no_fixed_order_stay_outside() -> None:
    """Inductor would let threads add in any order."""
    after = transformer(1, 3, remat=False)[1]
    assert calls(after, torch.ops.aten.embedding_dense_backward.default)


SQUARE = torch.ones(4, 4)
ALONE = VirtualMesh(fsdp=1)


@pytest.mark.parametrize(
    ("x", "factor", "equal"),
    [
        (SQUARE * 5, 2.0, True),
        (SQUARE[:2], 2.0, False),
        (SQUARE.expand(4, 4).t()[:, :].as_strided((4, 4), (1, 4)), 2.0, False),
        (SQUARE.double(), 2.0, False),
        (SQUARE, 3.0, False),
        (SQUARE, 2, False),
    ],
)
def test_equal_fragments_have_equal_code_on_equal_tensors(x: Tensor, factor: float, equal: bool) -> None:
    (first,) = fragments(outlined(lambda x: x.exp() * 2.0, SQUARE, mesh=ALONE))
    (second,) = fragments(outlined(lambda x: x.exp() * factor, x, mesh=ALONE))
    assert (first == second, hash(first) == hash(second)) == (equal, equal)


def test_fragments_of_a_loop_over_layers_do_not_grow_with_it() -> None:
    def loss(params: Any, x: Tensor) -> Tensor:
        x, _ = fzero.scan(lambda x, _, layer: (dense(layer, x).exp() * 0.1, None), x, layers=params["layers"])
        return x.square().mean()

    def count(depth: int) -> list[int]:
        optimizer, params = optim.adamw(1e-2), fzero.partition(layers(depth), MESH)
        result = outlined(training(optimizer, loss), params, optimizer.init(params), rows(MESH))
        return [len(fragments(loop.args[0])) for loop in calls(result, ops.loop)]

    assert count(2) == count(5) and len(count(2)) == 2 and min(count(2)) > 0
