"""Programs: what an engine computes, as a value. It holds no state: a state comes in, and a new state goes out.

DeepSpeed's loop, `engine.train_batch` and `engine.train_step` call the same programs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.base.errors import FzeroError
from fzero.base.state import State
from fzero.deepspeed.functions import Batch, Functions, count_skips, find_loss
from fzero.deepspeed.profiling import GRADIENTS, UPDATE, Profiler
from fzero.deepspeed.quantized import choose_passes
from fzero.deepspeed.settings import Settings
from fzero.training.programs import compile_function


class EnginePrograms(NamedTuple):
    """The programs of an engine for its settings.

    * `names` are those of the arguments of the model, by position, or of the loss that the user gave.
    * `end` is how many updates the tables of rates have values for; None without tables.
    * `compiled` are the functions of an engine as programs. Each is traced at its first call.
    """

    settings: Settings
    names: tuple[str, ...]
    end: int | None
    profiler: Profiler
    compiled: Functions

    def name(self, args: Iterable[Any]) -> dict[str, Any]:
        """The arguments that are given by position, by their names: errors of a step name them so. Arguments behind the
        named ones have numbers."""
        args = tuple(args)
        numbers = map(str, range(len(self.names), len(args)))
        return dict(zip((*self.names, *numbers), args))

    def evaluate(self, state: State, args: dict[str, Any], kwargs: dict[str, Any]) -> Any:
        """The output of the model in evaluation."""
        return self.compiled.evaluate(state.params, Batch(state.buffers, args, kwargs))

    def forward(self, state: State, args: dict[str, Any], kwargs: dict[str, Any]) -> tuple[Any, State]:
        """`(output, state with new buffers)` of the model in training."""
        output, buffers = self.compiled.forward(state.params, Batch(state.buffers, args, kwargs))
        return output, state._replace(buffers=buffers)

    def differentiate(
        self, state: State, sums: Any, args: dict[str, Any], kwargs: dict[str, Any]
    ) -> tuple[Any, State, Any]:
        """`(output, state with new buffers, sums of gradients)` of a batch and, unless `sums` is None, of those before
        it."""
        batch = Batch(state.buffers, args, kwargs)
        with self.profiler.measure(GRADIENTS, state.step, tuple(args.values()), kwargs):
            if sums is None:
                (output, buffers), sums = self.compiled.begin(state.params, state.scale, batch)
            else:
                (output, buffers), sums = self.compiled.add(state.params, sums, state.scale, batch)
        return output, state._replace(buffers=buffers), sums

    def update(self, state: State, sums: Any) -> tuple[State, Tensor]:
        """`(state after an update by sums of gradients, their global norm)`.

        Raises:
            FzeroError: behind the last update that a table of rates has.
        """
        if self.end is not None and state.step >= self.end and state.step - count_skips(state.opt_state) >= self.end:
            problem = f"has rates for {self.end} updates, and {state.step - count_skips(state.opt_state)} are done"
            raise FzeroError("lr_scheduler", problem, 'give a scheduler of more steps, or a config "scheduler"')
        with self.profiler.measure(UPDATE, state.step):
            params, opt_state, scale, norm = self.compiled.update(state.params, state.opt_state, state.scale, sums)
        return state._replace(params=params, opt_state=opt_state, scale=scale, step=state.step + 1), norm

    def train_step(self, state: State, *batches: Any) -> tuple[State, Tensor, Tensor]:
        """`(state after an update by the mean gradient of batches, mean loss, norm)`.

        Raises:
            FzeroError: for another number of batches, and for what is no state.
        """
        if not isinstance(state, State):
            raise FzeroError("engine.train_step", f"got a {type(state).__name__}, not a state", "give engine.state")
        if len(batches) != self.settings.accumulation_steps:
            problem = f"got {len(batches)} batches, gradient_accumulation_steps is {self.settings.accumulation_steps}"
            raise FzeroError("engine.train_step", problem, "give one batch for each step of accumulation")
        sums, losses = None, []
        for batch in batches:
            args, kwargs = _to_arguments(batch)
            output, state, sums = self.differentiate(state, sums, self.name(args), kwargs)
            losses.append(find_loss(output))
        state, norm = self.update(state, sums)
        return state, torch.stack(losses).mean(), norm


def compile_programs(functions: Functions, settings: Settings, mesh: Any) -> Functions:
    """The functions of an engine as programs for a mesh."""
    default: dict[str, Any] = {"stage": settings.stage, "reduce_dtype": settings.reduce_dtype, "chunk": settings.chunk}
    found = {}
    for name, function in functions._asdict().items():
        donate = name not in ("begin", "forward")  # `pull` needs the buffers that these were given
        passes = choose_passes(settings, in_place=donate)
        how = default | {"donate": donate} if passes is None else {"passes": passes}
        found[name] = compile_function(function, mesh, title=f"engine: {name}", compile=settings.compile, **how)
    return Functions(**found)


def list_names(call: Callable[..., Any], skip: int = 0) -> tuple[str, ...]:
    """The names of arguments that may be given by position, behind the first `skip`."""
    try:
        known = inspect.signature(call).parameters.values()
    except (TypeError, ValueError):  # torch.jit, and functions of C
        return ()
    return tuple(x.name for x in known if x.kind in (x.POSITIONAL_ONLY, x.POSITIONAL_OR_KEYWORD))[skip:]


def _to_arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """`(args, kwargs)` of a batch."""
    if isinstance(batch, (tuple, list)):
        return tuple(batch), {}
    if isinstance(batch, dict):
        return (), dict(batch)
    return (batch,), {}
