"""Loss scales: a factor for the loss that keeps gradients of float16 compute within float16.

    scaler = optim.loss_scale.dynamic()
    scale = scaler.init(params)                                       # beside optimizer state

    loss, grads = fzero.value_and_grad(lambda p: loss_fn(p, batch) * scale.scale)(params)      # in the step
    grads = optim.loss_scale.unscale(grads, scale)
    updates, opt_state = optimizer.update(grads, opt_state, params)   # an optimizer in apply_if_finite
    scale = scaler.update(scale, opt_state.last_finite)

A loss scale is two pure functions. Its state is of 0-d tensors, and `state.scale` is float32.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fzero.base import tree
from fzero.base.errors import FzeroError
from fzero.base.flags import Flag
from fzero.base.tree import Tree
from fzero.optim.base import init_number, is_number


class InitScale(Protocol):
    def __call__(self, params: Tree = ()) -> Any: ...


class UpdateScale(Protocol):
    def __call__(self, state: Any, finite: Tensor) -> Any: ...


class LossScale(NamedTuple):
    """`init(params=())` returns the first state: beside `Sharded` parameters values that every rank holds.
    `update(state, finite)` returns the next state, where `finite`, a 0-d bool, says whether gradients were finite."""

    init: InitScale
    update: UpdateScale


class OverflowAtMinimum(Flag):
    """Gradients overflow, and the loss scale cannot fall."""

    where = "loss_scale.dynamic"
    problem = "gradients are not finite at the smallest scale, {value}"
    way_out = "look for inf and nan in the loss itself, or go on from here with raise_at_min=False"


class DynamicState(NamedTuple):
    """The state of `dynamic`."""

    scale: Tensor  # 0-d float32
    clean: Tensor  # 0-d int32, steps since the last overflow
    hysteresis: Tensor  # 0-d int32, at 1 an overflow lowers the scale
    failed: OverflowAtMinimum


def dynamic(
    init_scale: float = 2.0**16,
    window: int = 1000,
    factor: float = 2.0,
    min_scale: float = 1.0,
    hysteresis: int = 2,
    consecutive_hysteresis: bool = False,
    raise_at_min: bool = True,
) -> LossScale:
    """DeepSpeed's loss scale: its sequence of scales for every pattern of overflows.

    * An overflow lowers the hysteresis. Where that is 1 already, it divides the scale by `factor`, down to `min_scale`.
    * A clean step multiplies the scale by `factor` where the clean steps before it, since the last overflow, are a
      multiple of `window` and not 0. The hysteresis is then full again; with `consecutive_hysteresis`, after each clean
      step.
    * With `raise_at_min`, an overflow that would lower `min_scale` raises at the next call of the step.

    Source: `DynamicLossScaler` of `deepspeed/runtime/fp16/loss_scaler.py` of DeepSpeed 0.19, which names `init_scale`
    by its power, `initial_scale_power`, and `window` `loss_scale_window`. The scale is float32 and stays finite.

    Raises:
        FzeroError: for a scale that is not positive or overflows float32, a `factor` that is not above 1, a `window`
            or `hysteresis` that is no whole number of at least 1; at the next call of a step, for an overflow at
            `min_scale`.
    """
    where = "loss_scale.dynamic"
    _check(where, init_scale=init_scale, min_scale=min_scale, factor=factor)
    _check_whole(where, window=window, hysteresis=hysteresis)
    if not factor > 1:
        raise FzeroError(where, f"factor is {factor}", "give one above 1")

    def init(params: Tree = ()) -> DynamicState:
        return DynamicState(
            init_number(params, init_scale, torch.float32),
            init_number(params, 0, torch.int32),
            init_number(params, hysteresis, torch.int32),
            OverflowAtMinimum(init_number(params, 0.0, torch.float32)),
        )

    def update(state: DynamicState, finite: Tensor) -> DynamicState:
        is_spent = state.hysteresis <= 1
        shrinks = ~finite & is_spent
        higher, lower = state.scale * factor, (state.scale / factor).clamp(min=min_scale)
        grows = finite & (state.clean > 0) & (state.clean % window == 0)
        scale = torch.where(grows & higher.isfinite(), higher, torch.where(shrinks, lower, state.scale))
        left = torch.where(finite | is_spent, state.hysteresis, state.hysteresis - 1)
        left = torch.where(finite if consecutive_hysteresis else grows, hysteresis, left)
        is_wrong = shrinks & (state.scale == min_scale)
        failed = state.failed.note(is_wrong, state.scale) if raise_at_min else state.failed
        return DynamicState(scale, torch.where(finite, state.clean + 1, 0), left, failed)

    return LossScale(init, update)


class StandardState(NamedTuple):
    """The state of `standard`."""

    scale: Tensor  # 0-d float32
    clean: Tensor  # 0-d int32, steps since the scale changed


def standard(
    init_scale: float = 2.0**16, growth_factor: float = 2.0, backoff_factor: float = 0.5, growth_interval: int = 2000
) -> LossScale:
    """The loss scale of `torch.amp.GradScaler`, with its names and defaults.

    An overflow multiplies the scale by `backoff_factor`, `growth_interval` clean steps in a row by `growth_factor`.

    Raises:
        FzeroError: for a scale that is not positive or overflows float32; for factors or an interval that torch
            refuses.
    """
    where = "loss_scale.standard"
    _check(where, init_scale=init_scale, growth_factor=growth_factor, backoff_factor=backoff_factor)
    _check_whole(where, growth_interval=growth_interval)
    if not growth_factor > 1 or not backoff_factor < 1:
        problem = f"growth_factor is {growth_factor}, backoff_factor {backoff_factor}"
        raise FzeroError(where, problem, "give one above and one below 1")

    def init(params: Tree = ()) -> StandardState:
        return StandardState(init_number(params, init_scale, torch.float32), init_number(params, 0, torch.int32))

    def update(state: StandardState, finite: Tensor) -> StandardState:
        wide, clean = state.scale.to(torch.float64), state.clean + 1  # torch's kernel multiplies in float64
        higher, lower = (wide * growth_factor).to(torch.float32), (wide * backoff_factor).to(torch.float32)
        is_due = clean == growth_interval
        grown = torch.where(is_due & higher.isfinite(), higher, state.scale)
        return StandardState(torch.where(finite, grown, lower), torch.where(finite & ~is_due, clean, 0))

    return LossScale(init, update)


def unscale(grads: Tree, state: Any) -> Tree:
    """`grads / state.scale`. Gradients narrower than float32 become float32 first, in which they do not vanish.

    Raises:
        FzeroError: for a state without a scale.
    """
    if not hasattr(state, "scale"):
        raise FzeroError("unscale", f"state is {state!r:.80}", "give the state of a LossScale, which its init makes")
    leaves, treedef = tree.flatten(grads)
    if not leaves:
        return grads
    wide = [leaf.to(torch.promote_types(leaf.dtype, torch.float32)) for leaf in leaves]
    return tree.unflatten(
        treedef, torch._foreach_mul(wide, state.scale.to(torch.float64).reciprocal().to(torch.float32))
    )


def _check(where: str, **numbers: float) -> None:
    for name, number in numbers.items():
        if not (is_number(number) and 0 < number <= torch.finfo(torch.float32).max):
            raise FzeroError(where, f"{name} is {number!r}", "give a positive one that float32 holds")


def _check_whole(where: str, **numbers: int) -> None:
    for name, number in numbers.items():
        if not (isinstance(number, int) and number > 0):
            raise FzeroError(where, f"{name} is {number!r}", "give a positive whole number")
