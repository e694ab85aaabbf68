"""Functions: the pure functions of an engine. One adds the gradients of a batch, one updates, one evaluates.

The loop of an engine and its functional step call the same programs, which are traced from these functions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero import optim, precision, tree
from fzero.base.errors import FzeroError
from fzero.deepspeed.settings import Settings
from fzero.optim.base import GradientTransformation
from fzero.optim.wrappers import ApplyIfFiniteState
from fzero.training.programs import make_sums

Call = Callable[..., Any]
"""(params, *args, **kwargs) -> the output of a model, or its loss."""
ENDLESS = 2**31 - 1
"""More updates in a row that are not finite than a run has."""


class Functions(NamedTuple):
    """The pure functions of an engine.

    * `begin(params, scale, args, kwargs)` returns `(output, gradients)` of the first batch of an update, each batch's
      share of the mean over `gradient_accumulation_steps`.
    * `add(params, sums, scale, args, kwargs)` returns `(output, new sums)`: the sums of gradients with those of a
      further batch.
    * `update(params, opt_state, scale, sums)` returns `(params, opt_state, scale, norm)`: after an update by the sums,
      whose global norm is `norm`.
    * `evaluate(params, args, kwargs)` returns the output of the model.
    """

    begin: Callable[..., Any]
    add: Callable[..., Any]
    update: Callable[..., Any]
    evaluate: Callable[..., Any]


def make_functions(
    train: Call, evaluate: Call, optimizer: GradientTransformation | None, settings: Settings
) -> Functions:
    """The functions of an engine, for two calls of a model: in training, and in evaluation."""
    if settings.compute is not None:
        cast = precision(settings.compute, output=torch.float32)
        train, evaluate = cast(train), cast(evaluate)

    def train_share(params: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        output = train(params, *args, **kwargs)
        return find_loss(output) / settings.accumulation_steps, output  # before the scale, as DeepSpeed: less overflows

    begin, add = make_sums(train_share)

    def update(params: Any, opt_state: Any, scale: Any, sums: Any) -> tuple[Any, Any, Any, Tensor]:
        if optimizer is None:
            way_out = 'give the config "optimizer", or initialize(optimizer=)'
            raise FzeroError("engine.step", "there is no optimizer", way_out)
        return _update(optimizer, settings, params, opt_state, scale, sums)

    def evaluate_batch(params: Any, args: Any, kwargs: Any) -> Any:
        return evaluate(params, *args, **kwargs)

    return Functions(begin, add, update, evaluate_batch)


def add_autocast(apply: Any, dtype: torch.dtype, device: str) -> Any:
    """A function of a model that runs under torch's autocast for a type of device, as DeepSpeed runs the module."""

    @functools.wraps(apply)
    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device, dtype):
            return apply(*args, **kwargs)

    return call


def make_optimizer(inner: GradientTransformation, settings: Settings) -> GradientTransformation:
    """An optimizer behind the clipping of a configuration, which skips updates that are not finite where DeepSpeed
    does."""
    clips = settings.clipping > 0
    nonfinite: Any = "zero" if settings.skips_nonfinite else "raise"
    clip = optim.clip_by_global_norm(settings.clipping, "deepspeed", on_nonfinite=nonfinite) if clips else None
    clipped = inner if clip is None else optim.chain(clip, inner)
    return optim.apply_if_finite(clipped, ENDLESS) if settings.skips_nonfinite else clipped


def find_loss(output: Any) -> Tensor:
    """The loss in the output of a model: the output itself, its `.loss`, its item "loss" or its first element.

    Raises:
        FzeroError: for an output without a loss, and for a loss that is not one floating number.
    """
    found = output
    if not isinstance(output, Tensor):
        found = getattr(output, "loss", None)
        if found is None and isinstance(output, Mapping):
            found = output.get("loss")
        elif found is None and isinstance(output, (list, tuple)) and output:
            found = output[0]
    if not isinstance(found, Tensor):
        problem = f"is a {type(output).__name__} without a loss"
        way_out = (
            "return the loss, an object with .loss, or a tuple that begins with the loss; or give initialize(loss=)"
        )
        raise FzeroError("output of the model", problem, way_out)
    if found.ndim or not found.is_floating_point():
        problem = f"is {found.dtype} of shape {tuple(found.shape)}, not one floating number"
        raise FzeroError("loss", problem, "return the mean over examples; or give initialize(loss=)")
    return found


def count_skips(opt_state: Any) -> int:
    """How many updates an optimizer of `make_optimizer` skipped. Waits for the device."""
    if not isinstance(opt_state, ApplyIfFiniteState):
        return 0
    held: Any = opt_state.total_notfinite  # a `Sharded` leaf outside of a step
    return int(held.full_tensor())


def _update(
    optimizer: GradientTransformation, settings: Settings, params: Any, opt_state: Any, scale: Any, sums: Any
) -> tuple[Any, Any, Any, Tensor]:
    grads = sums if scale is None else optim.loss_scale.unscale(sums, scale)
    if settings.gradient_factor != 1:
        grads = tree.map(lambda grad: grad * settings.gradient_factor, grads)
    norm = optim.global_norm(grads)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    if scale is not None and settings.scaler is not None:
        scale = settings.scaler.update(scale, opt_state.last_finite)
    return optim.apply_updates(params, updates), opt_state, scale, norm
