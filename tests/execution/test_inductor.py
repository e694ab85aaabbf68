"""`shard(..., compile=True)` on ranks: the same step up to rounding, compiled once for equal layers.

Inductor takes seconds for each fragment, so one run of two ranks has it all; what fragments are is for
`test_outline.py`, which needs no compiler.
"""

from __future__ import annotations

import fcntl
import functools
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import traces
from processes import run
from programs import layers, mlp, training
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh

import fzero
from fzero import optim, tree
from fzero.execution import inductor
from fzero.execution.inductor import compile_fragment
from fzero.execution.outline import Fragment, Value

TOLERANCE = 1e-5
"""Absolute for a parameter after three steps in float32 of about RATE each; relative for a loss.

What is fused is added in another order, and tanh comes from another library: a few roundings of 6e-8 each, of which
Adam may make RATE / EPS = 20 times as much a step (see test_parity.py), however small the parameter is: a bias that was
zero is off by as much as a weight. Kernels of MKL also round by where memory lies, so runs differ in this.
"""
RATE, EPS = 0.02, 1e-3
CLIPPED = optim.chain(optim.clip_by_global_norm(0.5), optim.adamw(RATE, eps=EPS))
CASES = [
    (2, 1, "perceptron"), (2, 3, "perceptron"), (2, "20KiB", "transformer"), (1, 3, "transformer"), (2, 3, "scanned"),
]  # fmt: skip
"""World size, stage or memory budget, and the name of the model. The budget lies between the least, 18 KiB, and 28 KiB
of stages 2 and 3: some values are computed again, and some buckets are gathered again."""
COMPILING = timedelta(minutes=20)
"""Compilation takes 45 s on two quiet cores without inductor's cache, and minutes on a busy machine. The first test of
a world size compiles for all tests, and a rank that compiles keeps the other rank waiting."""

pytestmark = pytest.mark.timeout(COMPILING.total_seconds() + 60)


