"""Laws of steps that may be skipped, of loss scales and of schedules, for random histories."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from fzero import optim, tree
from fzero.optim import loss_scale

histories = st.lists(st.sampled_from([1.0, -0.5, float("inf"), float("-inf"), float("nan")]), max_size=12)
"""The gradients of some steps, each a factor."""
optimizers = st.sampled_from(
    [
        optim.sgd(0.1, momentum=0.9),
        optim.adamw(optim.linear_schedule(0.1, 0.0, 5)),
        optim.amsgrad(0.1, b2=0.5),
        optim.chain(optim.clip_by_global_norm(0.5), optim.adam(0.1)),
        optim.multi_transform({True: optim.adam(0.1), False: optim.sgd(0.1)}, lambda path, leaf: leaf.ndim > 0),
    ]
)
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float64])


def run(optimizer: optim.GradientTransformation, params: tree.Tree, factors: list[float]) -> tuple[tree.Tree, Any]:
    """Parameters and state after steps with gradients that are the parameters of the beginning times a factor."""
    state, grads = optimizer.init(params), params
    for factor in factors:
        updates, state = optimizer.update(tree.map(lambda g: g * factor, grads), state, params)  # noqa: B023
        params = optim.apply_updates(params, updates)
    return params, state


def bits(values: tree.Tree) -> list[list[int]]:
    return [x.reshape(-1).view(torch.uint8).tolist() for x in tree.leaves(values)]


@given(optimizers, histories, dtypes)
def test_skipped_steps_leave_no_trace(
    optimizer: optim.GradientTransformation, history: list[float], dtype: torch.dtype
) -> None:
    params = {"a": torch.tensor([1.0, -2.0, -0.0], dtype=dtype), "b": torch.tensor(0.5, dtype=dtype)}
    got, state = run(optim.apply_if_finite(optimizer, len(history)), params, history)
    finite = [factor for factor in history if abs(factor) <= 1]
    expected, inner = run(optimizer, params, finite)
    assert bits(got) == bits(expected) and bits(state.inner_state) == bits(inner)
    assert state.total_notfinite == len(history) - len(finite)


@given(
    st.lists(st.booleans(), max_size=60),
    st.integers(1, 5),
    st.integers(1, 4),
    st.sampled_from([2.0, 4.0]),
    st.booleans(),
)
def test_a_dynamic_scale_keeps_its_bounds(
    clean: list[bool], window: int, hysteresis: int, factor: float, consecutive: bool
) -> None:
    """The scale is a power of its factor, at least 1; it moves by one factor a step, down in a step that overflows and
    up in another; the flag says that an overflow met the smallest scale."""
    scaler = loss_scale.dynamic(factor**3, window, factor, 1.0, hysteresis, consecutive)
    state = scaler.init()
    for finite in clean:
        old, state = state, scaler.update(state, torch.tensor(finite))
        ratio = (state.scale / old.scale).item()
        assert ratio in ((1.0, factor) if finite else (1.0, 1 / factor))
        assert state.scale >= 1 and 1 <= state.hysteresis <= hysteresis
        hits_floor = not finite and old.hysteresis == 1 and old.scale == 1
        assert bool(state.failed.value) == (bool(old.failed.value) or hits_floor)


@given(st.integers(0, 50), st.integers(1, 50), st.integers(0, 50), st.sampled_from(["linear", "sqrt", "cosine"]))
def test_warmup_stable_decay_rises_and_then_falls(warmup: int, decay: int, stable: int, kind: Any) -> None:
    schedule = optim.warmup_stable_decay_schedule(0.0, 1.0, warmup, stable, decay, 0.25, kind)
    values = schedule(torch.arange(warmup + stable + decay + 5, dtype=torch.int32))
    assert bool((values.diff()[:warmup] > 0).all()) and bool((values.diff()[warmup:] <= 0).all())
    assert values[warmup : warmup + stable + 1].eq(1).all() and values[-1] == 0.25
