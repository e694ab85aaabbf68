"""Workers whose steps have more state than weights and an optimizer's, and return more than a loss."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import fzero
from fzero import FzeroError, optim, passes, tree
from fzero.variants.diloco import diloco
from fzero.variants.loco_scatter import loco_scatter

pytestmark = pytest.mark.usefixtures("shared_traces")

MESH = fzero.VirtualMesh(replica=2, fsdp=2)
SGD = optim.sgd(0.1, momentum=0.9)


def make(fn: Any, syncs: bool, **options: Any) -> Any:
    rewrite = partial(diloco, syncs=syncs, **options)
    return fzero.simulate(fn, MESH, passes=passes.insert(passes.defaults(stage=3), rewrite, before="bucket"))


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def mean(trees: list[Any]) -> Any:
    return tree.map(lambda *each: torch.stack(each).mean(0), *trees)


def loss_fn(params: Any, x: Tensor, aim: Any = 1.0) -> Tensor:
    return ((x.to(params["w"].dtype) @ params["w"] + params["b"]).tanh() - aim).square().mean()


def distill(student: Any, teacher: Any, average: Any, moments: Any, x: Tensor) -> Any:
    """A teacher whose outputs the student learns, and that follows the student; an average of the student."""

    def aimed(student: Any) -> Tensor:
        return loss_fn(student, x, (x @ teacher["w"] + teacher["b"]).tanh().detach() / 2 - 0.5)

    updates, moments = SGD.update(fzero.grad(aimed)(student), moments, student)
    student = optim.apply_updates(student, updates)
    teacher, average = (tree.map(lambda t, s: 0.5 * t + 0.5 * s, each, student) for each in (teacher, average))
    return student, teacher, average, moments


def distill_turned(teacher: Any, student: Any, average: Any, moments: Any, x: Tensor) -> Any:
    student, teacher, average, moments = distill(student, teacher, average, moments, x)
    return teacher, student, average, moments


@pytest.mark.parametrize("step", [distill, distill_turned])
def test_a_teacher_and_an_average_are_means_at_a_meeting(step: Any) -> None:
    """Two workers beside two plain loops that meet after each second step; moments stay their own."""
    whole = {"w": draw(12, 12) / 4, "b": torch.zeros(12)}
    workers = [(whole, whole, whole, SGD.init(whole))] * 2
    steps = [make(step, syncs, rate=1.0, momentum=0.0) for syncs in (False, True)]
    trees = [fzero.partition(whole, MESH) for _ in range(3)]
    held = (*trees, SGD.init(trees[0]))
    state = steps[0].init_pass_state(*held, draw(8, 12))
    assert [path for path in state if path.endswith("w.momentum")] == [f"diloco.{int(step is not distill)}.w.momentum"]
    for number in range(4):
        x = draw(8, 12, seed=number)
        held, state = steps[number % 2](*held, x, pass_state=state)
        workers = [step(*worker, part) for worker, part in zip(workers, x.chunk(2))]
        if number % 2:
            shared = mean([worker[:3] for worker in workers])
            workers = [(*shared, worker[3]) for worker in workers]
    for got, wanted in zip(tree.leaves(fzero.unpartition(held[:3])), tree.leaves(shared)):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-6)
    (moments,) = [x for path, x in state.items() if path.startswith("diloco.3.") and path.endswith(".w")]
    wanted = torch.stack([x for each in workers for x in tree.leaves(each[3]) if x.shape == (12, 12)])
    torch.testing.assert_close(fzero.unpartition(moments), wanted, rtol=1e-4, atol=1e-6)


def test_statistics_that_all_workers_have_stay_the_steps() -> None:
    """The mean over all ranks is returned at each step, as without workers."""

    def step(params: Any, stats: Any, x: Tensor) -> Any:
        loss, grads = fzero.value_and_grad(loss_fn)(params, x - stats["mean"])
        seen = fzero.pmean(x.mean(0), ("replica", "fsdp"))
        return tree.map(lambda p, g: p - g, params, grads), {"mean": 0.9 * stats["mean"] + 0.1 * seen}, loss

    params = fzero.partition({"w": draw(12, 12), "b": torch.zeros(12)}, MESH)
    stats, x, simulated = fzero.partition({"mean": torch.zeros(12)}, MESH), draw(8, 12), make(step, syncs=False)
    state = simulated.init_pass_state(params, stats, x)
    assert not any("mean" in path for path in state)
    for _ in range(2):
        (params, stats, _), state = simulated(params, stats, x, pass_state=state)
    torch.testing.assert_close(fzero.unpartition(stats)["mean"], 0.19 * x.mean(0))


def norms(params: Any, x: Tensor) -> Any:
    grads = fzero.grad(loss_fn)(params, x)
    return tree.map(lambda p, g: p - 0.1 * g, params, grads), optim.global_norm(grads)


def test_a_number_that_differs_between_workers_becomes_their_mean() -> None:
    whole, x = {"w": draw(12, 12), "b": torch.zeros(12)}, draw(8, 12)
    simulated, params = make(norms, syncs=False), fzero.partition(whole, MESH)
    (_, norm), _ = simulated(params, x, pass_state=simulated.init_pass_state(params, x))
    each = [optim.global_norm(fzero.grad(loss_fn)(whole, part)) for part in x.chunk(2)]
    torch.testing.assert_close(norm, torch.stack(each).mean())


def test_other_results_that_differ_are_refused_by_name() -> None:
    def step(params: Any, x: Tensor) -> Any:
        params, norm = norms(params, x)
        return params, norm.expand(3) * 2

    params = fzero.partition({"w": draw(12, 12), "b": torch.zeros(12)}, MESH)
    with pytest.raises(
        FzeroError, match=r"result '1': is the same along \['replica'\] in the step that was traced, and"
    ):
        make(step, syncs=False).trace(params, draw(8, 12))


def test_integers_of_workers_have_no_mean_and_are_refused_by_name() -> None:
    def step(params: Any, counts: Any, x: Tensor) -> Any:
        params, _ = norms(params, x)
        return params, tree.map(lambda count, p: count + (p > 0), counts, params)

    params = fzero.partition({"w": draw(12, 12), "b": torch.zeros(12)}, MESH)
    counts = fzero.partition(tree.map(lambda p: torch.zeros(p.shape, dtype=torch.int64), params), MESH, like=params)
    with pytest.raises(FzeroError, match=r"1\.b: finds torch.int64 numbers that differ between workers"):
        make(step, syncs=False).trace(params, counts, draw(8, 12))


def test_workers_that_join_a_run_begin_with_its_weights() -> None:
    """The steps that another pass counted are none of the workers'."""
    chosen = passes.insert(passes.defaults(stage=3), loco_scatter, before="prefetch")
    joined = passes.insert(chosen, partial(diloco, syncs=True), before="bucket")
    before, after = (fzero.simulate(norms, MESH, passes=each) for each in (chosen, joined))
    params, x = fzero.partition({"w": draw(12, 12), "b": torch.zeros(12)}, MESH), draw(8, 12)
    (params, _), counted = before(params, x, pass_state=before.init_pass_state(params, x))
    state, whole = after.init_pass_state(params, x), fzero.unpartition(params)
    (_, norm), _ = after(params, x, pass_state=state | {"passes.step_count": counted["passes.step_count"]})
    each = [optim.global_norm(fzero.grad(loss_fn)(whole, part)) for part in x.chunk(2)]
    torch.testing.assert_close(norm, torch.stack(each).mean(), rtol=0.1, atol=0)  # int4 on its way


