"""The resolve pass refuses a step that would let ranks drift apart, names the user's line, and accepts others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from mistakes import HYBRID, IN_A_STEP, State, WrongStep, place_state
from programs import Case, layers, loss, mlp, rows
from torch import Tensor

import fzero
from fzero import tree
from fzero.base.errors import FzeroError
from fzero.base.mesh import VirtualMesh


def stepping(wrong: WrongStep) -> Case:
    return Case(wrong.step, HYBRID, (place_state(HYBRID), rows(HYBRID)))


@pytest.mark.parametrize("wrong", IN_A_STEP.values(), ids=IN_A_STEP)
def test_a_mistake_of_a_user_is_refused_with_the_line(wrong: WrongStep) -> None:
    with pytest.raises(FzeroError) as error:
        stepping(wrong).trace()
    assert str(error.value).startswith(wrong.message)
    assert "; make it the same on every rank first, with fzero.pmean(x, " in str(error.value)


SHOWN = {name: wrong for name, wrong in IN_A_STEP.items() if wrong.shows}


@pytest.mark.parametrize("wrong", SHOWN.values(), ids=SHOWN)
def test_it_would_make_ranks_that_hold_the_same_drift_apart(wrong: WrongStep, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fzero.tracing.trace.take_state", lambda given, returned, kinds: returned)
    case = stepping(wrong)
    program = case.trace_as_written()
    at = State._fields.index(wrong.leaf)
    first, second, third, fourth = (states[at] for states in case.run(program))
    bucket = program.results[at].bucket
    is_sliced = bucket is not None and not program.layouts[bucket].replicated
    same = [(first, third), (second, fourth)] if is_sliced else [(first, x) for x in (second, third, fourth)]
    assert not all(torch.equal(x, y) for x, y in same)


# steps that users write, which must be accepted: each as good on slices as whole


def descent(rate: float = 0.1) -> Callable[[tree.Tree, tree.Tree], tree.Tree]:
    return lambda params, grads: tree.map(lambda p, g: p - rate * g, params, grads)


def leaves_kept(params: tree.Tree, x: Tensor) -> Any:
    """Full tensors and metrics beside the state, some leaves frozen."""
    value, grads = fzero.value_and_grad(loss)(params, x)
    first, *others = params["layers"]
    trained = [descent()(p, g) for p, g in zip(others, grads["layers"][1:])]
    norm = torch.stack([g.square().sum() for g in tree.leaves(grads)]).sum().sqrt()
    return {"layers": [first, *trained]}, fzero.unpartition(first), value, norm, first["b"].abs().max()


def averaged(params: tree.Tree, average: tree.Tree, x: Tensor) -> Any:
    """A moving average of parameters, as a state and as a teacher."""
    grads = fzero.grad(lambda p: (mlp(p, x) - mlp(average, x)).square().mean())(params)
    params = descent()(params, grads)
    return params, tree.map(lambda a, p: a * 0.9 + p.detach() * 0.1, average, params)


def adversarial(player: tree.Tree, critic: tree.Tree, x: Tensor) -> Any:
    """Two losses of two trees, each with the other held still."""
    score = lambda p, c: mlp(c, mlp(p, x)).mean()  # noqa: E731
    player = descent()(player, fzero.grad(lambda p: score(p, critic))(player))
    return player, descent(-0.1)(critic, fzero.grad(lambda c: score(player, c))(critic))


def accumulated(params: tree.Tree, x: Tensor) -> Any:
    """Microbatches, in a loop and in place."""
    total = tree.map(torch.zeros_like, params)
    for part in (x, x * 2, x.flip(1)):
        total = tree.map(torch.add, total, fzero.grad(loss)(params, part))
    return descent(0.05)(params, total)


def masked(params: tree.Tree, x: Tensor) -> Any:
    """Masks, thresholds and clamps of parameters by themselves."""
    grads = fzero.grad(loss)(tree.map(lambda p: torch.where(p > 0, p, 0), params), x)
    grads = tree.map(lambda p, g: torch.where(p.abs() > 0.5, g, 0 * g), params, grads)
    return tree.map(lambda p, g: (p - 0.1 * g).clamp(max=p.abs().max()).clamp(-2) * (p != 0), params, grads)


def quantized(params: tree.Tree, x: Tensor) -> Any:
    """Rounding with a straight-through gradient, and a cast."""
    coarse = lambda p: p + ((p * 8).round() / 8 - p).detach()  # noqa: E731
    cast = lambda p: coarse(p).to(torch.bfloat16).float()  # noqa: E731
    return descent()(params, fzero.grad(lambda p: loss(tree.map(cast, p), x))(params))


def skipped(params: tree.Tree, x: Tensor) -> Any:
    """No update where a gradient is not finite."""
    grads = fzero.grad(loss)(params, x)
    finite = torch.stack([g.isfinite().all() for g in tree.leaves(grads)]).all()
    return tree.map(lambda p, g: torch.where(finite, p - 0.1 * g, p), params, grads)


def orthogonal(params: tree.Tree, x: Tensor) -> Any:
    """Muon's update, of whole gradients, and sign descent for the rest."""

    def update(p: Any, g: Any) -> Any:
        if p.ndim < 2:
            return p - 0.1 * g.sign()
        full = g / (g.norm() + 1e-6) @ torch.eye(5)
        for _ in range(3):
            full = 1.5 * full - 0.5 * full @ full.T @ full
        return p - 0.1 * full

    return tree.map(update, params, fzero.grad(loss)(params, x))