class Block(nn.Module):
    """A transformer block without biases: [B, T, 8] -> [B, T, 8]."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(8), nn.Linear(8, 24, bias=False)
        self.up, self.down = nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        x = x + nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return x + self.down(nn.functional.gelu(self.up(x)))


class Ran(NamedTuple):
    """What came of a step on one rank."""

    losses: list[Tensor]
    params: dict[str, Tensor]
    compilations: list[int]  # up to each step
    in_place: bool  # whether new parameters lie where the old ones did
    given_up: bool  # and the old ones are gone


def perceptron() -> tuple[tree.Tree, Any]:
    """Four layers, and a loss with a collective whose result has other strides than its operand."""

    def loss(params: tree.Tree, x: Tensor) -> Tensor:
        y = fzero.pmean(mlp(params, x).t(), "fsdp")  # [5, B]
        return (y.exp() + y.tanh()).square().mean()

    return layers(4), loss


def transformer() -> tuple[tree.Tree, Any]:
    """Three blocks."""
    torch.manual_seed(0)
    params, apply = fzero.lower(nn.Sequential(*(Block() for _ in range(3))))
    return params, lambda params, x: apply(params, x.new_ones(2, 6, 8) * x[:, None, :1]).cos().square().mean()


def scanned() -> tuple[tree.Tree, Any]:
    """The three blocks of the transformer in a loop."""
    params, _ = transformer()
    apply = fzero.lower(Block())[1]

    def loss(params: tree.Tree, x: Tensor) -> Tensor:
        h = x.new_ones(2, 6, 8) * x[:, None, :1]
        h, _ = fzero.scan(lambda h, _, block: (apply(block, h), None), h, layers=list(params))
        return h.cos().square().mean()

    return params, loss


MODELS = {model.__name__: model for model in (perceptron, transformer, scanned)}


def trained(mesh: DeviceMesh, stage: int | str, name: str, compile: bool, counted: list[Fragment]) -> Ran:
    """Three steps of training."""
    params, loss = MODELS[name]()
    params = fzero.partition(params, mesh, persist=8)
    state = CLIPPED.init(params)
    how: Any = {"memory": stage} if isinstance(stage, str) else {"stage": stage}
    step = fzero.shard(training(CLIPPED, loss), mesh, compile=compile, **how)
    losses, compilations, before = [], [], len(counted)
    x = torch.randn(2, 5, generator=torch.Generator().manual_seed(mesh.get_rank()))
    for _ in range(3):
        old, places = params, [leaf.local.data_ptr() for leaf in tree.leaves(params)]
        params, state, value = step(params, state, x)
        losses.append(value)
        compilations.append(len(counted) - before)
    in_place = places == [leaf.local.data_ptr() for leaf in tree.leaves(params)]
    full = dict(zip(tree.paths(params), tree.leaves(fzero.unpartition(params))))
    return Ran(losses, full, compilations, in_place, is_gone(old))


def is_gone(params: tree.Tree) -> bool:
    try:
        _ = tree.leaves(params)[0].local
    except fzero.FzeroError:
        return True
    return False


@contextmanager
def turn() -> Iterator[None]:
    """Ranks compile one after the other: the second finds a fragment in inductor's cache."""
    with (Path(tempfile.gettempdir()) / "fzero_test_inductor.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def tried(mesh: DeviceMesh, cases: list[tuple[int | str, str]]) -> dict[Any, Any]:
    """On one rank: each case interpreted and compiled, and the refusal where only rank 0 compiles."""
    import torch._inductor.config

    torch._inductor.config.compile_threads = 1
    counted: list[Fragment] = []

    def counting(fragment: Fragment) -> Any:
        counted.append(fragment)
        with turn():
            return compile_fragment(fragment)

    with pytest.MonkeyPatch.context() as patch, traces.share_traces():
        patch.setattr("fzero.transform.compile_fragment", counting)
        outcomes: dict[Any, Any] = {
            case: [trained(mesh, *case, compile, counted) for compile in (False, True)] for case in cases
        }
        if mesh.size() > 1:
            with pytest.raises(fzero.FzeroError) as refused:
                trained(mesh, *cases[0], mesh.get_rank() == 0, counted)
            outcomes["refused"] = str(refused.value)
    return outcomes


@functools.cache
def ranks(world: int) -> list[dict[Any, Any]]:
    """What each of so many ranks made of its cases."""
    cases = [(stage, name) for size, stage, name in CASES if size == world]
    return run(world, tried, cases, timeout=COMPILING.total_seconds(), stall=COMPILING)


@pytest.mark.parametrize(("world", "stage", "name"), CASES)
def test_a_compiled_step_is_the_interpreted_one_up_to_rounding(world: int, stage: int | str, name: str) -> None:
    outcomes = [rank[stage, name] for rank in ranks(world)]
    for interpreted, result in outcomes:
        torch.testing.assert_close(result.losses, interpreted.losses, rtol=TOLERANCE, atol=0)
        for path, leaf in interpreted.params.items():
            assert (result.params[path] - leaf).abs().max() <= TOLERANCE, path
            assert torch.equal(result.params[path], outcomes[0][1].params[path]), f"{path} differs between ranks"


@pytest.mark.parametrize(("world", "stage", "name"), CASES)
def test_the_first_step_compiles_and_no_other(world: int, stage: int | str, name: str) -> None:
    for rank in ranks(world):
        interpreted, result = rank[stage, name]
        assert set(interpreted.compilations) == {0}
        assert result.compilations[0] > 0 and len(set(result.compilations)) == 1


@pytest.mark.parametrize(("world", "stage", "name"), CASES)
def test_state_is_updated_in_place_and_given_up(world: int, stage: int | str, name: str) -> None:
    for rank in ranks(world):
        _, result = rank[stage, name]
        assert result.in_place and result.given_up


def test_ranks_that_do_not_all_compile_are_told() -> None:
    for rank in ranks(2):
        assert rank["refused"].startswith(
            "compile: ranks are about to run different steps: rank 0 has 'compile: True', rank 1 has 'compile: False'"
        )


LENGTHS = (6, 9, 4, 30, 17)


def train_at_lengths(mesh: DeviceMesh) -> list[list[tuple[list[float], list[int]]]]:
    """On one rank, for blocks one by one and in a loop, interpreted and compiled: the loss at each length, and how many
    fragments were compiled by then."""
    counted: list[Any] = []
    given = inductor._compile

    def count(*args: Any) -> Any:
        counted.append(args)
        return given(*args)

    def train(compile: bool, loss_of: Any) -> tuple[list[float], list[int]]:
        params = fzero.partition(transformer()[0], mesh, persist=8)
        state, losses, counts = CLIPPED.init(params), list[float](), list[int]()
        step = fzero.shard(training(CLIPPED, loss_of), mesh, compile=compile)
        before = len(counted)
        for length in LENGTHS:
            x = torch.randn(2, length, 8, generator=torch.Generator().manual_seed(length + mesh.get_rank()))
            params, state, loss = step(params, state, x)
            losses.append(loss.item())
            counts.append(len(counted) - before)
        return losses, counts

    apply = fzero.lower(Block())[1]

    def flat(params: tree.Tree, x: Tensor) -> Tensor:
        for block in params:
            x = apply(block, x)
        return x.cos().square().mean()

    def rolled(params: tree.Tree, x: Tensor) -> Tensor:
        x, _ = fzero.scan(lambda x, _, block: (apply(block, x), None), x, layers=list(params))
        return x.cos().square().mean()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inductor, "_compile", count)
        return [[train(compile, loss_of) for compile in (False, True)] for loss_of in (flat, rolled)]


