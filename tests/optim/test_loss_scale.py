"""Loss scales: against DeepSpeed's rules, written out for one run at a time, and against torch's kernel."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from programs import layers, loss, rows
from torch import Tensor

import fzero
from fzero import FzeroError, VirtualMesh, optim
from fzero.optim import loss_scale

RUNS, STEPS = 10_000, 40


def overflows(probability: float = 0.35, seed: int = 0) -> Tensor:
    """[STEPS, RUNS] whether a step of a run overflows. Among the runs are those that never and that always do."""
    draw = torch.Generator().manual_seed(seed)
    chances = torch.rand(RUNS, generator=draw) * 2 * probability
    found = torch.rand(STEPS, RUNS, generator=draw) < chances
    found[:, 0], found[:, 1] = False, True
    return found


def broadcast(state: Any) -> Any:
    """A state of `RUNS` runs."""
    return fzero.tree.map(lambda x: x.expand(RUNS), state)


class DeepSpeed:
    """DeepSpeed's scaler for one run, in Python numbers, from its description: an overflow spends hysteresis, and the
    last of it costs a factor; the n-th clean step behind an overflow looks at n - 1."""

    def __init__(self, scale: float, window: int, floor: float, delay: int, consecutive: bool) -> None:
        self.scale, self.window, self.floor, self.delay, self.consecutive = scale, window, floor, delay, consecutive
        self.left, self.step, self.last = delay, 0, -1

    def update(self, overflow: bool) -> bool:
        """Move by a step. Returns whether DeepSpeed raises."""
        raises = False
        if overflow and self.left > 1:
            self.left -= 1
        elif overflow:
            raises = self.scale == self.floor
            self.scale = max(self.scale / 2, self.floor)
        else:
            clean = self.step - self.last - 1
            grows = clean != 0 and clean % self.window == 0
            self.scale *= 2 if grows else 1
            self.left = self.delay if grows or self.consecutive else self.left
        self.last = self.step if overflow else self.last
        self.step += 1
        return raises


def follow(overflow: list[bool], *how: Any) -> Iterator[tuple[float, bool]]:
    """`(scale, whether DeepSpeed has raised)` after each step."""
    scaler, raised = DeepSpeed(*how), False
    for each in overflow:
        raised |= scaler.update(each)
        yield scaler.scale, raised


@pytest.mark.parametrize(
    ("window", "hysteresis", "consecutive"), [(1, 1, False), (3, 2, False), (4, 2, True), (2, 3, False), (5, 1, True)]
)
def test_dynamic_is_deepspeeds_sequence(window: int, hysteresis: int, consecutive: bool) -> None:
    scaler = loss_scale.dynamic(2.0**4, window, hysteresis=hysteresis, consecutive_hysteresis=consecutive)
    state, found = broadcast(scaler.init()), overflows()
    scales, failed = [], []
    for overflow in found:
        state = scaler.update(state, ~overflow)
        scales.append(state.scale)
        failed.append(state.failed.value != 0)
    runs = [list(follow(run, 2.0**4, window, 1.0, hysteresis, consecutive)) for run in found.T.tolist()]
    expected = torch.tensor(runs)  # [RUNS, STEPS, 2]
    assert torch.equal(torch.stack(scales, 1), expected[..., 0])
    assert torch.equal(torch.stack(failed, 1), expected[..., 1].bool())
    assert expected[..., 1].any() and (expected[..., 0] > 2.0**4).any()  # some runs raise, and some scales grow


def test_the_first_overflow_only_spends_hysteresis() -> None:
    scaler = loss_scale.dynamic()
    state, scales = scaler.init(), []
    for _ in range(3):
        state = scaler.update(state, torch.tensor(False))
        scales.append(state.scale.item())
    assert scales == [2.0**16, 2.0**15, 2.0**14]


def test_dynamic_grows_behind_a_window_of_clean_steps() -> None:
    scaler = loss_scale.dynamic(window=1000)
    state, scales = scaler.init(), []
    for _ in range(2002):
        state = scaler.update(state, torch.tensor(True))
        scales.append(state.scale.item())
    changes = [step for step, (a, b) in enumerate(itertools.pairwise(scales), 1) if a != b]
    assert changes == [1000, 2000] and scales[-1] == 2.0**18  # steps count from 0


@pytest.mark.parametrize(("growth", "backoff", "interval"), [(2.0, 0.5, 3), (1.7, 0.3, 2), (2.0, 0.5, 1)])
def test_standard_is_torchs_sequence(growth: float, backoff: float, interval: int) -> None:
    scaler = loss_scale.standard(2.0**16, growth, backoff, interval)
    state, found = broadcast(scaler.init()), overflows(0.2, seed=1)[:16]
    scales = []
    for overflow in found:
        state = scaler.update(state, ~overflow)
        scales.append(state.scale)
    assert torch.equal(torch.stack(scales), run_torch(found, growth, backoff, interval))


def run_torch(found: Tensor, *how: Any) -> Tensor:
    """[STEPS, RUNS] the scales of torch's own kernel, which moves one run by a step. Equal beginnings run once."""

    @functools.cache
    def run(past: tuple[bool, ...]) -> tuple[float, int]:
        if not past:
            return 2.0**16, 0
        scale, tracker = torch.tensor(run(past[:-1])[0]), torch.tensor(run(past[:-1])[1], dtype=torch.int32)
        torch._amp_update_scale_(scale, tracker, torch.tensor(float(past[-1])), *how)
        return scale.item(), tracker.item()

    histories = list(map(tuple, found.T.tolist()))
    return torch.tensor([[run(past[: i + 1])[0] for past in histories] for i in range(len(found))])