def scheduled(params: tree.Tree, count: tree.Tree, x: Tensor) -> Any:
    """A rate by a count, and state that a step makes."""
    rate = torch.where(count < 2, count, 2.0) * 0.1
    grads = fzero.grad(loss)(params, x)
    return tree.map(lambda p, g: p - rate * g, params, grads), count + 1, tree.map(torch.zeros_like, grads)


def synchronised(params: tree.Tree, statistics: tree.Tree, x: Tensor) -> Any:
    """Statistics of the batch as state, and means of uniform values."""
    mean, spread = average(x.mean(0)), average(x.square().mean(0))
    grads = fzero.grad(lambda p: loss(p, (x - mean) / (1 + spread)))(params)
    scale = average(average(params["layers"][0]["w"].abs().mean()))
    return tree.map(lambda p, g: p - scale * g, params, grads), tree.map(lambda s: 0.9 * s + 0.1 * mean, statistics)


def average(value: Tensor) -> Tensor:
    return fzero.pmean(fzero.pmean(value, "fsdp"), "replica")


def in_place(params: tree.Tree, x: Tensor) -> Any:
    """Writes into temporaries."""
    w = fzero.unpartition(params["layers"][0]["w"])
    buffer = torch.empty(5, 5).copy_(w)
    buffer[0] = 0
    buffer.mul_(2).add_(torch.empty(5).fill_(1.0))
    first, second = torch.split(torch.zeros(2, 5), 1)
    second.add_(first.add_(w[0]))
    rows = torch.zeros(2, 5).index_put_((torch.tensor([1]),), w[1:2]) + second
    added = params["layers"][0]["w"] + (buffer * 0.1 + rows.sum(0))
    return {"layers": [{**params["layers"][0], "w": added}, *params["layers"][1:]]}


def sorted_whole(params: tree.Tree, x: Tensor) -> Any:
    """What is not elementwise: indexing, sorting, norms of rows."""
    return tree.map(lambda p: p + torch.sort(p, 0).values * 0.1 / (p[:1].norm() + 1), params)


def lists(params: tree.Tree, x: Tensor) -> Any:
    """Lists of leaves."""
    leaves, treedef = tree.flatten(params)
    grads = tree.leaves(fzero.grad(loss)(params, x))
    norm = torch.stack(torch._foreach_norm(grads)).sum()
    grads = torch._foreach_div(torch._foreach_addcmul(grads, grads, leaves, 0.1), norm + 1)
    return tree.unflatten(treedef, torch._foreach_maximum(torch._foreach_sub(leaves, grads), [-p for p in leaves]))


def per_example(params: tree.Tree, x: Tensor) -> Any:
    """Gradients of examples, clipped one by one."""
    w = fzero.unpartition(params["layers"][0]["w"])
    each = torch.func.vmap(torch.func.grad(lambda w, row: torch.tanh(row @ w).square().sum()), (None, 0))(w, x)
    clipped = each / each.square().sum((1, 2), keepdim=True).sqrt().clamp(min=1.0)
    return tree.map(lambda p: p - 0.1 * average(clipped.mean(0)).mean(), params)