def test_lengths_share_what_inductor_compiles() -> None:
    for rank in run(2, train_at_lengths, timeout=COMPILING.total_seconds(), stall=COMPILING):
        for interpreted, compiled in rank:
            torch.testing.assert_close(compiled[0], interpreted[0], rtol=TOLERANCE, atol=0)
            first, second, *others = compiled[1]
            assert 0 < first < second and set(others) == {second}


@pytest.mark.parametrize("other", ["graphs", 1, None])
def test_other_values_are_refused(other: Any) -> None:
    with pytest.raises(fzero.FzeroError, match=r"compile: is .*; give True or False or 'graph'"):
        fzero.shard(lambda x: x, None, compile=other)


def one(target: Any, *inputs: Value) -> Fragment:
    """A fragment of one operation."""
    graph = fx.Graph()
    graph.output((graph.call_function(target, tuple(graph.placeholder(f"x{i}") for i in range(len(inputs)))),))
    return Fragment(str(graph), inputs, graph)


SQUARE = Value((3, 3), (3, 1), torch.float32, torch.device("cpu"))


def test_an_equal_fragment_comes_from_the_cache() -> None:
    """Also that of another rank or of an earlier run: the cache is on disk."""
    from torch._dynamo.utils import counters

    for _ in range(2):
        before = counters["inductor"]["fxgraph_cache_hit"]
        square = compile_fragment(one(torch.ops.aten.mm.default, SQUARE, SQUARE))
    assert counters["inductor"]["fxgraph_cache_hit"] == before + 1
    assert torch.equal(square(torch.eye(3), torch.ones(3, 3))[0], torch.ones(3, 3))


def test_without_a_compiler_the_way_out_is_told() -> None:
    import torch._inductor.config as config

    missing = {"cpp.cxx": (None, "no-such-compiler"), "force_disable_caches": True, "compile_threads": 1}
    with config.patch(missing), pytest.raises(fzero.FzeroError, match=r"no C\+\+ compiler; install g\+\+"):
        compile_fragment(one(torch.ops.aten.cos.default, SQUARE))


def test_what_inductor_fails_on_is_told() -> None:
    with pytest.raises(fzero.FzeroError, match=r"inductor failed on .*aten.mm.*; leave compile=True out"):
        compile_fragment(one(torch.ops.aten.mm.default, SQUARE, SQUARE._replace(shape=(2, 2))))