def test_a_scale_stays_finite() -> None:
    for scaler in (loss_scale.dynamic(2.0**127, window=1), loss_scale.standard(2.0**127, growth_interval=1)):
        state = scaler.init()
        for _ in range(3):
            state = scaler.update(state, torch.tensor(True))
        assert state.scale == 2.0**127


def test_unscaled_gradients_of_float16_do_not_vanish() -> None:
    state = loss_scale.dynamic().init()
    grads = loss_scale.unscale({"a": torch.full((2,), 2.0**-10, dtype=torch.float16), "b": torch.ones(2)}, state)
    assert grads["a"].dtype == torch.float32 and grads["a"].tolist() == [2.0**-26] * 2
    assert grads["b"].tolist() == [2.0**-16] * 2
    assert loss_scale.unscale({}, state) == {}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: loss_scale.dynamic(0.0), "loss_scale.dynamic: init_scale is 0.0"),
        (lambda: loss_scale.dynamic(float("nan")), "init_scale is nan"),
        (lambda: loss_scale.dynamic(window=0), "window is 0"),
        (lambda: loss_scale.dynamic(hysteresis=0), "hysteresis is 0"),
        (lambda: loss_scale.dynamic(factor=1.0), "factor is 1.0"),
        (lambda: loss_scale.dynamic(min_scale=-1.0), "min_scale is -1.0"),
        (lambda: loss_scale.standard(growth_factor=1.0), "growth_factor is 1.0"),
        (lambda: loss_scale.standard(backoff_factor=1.0), "backoff_factor 1.0"),
        (lambda: loss_scale.standard(growth_interval=0), "growth_interval is 0"),
    ],
)
def test_bad_numbers_are_named(make: Any, message: str) -> None:
    with pytest.raises(FzeroError, match=message):
        make()


# in a step


def step_of(optimizer: Any, scaler: loss_scale.LossScale) -> Any:
    def step(params: Any, opt_state: Any, scale: Any, x: Tensor) -> Any:
        value, grads = fzero.value_and_grad(lambda p: loss(p, x) * scale.scale)(params)
        grads = loss_scale.unscale(grads, scale)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        scale = scaler.update(scale, opt_state.last_finite)
        return optim.apply_updates(params, updates), opt_state, scale, value

    return step


@pytest.mark.parametrize(("world", "stage", "donate"), [(1, 3, True), (8, 1, True), (8, 2, False), (8, 3, True)])
def test_a_skipped_step_changes_the_scale_and_no_other_bit(world: int, stage: int, donate: bool) -> None:
    mesh = VirtualMesh(fsdp=world)
    optimizer = optim.apply_if_finite(optim.chain(optim.clip_by_global_norm(0.1), optim.adamw(0.1)), 5)
    scaler = loss_scale.dynamic(hysteresis=1)
    first = layers(1)
    first["layers"][0]["b"][0] = -0.0  # and 0.0 added to that is another bit
    params = fzero.partition(first, mesh)
    state = params, optimizer.init(params), scaler.init(params)
    step = fzero.simulate(step_of(optimizer, scaler), mesh, stage=stage, donate=donate)
    *state, _ = step(*state, rows(mesh))
    before = bits(state[0], state[1].inner_state)
    *state, _ = step(*state, rows(mesh).index_fill(1, torch.tensor(0), float("inf")))
    assert bits(state[0], state[1].inner_state) == before
    assert state[2].scale.full_tensor() == 2.0**15 and state[1].notfinite_count.full_tensor() == 1
    *state, _ = step(*state, rows(mesh))
    assert bits(state[0], state[1].inner_state) != before
    assert (state[1].notfinite_count.full_tensor(), state[1].total_notfinite.full_tensor()) == (0, 1)


def bits(*trees: Any) -> list[bytes]:
    return [bytes(x.reshape(-1).view(torch.uint8).tolist()) for x in fzero.tree.leaves(fzero.unpartition(trees))]


def test_a_scaled_step_is_the_step_without_a_scale() -> None:
    """A power of two scales float32 exactly."""
    mesh = VirtualMesh(fsdp=3)
    optimizer, scaler = optim.apply_if_finite(optim.adamw(0.1), 5), loss_scale.standard(growth_interval=2)

    def plain(params: Any, opt_state: Any, x: Tensor) -> Any:
        _, grads = fzero.value_and_grad(loss)(params, x)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optim.apply_updates(params, updates), opt_state

    params = fzero.partition(layers(), mesh)
    scaled, unscaled = (params, optimizer.init(params), scaler.init(params)), (params, optimizer.init(params))
    steps = [fzero.simulate(step, mesh, donate=False) for step in (step_of(optimizer, scaler), plain)]
    for _ in range(3):
        *scaled, _ = steps[0](*scaled, rows(mesh))
        unscaled = steps[1](*unscaled, rows(mesh))
    assert bits(scaled[0]) == bits(unscaled[0]) and scaled[2].scale.full_tensor() == 2.0**17


def test_an_overflow_at_the_minimum_raises_at_the_next_call() -> None:
    mesh = VirtualMesh(fsdp=2)
    optimizer, scaler = optim.apply_if_finite(optim.adamw(0.1), 5), loss_scale.dynamic(1.0, hysteresis=1)
    params = fzero.partition(layers(1), mesh)
    step = fzero.simulate(step_of(optimizer, scaler), mesh)
    *state, _ = step(params, optimizer.init(params), scaler.init(params), torch.full((4, 5), float("nan")))
    with pytest.raises(FzeroError, match=r"^loss_scale\.dynamic: gradients are not finite at the smallest scale, 1\.0"):
        step(*state, rows(mesh))
    with pytest.raises(FzeroError, match="raise_at_min=False"):
        optim.check_flags(state)