BASE, OTHER = layers(2), layers(2, seed=1)
ODD = {
    "number": torch.tensor(0.5), "none": torch.zeros(0, 3), "integer": torch.arange(7),
    "complex": torch.linspace(-1, 1, 6).view(2, 3) * (1 + 2j), "flag": torch.arange(5) > 2, "one": torch.ones(1),
}  # fmt: skip
ACCEPTED = {
    step.__name__: (step, state)
    for step, *state in (
        (leaves_kept, BASE),
        (averaged, BASE, OTHER),
        (adversarial, BASE, OTHER),
        (accumulated, BASE),
        (masked, BASE),
        (quantized, BASE),
        (skipped, BASE),
        (orthogonal, BASE),
        (scheduled, BASE, torch.tensor(1.0)),
        (synchronised, BASE, {"mean": torch.zeros(5)}),
        (in_place, BASE),
        (sorted_whole, BASE),
        (lists, BASE),
        (per_example, BASE),
    )
}


@pytest.mark.parametrize("mesh", [VirtualMesh(replica=1, fsdp=3), HYBRID], ids=str)
@pytest.mark.parametrize(("step", "state"), ACCEPTED.values(), ids=ACCEPTED)
def test_a_step_as_users_write_it_is_accepted_and_right(step: Any, state: Any, mesh: VirtualMesh) -> None:
    x = torch.randn(12, 5, generator=torch.Generator().manual_seed(3))
    fzero.check_equivalence(step, tuple(state), (x,), ranks=mesh, steps=1)


def odd(params: tree.Tree, x: Tensor) -> Any:
    return {
        "number": params["number"] * params["one"].sum() + params["none"].sum(),
        "none": params["none"] * 2 + params["number"],
        "integer": torch.where(params["integer"] > 3, params["integer"] // 2, params["integer"].max()),
        "complex": params["complex"].conj() * 1j + params["complex"].abs(),
        "flag": ~params["flag"] | params["flag"].all(),
        "one": params["one"].clamp(max=params["number"]),
    }


@pytest.mark.parametrize("mesh", [VirtualMesh(fsdp=1), VirtualMesh(fsdp=3), HYBRID], ids=str)
def test_leaves_of_any_dtype_and_size_are_accepted(mesh: VirtualMesh) -> None:
    fzero.check_equivalence(odd, (ODD,), (torch.zeros(12),), ranks=mesh, steps=3)


def test_a_mean_that_is_needless_keeps_what_lay_in_memory_by_then() -> None:
    def step(params: tree.Tree, x: Tensor) -> tuple[Tensor, Tensor]:
        counts = params["layers"][0]["b"] @ torch.eye(5)
        mean = fzero.pmean(counts, "fsdp")
        return mean, counts.zero_()

    mesh = VirtualMesh(fsdp=2)
    case = Case(step, mesh, (fzero.partition(layers(1), mesh), rows(mesh)))
    for mean, counts in case.run(case.trace()):
        assert mean.all() and not counts.any()


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("shapes", [[(16,)], [(3,), (5,)]], ids=str)
def test_a_gradient_that_is_overwritten_is_no_memory_of_what_it_was_computed_from(
    shapes: list[tuple[int, ...]], world: int
) -> None:
    """On one rank a scatter returns the memory that it is given: here, of the batch."""
    mesh = VirtualMesh(fsdp=world)

    def step(params: tree.Tree, batch: list[Tensor]) -> tuple[tree.Tree, list[Tensor]]:
        _, backward = torch.func.vjp(lambda params: [w.full_tensor() for w in params["layers"][0]], params)
        (grads,) = backward([x[0] for x in batch])
        for grad in tree.leaves(grads):
            grad.local.mul_(2.0)
        return grads, [x * 1 for x in batch]

    params = fzero.partition({"layers": [[torch.ones(shape) for shape in shapes]]}, mesh)
    batch = [torch.full((world, *shape), 3.0) for shape in shapes]
    grads, rows = fzero.simulate(step, mesh)(params, batch)
    assert all(grad.eq(6.0).all() for grad in tree.leaves(fzero.unpartition(grads)))
    assert all(x.eq(3.0).all() for x in (*rows, *batch))
