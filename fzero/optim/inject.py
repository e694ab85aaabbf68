"""Hyperparameters that change from step to step: `inject_hyperparams`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.base.errors import FzeroError
from fzero.base.tree import Tree
from fzero.optim.base import GradientTransformation, State, check_function, init_count, stage

Factory = Callable[..., GradientTransformation]


class InjectHyperparamsState(NamedTuple):
    """The state of an optimizer of `inject_hyperparams`."""

    count: Tensor  # type: ignore[assignment]  # 0-d int32, steps so far (hides tuple.count, as in optax)
    hyperparams: dict[str, Tensor]  # name -> the value of the last step, 0-d float32
    inner_state: State


def inject_hyperparams(inner_factory: Factory, static_args: str | Iterable[str] = ()) -> Factory:
    """`inner_factory` that also takes schedules and 0-d tensors in the places of numbers.

        optimizer = inject_hyperparams(adamw)(schedule, b1=linear_schedule(0.8, 0.9, 1000))

    * A schedule is called with the number of steps so far, 0 in the first step. `static_args` names arguments that are
      functions and no schedules, such as a mask.
    * A 0-d tensor is a value that may change by hand between steps: `state.hyperparams["learning_rate"]`.
    * A number stays a number, so that `fuse` finds the optimizer's fused kernel, which takes numbers for all but the
      learning rate. In optax numbers are state as well.

    Hyperparameters that a step computes are not checked: a schedule of `b1` may leave [0, 1).

    Raises:
        FzeroError: for an `inner_factory` that is no function; for `static_args` that it does not take; for a function
            that is no schedule and not named in `static_args`; in `update`, for a state with other hyperparameters.
    """
    way_out = "give the function that makes the optimizer, such as optim.adamw"
    check_function("inject_hyperparams", "inner_factory", inner_factory, way_out)
    signature = inspect.signature(inner_factory)
    static = {static_args} if isinstance(static_args, str) else set(static_args)
    for name in sorted(static - set(signature.parameters)):
        problem = f"has no argument {name!r}"
        way_out = f"static_args may name {list(signature.parameters)}"
        raise FzeroError(getattr(inner_factory, "__name__", "inner_factory"), problem, way_out)

    @functools.wraps(inner_factory)
    def make(*args: Any, **kwargs: Any) -> GradientTransformation:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError:
            return inner_factory(*args, **kwargs)  # Python's error, which names the factory
        given = {name: value for name, value in bound.arguments.items() if name not in static}
        schedules = {name: value for name, value in given.items() if callable(value)}
        for name, schedule in schedules.items():
            _check_schedule(name, schedule)
        first = {name: value for name, value in given.items() if isinstance(value, Tensor)}

        def build(hyperparams: dict[str, Tensor]) -> GradientTransformation:
            new = inspect.BoundArguments(signature, {**bound.arguments, **hyperparams})
            return inner_factory(*new.args, **new.kwargs)

        def evaluate(count: Tensor, held: dict[str, Tensor]) -> dict[str, Tensor]:
            zero = count.to(torch.float32) * 0  # of the kind of the count: beside Sharded leaves a replicated value
            return {name: zero + schedule(count) for name, schedule in schedules.items()} | {
                name: zero + held[name] for name in first
            }

        def init(params: Tree) -> InjectHyperparamsState:
            count = init_count(params)
            hyperparams = evaluate(count, first)
            return InjectHyperparamsState(count, hyperparams, build(hyperparams).init(params))

        def update(
            updates: Tree, state: InjectHyperparamsState, params: Tree | None = None
        ) -> tuple[Tree, InjectHyperparamsState]:
            expected, names = sorted({**schedules, **first}), sorted(state.hyperparams)
            if names != expected:
                way_out = "give the state that this optimizer's init or update returned"
                if new := sorted(set(names) - set(expected)):
                    way_out += f"; a number is no state: give {new[0]} as a 0-d tensor to change it between steps"
                raise FzeroError("inject_hyperparams", f"the state has {names}, the optimizer {expected}", way_out)
            hyperparams = evaluate(state.count, state.hyperparams)
            updates, inner_state = build(hyperparams).update(updates, state.inner_state, params)
            return updates, InjectHyperparamsState(state.count + 1, hyperparams, inner_state)

        return stage(InjectHyperparamsState, init, update, takes_integers=True)

    return make


def _check_schedule(name: str, schedule: Callable[..., Any]) -> None:
    """Refuse a function that does not take one argument."""
    try:
        inspect.signature(schedule).bind(0)
    except TypeError:
        way_out = f"give static_args={name!r} for a function that is no schedule, such as a mask"
        raise FzeroError(
            "inject_hyperparams", f"{name} is a function that does not take a step count", way_out
        ) from None
    except ValueError:
        return  # a function of C tells nothing