def test_narrow_weights_and_a_frozen_leaf() -> None:
    """Workers of bfloat16 weights are the two plain loops of that dtype, up to its rounding; frozen leaves stay."""

    def step(params: Any, x: Tensor) -> Any:
        updates, _ = PLAIN.update(fzero.grad(loss_fn)(params, x), PLAIN.init(params), params)
        return optim.apply_updates(params, updates)

    PLAIN = optim.sgd(0.5)
    whole = {"w": draw(12, 12).bfloat16(), "b": torch.nn.Parameter(draw(12).bfloat16(), requires_grad=False)}
    steps, workers = [make(step, syncs, rate=1.0, momentum=0.0) for syncs in (False, True)], [whole] * 2
    params = fzero.partition(whole, MESH)
    state = steps[0].init_pass_state(params, draw(8, 12))
    for number in range(2):
        x = draw(8, 12, seed=number)
        params, state = steps[number](params, x, pass_state=state)
        workers = [step(worker, part) for worker, part in zip(workers, x.chunk(2))]
    got, wanted = fzero.unpartition(params), mean(workers)
    assert torch.equal(got["b"], whole["b"]) and not torch.equal(got["w"], whole["w"])
    torch.testing.assert_close(got["w"], wanted["w"], rtol=2**-6, atol=2**-6)
