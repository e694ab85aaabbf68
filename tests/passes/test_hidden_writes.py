"""Running statistics, which kernels write though their schemas do not say so: every pass keeps the update, once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from programs import MESH, Case, names
from torch import Tensor, nn

import fzero
from fzero import FzeroError, ops, tree
from fzero.passes import defaults

MODULES: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)),
    "without weights": lambda: nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6, affine=False), nn.Linear(6, 3)),
    "instance norm": lambda: nn.Sequential(
        nn.Linear(5, 6), nn.Unflatten(1, (2, 3)), nn.InstanceNorm1d(2, track_running_stats=True), nn.Flatten()
    ),
}


def step_of(apply: Any, wrap: Callable[..., Any] = lambda fn: fn, average: bool = True) -> Callable[..., Any]:
    """`step(params, buffers, x)`, which returns gradients, new buffers and the loss, with the statistics averaged over
    ranks or not."""

    def loss(params: Any, buffers: Any, x: Tensor) -> tuple[Tensor, Any]:
        y, buffers = wrap(apply)(params, buffers, x)
        return y.square().mean(), buffers

    def step(params: Any, buffers: Any, x: Tensor) -> tuple[Any, Any, Tensor]:
        (value, new), grads = fzero.value_and_grad(loss, has_aux=True)(params, buffers, x)
        if average:
            new = tree.map(lambda b: fzero.pmean(b, "fsdp") if b.is_floating_point() else b, new)
        return grads, tree.map(kept, buffers, new), value

    return step


def kept(old: Any, new: Tensor) -> Any:
    """`new` as state in the layout of `old`; as it is outside a sharded step."""
    return new if isinstance(old, Tensor) else old.slice_of(new)


def lowered(make: Callable[[], nn.Module]) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    return fzero.lower_stateful(make())


X = torch.randn(8, 5, generator=torch.Generator().manual_seed(0))
"""Two ranks with four rows each."""


@pytest.mark.parametrize("donate", [True, False])
@pytest.mark.parametrize("wrap", [lambda fn: fn, fzero.remat], ids=["", "remat"])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("name", MODULES)
def test_averaged_statistics_are_those_of_plain_torch(name: str, stage: int, wrap: Any, donate: bool) -> None:
    params, buffers, apply = lowered(MODULES[name])
    plain = [step_of(apply)(params, buffers, x) for x in X.chunk(2)]
    grads, statistics, value = tree.map(lambda *each: sum(each[1:], each[0]) / 2, *plain)

    passes = defaults(stage=stage, in_place=donate)
    step = fzero.simulate(step_of(apply, wrap), MESH, passes=passes)
    got = fzero.unpartition(step(fzero.partition(params, MESH), fzero.partition(buffers, MESH), X))
    for mine, theirs in zip(tree.leaves(got), tree.leaves((grads, statistics, value)), strict=True):
        torch.testing.assert_close(mine, theirs.to(mine.dtype))


@pytest.mark.parametrize("name", MODULES)
def test_statistics_of_one_rank_are_no_state(name: str) -> None:
    params, buffers, apply = lowered(MODULES[name])
    step = fzero.simulate(step_of(apply, average=False), MESH)
    with pytest.raises(FzeroError, match=r"running_mean.*(ranks would drift apart|per-rank).*fzero\.pmean"):
        step(fzero.partition(params, MESH), fzero.partition(buffers, MESH), X)


@pytest.mark.parametrize("wrap", [lambda fn: fn, fzero.remat], ids=["", "remat"])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("name", MODULES)
def test_statistics_of_each_rank_that_are_no_state_are_those_of_plain_torch(name: str, stage: int, wrap: Any) -> None:
    params, buffers, apply = lowered(MODULES[name])

    def step(params: Any, x: Tensor) -> Any:
        return fzero.value_and_grad(lambda p: statistics(wrap(apply)(p, buffers, x)), has_aux=True)(params)[0][1]

    def statistics(results: Any) -> tuple[Tensor, Any]:
        return results[0].square().mean(), [b for b in tree.leaves(results[1]) if b.ndim]

    expected = tree.map(lambda *each: torch.cat(each), *(step(params, x) for x in X.chunk(2)))
    got = fzero.simulate(step, MESH, passes=defaults(stage=stage))(fzero.partition(params, MESH), X)
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs)


def replicated(buffers: Any) -> Any:
    """Buffers that every rank holds whole."""
    anchor = fzero.partition({"anchor": torch.zeros(3)}, MESH)["anchor"]
    return tree.map(lambda b: anchor.new_zeros(b.shape, dtype=b.dtype), buffers)


def test_statistics_of_one_rank_are_no_replicated_state() -> None:
    params, buffers, apply = lowered(MODULES["batch norm"])
    step = fzero.simulate(step_of(apply, average=False), MESH)
    with pytest.raises(FzeroError, match=r"running_mean.*is state but depends on this rank's batch"):
        step(fzero.partition(params, MESH), replicated(buffers), X)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_statistics_move_though_nothing_uses_the_output(stage: int) -> None:
    params, buffers, apply = lowered(MODULES["batch norm"])

    def step(params: Any, buffers: Any, x: Tensor) -> Any:
        return tree.map(lambda b: fzero.pmean(b, "fsdp"), apply(params, buffers, x)[1][1]["running_mean"])

    expected = sum(step(params, buffers, x) for x in X.chunk(2)) / 2
    got = fzero.simulate(step, MESH, passes=defaults(stage=stage))(
        *(fzero.partition(each, MESH) for each in (params, buffers)), X
    )
    torch.testing.assert_close(got, expected)


def test_a_captured_statistic_is_not_written() -> None:
    mean, var = torch.zeros(5), torch.ones(5)

    def step(x: Tensor) -> Tensor:
        return nn.functional.batch_norm(x, mean, var, training=True).mean()

    with pytest.raises(FzeroError, match="step captured: native_batch_norm writes into it, .*; give it to the step"):
        fzero.simulate(step, MESH)(X)
    assert not mean.any()


def test_evaluation_writes_nothing() -> None:
    mean, var = torch.zeros(5), torch.ones(5)
    step = fzero.simulate(lambda x: nn.functional.batch_norm(x, mean, var, training=False), MESH)
    torch.testing.assert_close(step(X), X / (1 + 1e-5) ** 0.5)


def test_statistics_that_nobody_reads_are_not_computed() -> None:
    def step(x: Tensor) -> Tensor:
        nn.functional.batch_norm(x, torch.zeros(5), torch.ones(5), training=True)
        return x * 2

    assert names(Case(step, MESH, (X,)).trace()) == ["mul"]


def test_the_update_is_recomputed_with_its_region_where_nobody_keeps_it() -> None:
    def step(params: Any, x: Tensor) -> Any:
        def region(params: Any, x: Tensor) -> Tensor:
            mean, var = torch.zeros(5), torch.ones(5)
            y = nn.functional.batch_norm(torch.tanh(x @ params["w"]), mean, var, training=True)
            return torch.sin(y * mean)

        return fzero.value_and_grad(lambda p: fzero.remat(region)(p, x).square().mean())(params)

    params = {"w": torch.eye(5)}
    case = Case(step, MESH, (fzero.partition(params, MESH), X))
    plain = [step(params, x) for x in X.chunk(2)]
    program = case.trace()
    got = fzero.simulate(step, MESH)(fzero.partition(params, MESH), X)
    torch.testing.assert_close(got[0], (plain[0][0] + plain[1][0]) / 2)
    torch.testing.assert_close(got[1]["w"].full_tensor(), (plain[0][1]["w"] + plain[1][1]["w"]) / 2)
    assert ops.is_call(next(iter(reversed(program.graph.nodes))).args[0][0], ops.all_reduce)
