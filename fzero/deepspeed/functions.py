"""Functions: the pure functions of an engine. They add the gradients of a batch, update, and evaluate.

The loop of an engine and its functional step call the same programs, which are traced from these functions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero import grad, optim, precision, tree
from fzero.base.errors import FzeroError
from fzero.deepspeed.settings import Settings
from fzero.optim.base import GradientTransformation
from fzero.optim.wrappers import ApplyIfFiniteState
from fzero.training.models import Call, average_buffers
from fzero.training.outputs import Cotangents, weigh
from fzero.training.programs import add_sums, make_sums
from fzero.values.collectives import mean_over_data
from fzero.values.functions import is_sharded

ENDLESS = 2**31 - 1
"""More updates in a row that are not finite than a run has."""


class Batch(NamedTuple):
    """What a call of a model takes beside parameters. An error of a step names a part as "argument 2.args.x"."""

    buffers: Any  # that the model changes, None in most models
    args: dict[str, Any]  # by position, with their names
    kwargs: dict[str, Any]


class Functions(NamedTuple):
    """The pure functions of an engine.

    * `begin(params, scale, batch)` returns `((output, buffers), gradients)` of the first batch of an update, each
      batch's share of the mean over `gradient_accumulation_steps`. Raises `NoLoss` where the output has no loss.
    * `add(params, sums, scale, batch)` returns `((output, buffers), new sums)`: the sums of gradients with those of a
      further batch.
    * `update(params, opt_state, scale, sums)` returns `(params, opt_state, scale, norm)`: after an update by the sums,
      whose global norm is `norm`.
    * `evaluate(params, batch)` returns the output of the model.
    * `forward(params, batch)` returns `(output, buffers)` of the model in training.
    * `pull(params, factor, wanted, batch, cotangents)` returns `(gradients, gradients of wanted)`. `cotangents` are the
      gradients of the floating tensors of the output. `wanted` are the tensors of the batch's `(args, kwargs)` that get
      a gradient, by position. The gradients of parameters are multiplied by `factor`, unless it is None.
    * `pull_more(sums, params, ...)` returns `(new sums, gradients of wanted)`.
    """

    begin: Callable[..., Any]
    add: Callable[..., Any]
    update: Callable[..., Any]
    evaluate: Callable[..., Any]
    forward: Callable[..., Any]
    pull: Callable[..., Any]
    pull_more: Callable[..., Any]


class NoLoss(FzeroError):
    """The output of a model has no loss."""


def make_functions(
    train: Call, evaluate: Call, optimizer: GradientTransformation | None, settings: Settings, *, virtual_ranks: int
) -> Functions:
    """The functions of an engine, for two calls of a model: in training, and in evaluation. `virtual_ranks` is how many
    ranks run in this process: their outputs come joined, as one batch."""
    if settings.compute is not None:
        cast = precision(settings.compute, output=torch.float32)
        train, evaluate = cast(train), cast(evaluate)

    def forward(params: Any, batch: Batch) -> tuple[Any, Any]:
        output, buffers = train(params, batch.buffers, *batch.args.values(), **batch.kwargs)
        return _gather(output), average_buffers(buffers)

    def train_share(params: Any, batch: Batch) -> tuple[Tensor, Any]:
        output, buffers = forward(params, batch)
        share = find_loss(output) / settings.accumulation_steps  # before the scale, as DeepSpeed: less overflows
        return share, (output, buffers)

    first, further = make_sums(train_share)

    def begin(params: Any, scale: Any, batch: Batch) -> Any:
        return first(params, scale, (batch,), {})

    def add(params: Any, sums: Any, scale: Any, batch: Batch) -> Any:
        return further(params, sums, scale, (batch,), {})

    def update(params: Any, opt_state: Any, scale: Any, sums: Any) -> tuple[Any, Any, Any, Tensor]:
        if optimizer is None:
            way_out = 'give the config "optimizer", or initialize(optimizer=)'
            raise FzeroError("engine.step", "there is no optimizer", way_out)
        return _update(optimizer, settings, params, opt_state, scale, sums)

    def evaluate_batch(params: Any, batch: Batch) -> Any:
        return evaluate(params, batch.buffers, *batch.args.values(), **batch.kwargs)[0]

    return Functions(begin, add, update, evaluate_batch, forward, *_make_pulls(forward, virtual_ranks))


def _make_pulls(forward: Callable[..., Any], virtual_ranks: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """`Functions.pull` and `Functions.pull_more` of a forward pass."""

    def compute(given: dict[str, Any], batch: Batch, cotangents: Cotangents) -> Tensor:
        leaves, treedef = tree.flatten((batch.args, batch.kwargs))
        leaves = [given["wanted"].get(str(i), leaf) for i, leaf in enumerate(leaves)]
        args, kwargs = tree.unflatten(treedef, leaves)
        return weigh(forward(given["params"], Batch(batch.buffers, args, kwargs))[0], cotangents, virtual_ranks)

    def pull(
        params: Any, factor: Any, wanted: dict[str, Tensor], batch: Batch, cotangents: Any
    ) -> tuple[Any, dict[str, Tensor]]:
        found = grad(compute)({"params": params, "wanted": wanted}, batch, cotangents)
        grads = found["params"]
        if factor is not None:
            same = mean_over_data(factor)  # ranks hold one number, and this says so
            grads = tree.map(lambda x: x * same.to(x.dtype), grads)
        return grads, {name: x / virtual_ranks for name, x in found["wanted"].items()}

    def pull_more(sums: Any, *given: Any) -> tuple[Any, dict[str, Tensor]]:
        grads, of_wanted = pull(*given)
        return add_sums(sums, grads), of_wanted

    return pull, pull_more


def _gather(output: Any) -> Any:
    """The output of a model, with whole tensors in the place of slices."""
    return tree.map(lambda x: x.full_tensor() if is_sharded(x) else x, output)


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
        NoLoss: for an output without a loss, and for a loss that is not one floating number.
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
        raise NoLoss("output of the model", problem, way_out)
    if found.ndim or not found.is_floating_point():
        problem = f"is {found.dtype} of shape {tuple(found.shape)}, not one floating number"
        raise NoLoss("loss", problem, "return the mean over examples; or give initialize(loss=)")
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
