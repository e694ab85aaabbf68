"""State: a tree like any other that `partition` takes field by field, and whose seed a step draws from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fzero
from fzero import FzeroError, State, VirtualMesh, optim, tree
from fzero.base.state import find_seeds

MESH = VirtualMesh(fsdp=4)
OPTIMIZER = optim.adamw(1e-2)
CAREFUL = optim.apply_if_finite(optim.adamw(1e-2), 9)
SCALER = optim.loss_scale.dynamic(2.0**127, factor=2.0**40, hysteresis=1)  # the first step overflows, and no other


def weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "a": torch.randn(8, 4, generator=generator),
        "b": torch.randn(4, generator=generator),
        "c": torch.tensor(2.0),
    }


def whole(**fields: Any) -> State:
    params = weights()
    return State(params, OPTIMIZER.init(params), step=torch.tensor(0), **fields)


def batch() -> Tensor:
    return torch.randn(8, 8, generator=torch.Generator().manual_seed(1))


def train(state: State, x: Tensor, drop: float = 0.0) -> tuple[State, Tensor]:
    def loss_fn(params: Any, x: Tensor) -> Tensor:
        return (F.dropout(x, drop, training=drop > 0) @ params["a"] + params["b"]).square().mean() * params["c"]

    loss, grads = fzero.value_and_grad(loss_fn)(state.params, x)
    updates, opt_state = OPTIMIZER.update(grads, state.opt_state, state.params)
    params = optim.apply_updates(state.params, updates)
    ema = None if state.ema is None else tree.map(lambda e, p: e.lerp(p, 0.1), state.ema, params)
    return state._replace(params=params, opt_state=opt_state, step=state.step + 1, ema=ema), loss


def noisy(state: State, x: Tensor) -> tuple[State, Tensor]:
    return train(state, x, 0.5)


def seeded(seed: int = 3) -> State:
    return fzero.partition(whole(seed=torch.tensor(seed)), MESH)


def run(step: Callable[..., Any], state: Any, count: int) -> tuple[Any, list[float]]:
    losses = []
    for _ in range(count):
        state, loss = step(state, batch())
        losses.append(loss.item())
    return state, losses


# a tree of its own


def test_partition_lays_moments_and_averages_like_parameters() -> None:
    state = fzero.partition(whole(ema=weights(), seed=torch.tensor(5)), MESH)
    moments = state.opt_state[0].mu
    for name in weights():
        assert state.params[name].form.layout == moments[name].form.layout == state.ema[name].form.layout
    assert state.step.is_replicated and state.seed.is_replicated and state.scale is None and state.data is None
    assert state.params["a"].path == "a" and state.opt_state[0].mu["a"].path == "a"


def test_partitioned_leaves_of_a_state_stay() -> None:
    params = fzero.partition(weights(), MESH)
    given = State(params, OPTIMIZER.init(params), step=torch.tensor(0), ema=weights())
    state = fzero.partition(given, MESH)
    assert all(a is b for a, b in zip(tree.leaves(state[:2]), tree.leaves(given[:2]), strict=True))
    assert state.ema["a"].form.layout == params["a"].form.layout and state.step.is_replicated


def test_a_state_of_nothing_but_numbers_is_partitioned() -> None:
    state = fzero.partition(State(step=torch.tensor(7)), MESH)
    assert state.step.is_replicated and fzero.unpartition(state).step == 7


def test_a_number_that_is_no_tensor_is_refused() -> None:
    with pytest.raises(FzeroError, match="^step: "):
        fzero.partition(State(weights(), step=0), MESH)


def test_unpartition_inverts_partition() -> None:
    state = whole(ema=weights(), data={"epoch": torch.tensor(2)})
    again = fzero.unpartition(fzero.partition(state, MESH))
    assert type(again) is State and tree.paths(again) == tree.paths(state)
    assert all(map(torch.equal, tree.leaves(again), tree.leaves(state)))


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("donate", [False, True])
def test_a_step_of_a_state_equals_the_unsharded_one(stage: int, donate: bool) -> None:
    step = fzero.simulate(train, MESH, stage=stage, donate=donate)
    given = fzero.partition(whole(ema=weights()), MESH)
    state, losses = run(step, given, 3)
    expected, expected_losses = run(train, whole(ema=weights()), 3)
    assert type(state) is State and losses == pytest.approx(expected_losses, rel=1e-5)
    for path, a, b in zip(tree.paths(state), tree.leaves(fzero.unpartition(state)), tree.leaves(expected), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=lambda text, path=path: f"{path}: {text}")
    assert int(state.step.full_tensor()) == 3
    if donate:
        with pytest.raises(FzeroError, match="donated"):
            given.params["a"] + 1


def test_equivalence_takes_a_state() -> None:
    fzero.check_equivalence(train, (whole(ema=weights()),), (batch(),), ranks=4, steps=2)


def scaled(state: State, x: Tensor) -> tuple[State, Tensor]:
    """With a loss scale in the state, which overflows at first."""

    def loss_fn(params: Any) -> Tensor:
        return (x @ params["a"] + params["b"]).square().mean() * params["c"]

    loss, grads = fzero.value_and_grad(lambda p: loss_fn(p) * state.scale.scale)(state.params)
    grads = optim.loss_scale.unscale(grads, state.scale)
    updates, opt_state = CAREFUL.update(grads, state.opt_state, state.params)
    scale = SCALER.update(state.scale, opt_state.last_finite)
    params = optim.apply_updates(state.params, updates)
    return State(params, opt_state, scale, state.step + 1), loss / state.scale.scale


def test_a_loss_scale_travels_in_a_state() -> None:
    params = weights()
    given = State(params, CAREFUL.init(params), SCALER.init(), torch.tensor(0))
    assert fzero.partition(given, MESH).scale.scale.is_replicated
    step = fzero.simulate(scaled, MESH)
    state, losses = run(step, fzero.partition(given, MESH), 3)
    expected, expected_losses = run(scaled, given, 3)
    assert float(state.scale.scale.full_tensor()) == float(expected.scale.scale) == 2.0**87
    assert losses[2] == pytest.approx(expected_losses[2], rel=1e-5)


def test_the_update_of_a_state_is_one_node() -> None:
    program = fzero.simulate(train, MESH).trace(fzero.partition(whole(), MESH), batch())
    targets = [str(node.target) for node in program.graph.nodes if "adamw" in str(node.target)]
    assert len(targets) == 1


def test_a_state_is_saved_and_loaded(tmp_path: Path) -> None:
    state, _ = run(fzero.simulate(noisy, MESH), seeded(), 2)
    fzero.save_safetensors(state, tmp_path / "state.safetensors")
    like = fzero.unpartition(state)
    other = VirtualMesh(fsdp=2)
    loaded = fzero.load_safetensors(tmp_path / "state.safetensors", like, other)
    assert all(map(torch.equal, tree.leaves(fzero.unpartition(loaded)), tree.leaves(like)))
    assert loaded.params["a"].form.layout == loaded.opt_state[0].mu["a"].form.layout


# seeds


def test_seeds_are_found_with_their_step_counts() -> None:
    state = State({"w": 0.0}, step=1, seed=2)
    assert find_seeds(tree.flatten((5, state, {"x": [state]}))[1]) == {2: "step", 3: "seed", 5: "step", 6: "seed"}
    assert find_seeds(tree.flatten((State(step=1), {"seed": 3}))[1]) == {}


def test_draws_follow_from_the_seed_and_not_from_the_generator() -> None:
    outcomes = []
    for generator, seed in ((0, 3), (1, 3), (0, 4)):
        torch.manual_seed(generator)
        before = torch.get_rng_state()
        outcomes.append(run(fzero.simulate(noisy, MESH), seeded(seed), 3)[1])
        assert torch.equal(torch.get_rng_state(), before)
    assert outcomes[0] == outcomes[1] != outcomes[2]


def test_each_step_draws_other_numbers() -> None:
    def drawn(state: State, x: Tensor) -> tuple[State, Tensor]:
        return state._replace(step=state.step + 1), torch.rand(100)

    step, state = fzero.simulate(drawn, MESH), fzero.partition(State(step=torch.tensor(0), seed=torch.tensor(0)), MESH)
    rows = []
    for _ in range(3):
        state, row = step(state, batch())
        rows += row.chunk(4)
    assert len({tuple(row.tolist()) for row in rows}) == 12  # ranks and steps


def test_a_saved_run_goes_on_with_the_same_numbers(tmp_path: Path) -> None:
    straight, losses = run(fzero.simulate(noisy, MESH), seeded(), 4)
    half, _ = run(fzero.simulate(noisy, MESH), seeded(), 2)
    fzero.save_safetensors(half, tmp_path / "state.safetensors")
    torch.manual_seed(99)
    loaded = fzero.load_safetensors(tmp_path / "state.safetensors", fzero.unpartition(half), MESH)
    resumed, rest = run(fzero.simulate(noisy, MESH), loaded, 2)
    assert rest == losses[2:]
    assert all(
        torch.equal(a, b)
        for a, b in zip(tree.leaves(fzero.unpartition(straight)), tree.leaves(fzero.unpartition(resumed)))
    )


def test_without_a_seed_draws_follow_from_the_generator() -> None:
    step = fzero.simulate(noisy, MESH)
    losses = []
    for generator in (0, 0, 1):
        torch.manual_seed(generator)
        losses.append(run(step, fzero.partition(whole(), MESH), 1)[1])
    assert losses[0] == losses[1] != losses[2]


def test_a_step_that_draws_nothing_may_keep_its_count() -> None:
    step = fzero.simulate(lambda state, x: (state, x.mean()), MESH)
    state, _ = step(seeded(), batch())
    assert int(state.step.full_tensor()) == 0


def test_an_evaluation_draws_by_a_state_that_it_does_not_return() -> None:
    step, state = fzero.simulate(lambda state, x: F.dropout(x), MESH), seeded()
    assert torch.equal(step(state, batch()), step(state, batch()))


def same_step(state: State, x: Tensor) -> Any:
    return state, F.dropout(x)


MISTAKES: dict[str, tuple[Callable[..., Any], Callable[[], State], str]] = {
    "a step count that stays": (same_step, seeded, r"argument 0\.step: is returned as it was given"),
    "no step count": (
        same_step,
        lambda: fzero.partition(State(seed=torch.tensor(1)), MESH),
        r"argument 0\.step: is None, and the draws of this step follow from seed and step",
    ),
    "several seeds": (
        noisy,
        lambda: fzero.partition(whole(seed=torch.tensor([1, 2])), MESH, persist=8),
        r"argument 0\.seed: is torch.int64 \[2\]",
    ),
    "a fraction": (
        noisy,
        lambda: fzero.partition(whole(seed=torch.tensor(0.5)), MESH),
        r"argument 0\.seed: is torch.float32 \[\]",
    ),
    "slices": (
        noisy,
        lambda: seeded()._replace(seed=fzero.partition(torch.tensor(1), MESH)),
        r"argument 0\.seed: lies in slices over 4 ranks",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_seed_that_cannot_be_drawn_by_is_refused(name: str) -> None:
    step, given, said = MISTAKES[name]
    with pytest.raises(FzeroError, match=f"^{said}"):
        fzero.simulate(step, MESH).trace(given(), batch())
