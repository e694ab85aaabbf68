"""Engine: DeepSpeed's training loop, from programs of pure functions. It holds a state, and the programs hold none."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fzero.base.errors import FzeroError
from fzero.base.state import State
from fzero.deepspeed.functions import Functions, count_skips, find_loss
from fzero.deepspeed.handles import Handle, SchedulerHandle
from fzero.deepspeed.monitors import Monitors
from fzero.deepspeed.plateau import Plateau
from fzero.deepspeed.profiling import GRADIENTS, UPDATE, Profiler
from fzero.deepspeed.quantized import choose_passes
from fzero.deepspeed.saving import Files
from fzero.deepspeed.schedulers import Scheduled, rate_at
from fzero.deepspeed.settings import Settings
from fzero.deepspeed.tables import find_end
from fzero.ranks.homes import Home, find_home
from fzero.training.models import copy_without_values
from fzero.training.programs import compile_function
from fzero.values.lowering import Apply

_log = logging.getLogger("fzero")


class Engine(Files):
    """The engine that `initialize` returns.

    In training `engine(batch)` computes output and gradients, `engine.backward(loss)` takes that loss, and
    `engine.step()` updates behind `gradient_accumulation_steps` batches. `engine.train_step(state, *batches)` is the
    same as one function of a state; both run the same two programs. `state` has params, optimizer state, loss scale and
    the count of updates.
    """

    def __init__(
        self,
        module: nn.Module,
        applies: tuple[Apply, Apply],
        state: State,
        functions: Functions,
        settings: Settings,
        scheduled: Scheduled,
        mesh: Any,
        local_rank: int,
    ) -> None:
        self.module, self.settings, self.state, self.mesh = copy_without_values(module), settings, state, mesh
        self.local_rank, self.training = local_rank, True
        self._applies, self._scheduled, self._end = applies, scheduled, find_end(scheduled)
        self._begin, self._add, self._update, self._evaluate = (_compile(each, self) for each in functions)
        self._sums: Any = None  # of gradients, since the last update
        self._loss: Tensor | None = None  # which backward has not taken yet
        self._pending: Any = None  # the sums with the gradients of that loss
        self._may_step = False
        self._norm: Any = None
        self._began = time.perf_counter()
        self.micro_steps = 0
        self._losses: list[Tensor] = []  # since the last update
        self._monitors = Monitors(settings.monitors, self.global_rank)
        self._profiler = Profiler(settings.profiler, settings.wall_clock, self.device)
        self.training_dataloader: Any = None
        self.optimizer = Handle(self)
        self.lr_scheduler: SchedulerHandle | Plateau = SchedulerHandle(self)

    # DeepSpeed's loop

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The output of the model for a batch. In training gradients are computed too.

        Raises:
            FzeroError: where the loss before was not given to `backward`, or `step` was not called.
        """
        if not self.training:
            return self._evaluate(self.state.params, args, kwargs)
        if self._loss is not None:
            problem = "is called again, and the loss before was not given to engine.backward"
            raise FzeroError("engine", problem, "call engine.eval() for an output without gradients")
        if self._may_step:
            raise FzeroError("engine", "is called again before engine.step()", "call step after each backward")
        output, self._pending = self._differentiate(self.state, self._sums, args, kwargs)
        self._sums = None  # the call took their memory
        self._loss = find_loss(output)
        return output

    forward = __call__

    def backward(self, loss: Any, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Any:
        """Take the gradients of the loss that the last call returned. Returns the loss's share of the mean over
        `gradient_accumulation_steps`, as DeepSpeed does.

        Raises:
            FzeroError: for any other loss, because gradients of what is computed outside of the model are unknown.
        """
        if loss is not self._loss or loss is None:
            kind = f"of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"of type {type(loss).__name__}"
            problem = f"a value {kind} is not the loss that engine(...) returned last"
            way_out = "compute the loss in the model, or give initialize(loss=), a function of the model and the batch"
            raise FzeroError("engine.backward", problem, way_out)
        if retain_graph or not scale_wrt_gas:
            name = "retain_graph=True" if retain_graph else "scale_wrt_gas=False"
            raise FzeroError("engine.backward", f"got {name}, which is not supported", "leave it out")
        self._sums, self._pending, self._loss, self._may_step = self._pending, None, None, True
        self._losses.append(loss.detach())
        return loss / self.settings.accumulation_steps

    def step(self, lr_kwargs: Any = None) -> None:
        """Count a batch, and update the state where it is the last of `gradient_accumulation_steps`.

        Raises:
            FzeroError: without a `backward` before; for `lr_kwargs`.
        """
        if lr_kwargs:
            raise FzeroError("engine.step", f"got lr_kwargs={lr_kwargs!r}", "give a scheduler to initialize")
        if not self._may_step:
            raise FzeroError("engine.step", "is called without a backward before", "call engine(batch), then backward")
        if self.is_gradient_accumulation_boundary():
            self.state, self._norm = self._advance(self.state, self._sums)
            self._sums = None
            self._report(self._losses)
            self._losses = []
        self._may_step = False
        self.micro_steps += 1

    def zero_grad(self) -> None:
        """Drop the gradients since the last update. An update does so itself."""
        self._sums, self._losses = None, []

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the next `step` updates the state."""
        return (self.micro_steps + 1) % self.settings.accumulation_steps == 0

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """The mean loss of `gradient_accumulation_steps` batches of an iterator, by default of `training_data`, after
        an update by them. A batch is a tuple or list of arguments of the model, a dict of its keywords, or one
        argument."""
        if self._loss is not None or self._sums is not None or self._may_step:
            raise FzeroError("engine.train_batch", "is called between engine(...) and an update", "call step first")
        if data_iter is None:
            if self.training_dataloader is None:
                raise FzeroError("engine.train_batch", "there is no training_data", "give it an iterator of batches")
            data_iter = self._batches = getattr(self, "_batches", None) or _repeat(self.training_dataloader)
        batches = [next(data_iter) for _ in range(self.settings.accumulation_steps)]
        self.state, loss = self.train_step(self.state, *batches)
        self.micro_steps += len(batches)
        self._report([loss])
        return loss

    def train(self, mode: bool = True) -> Engine:
        """Compute gradients from now on, in the module's training mode."""
        self.training = mode
        return self

    def eval(self) -> Engine:
        """Return outputs alone from now on, in the module's evaluation mode."""
        return self.train(False)

    # the functional pieces

    @property
    def params(self) -> Any:
        """The parameters, a tree of `Sharded` leaves."""
        return self.state.params

    @property
    def apply(self) -> Apply:
        """The function of the model in the present mode: `apply(params, *args, **kwargs)`."""
        return self._applies[0 if self.training else 1]

    def train_step(self, state: State, *batches: Any) -> tuple[State, Tensor]:
        """`(new state, mean loss)` after one update by the gradients of `gradient_accumulation_steps` batches. The
        state that is given becomes unusable. Batches are as in `train_batch`.

        Raises:
            FzeroError: for another number of batches.
        """
        if len(batches) != self.settings.accumulation_steps:
            problem = f"got {len(batches)} batches, gradient_accumulation_steps is {self.settings.accumulation_steps}"
            raise FzeroError("engine.train_step", problem, "give one batch for each step of accumulation")
        sums, losses = None, []
        for batch in batches:
            args, kwargs = _to_arguments(batch)
            output, sums = self._differentiate(state, sums, args, kwargs)
            losses.append(find_loss(output))
        state, self._norm = self._advance(state, sums)
        return state, torch.stack(losses).mean()

    def report(self, *args: Any, **kwargs: Any) -> Any:
        """What the program that adds the gradients of a batch does: its peak, and the bytes that move."""
        return self._begin.report(self.state.params, self.state.scale, args, kwargs)

    def _differentiate(self, state: State, sums: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """`(output, sums of gradients)` of a batch and, unless `sums` is None, of those before it."""
        with self._profiler.measure(GRADIENTS, state.step, args, kwargs):
            if sums is None:
                return self._begin(state.params, state.scale, args, kwargs)
            return self._add(state.params, sums, state.scale, args, kwargs)

    def _advance(self, state: State, sums: Any) -> tuple[State, Any]:
        if self._end is not None and state.step >= self._end and state.step - self.skipped_steps >= self._end:
            problem = f"has rates for {self._end} updates, and {state.step - self.skipped_steps} are done"
            raise FzeroError("lr_scheduler", problem, 'give a scheduler of more steps, or a config "scheduler"')
        with self._profiler.measure(UPDATE, state.step):
            params, opt_state, scale, norm = self._update(state.params, state.opt_state, state.scale, sums)
        return state._replace(params=params, opt_state=opt_state, scale=scale, step=state.step + 1), norm

    # what DeepSpeed's engine says

    @property
    def global_steps(self) -> int:
        """Updates so far, those that were skipped among them."""
        return int(self.state.step)

    @property
    def global_samples(self) -> int:
        return self.global_steps * self.settings.train_batch_size

    @property
    def skipped_steps(self) -> int:
        """Updates that were skipped because gradients were not finite. Waits for the device."""
        return count_skips(self.state.opt_state)

    def get_lr(self) -> list[float]:
        """The rate of the next update, one for each group of parameters."""
        count = self.global_steps - self.skipped_steps
        return [rate_at(each, count) for each in self._scheduled]

    def get_global_grad_norm(self) -> float | None:
        """The norm of the mean gradient of the last update, before it was clipped. None before the first update."""
        return None if self._norm is None else float(self._norm)

    @property
    def loss_scale(self) -> float:
        """The factor of the loss of the next batch, 1 without fp16."""
        return 1.0 if self.state.scale is None else float(self.state.scale.scale.full_tensor())

    cur_scale = loss_scale

    def train_batch_size(self) -> int:
        return self.settings.train_batch_size

    def train_micro_batch_size_per_gpu(self) -> int:
        return self.settings.micro_batch_size

    def gradient_accumulation_steps(self) -> int:
        return self.settings.accumulation_steps

    def get_batch_info(self) -> tuple[int, int, int]:
        """`(train batch, micro batch of a rank, accumulation steps)`."""
        return self.settings[:3]

    def gradient_clipping(self) -> float:
        return self.settings.clipping

    def zero_optimization_stage(self) -> int:
        return self.settings.stage

    def zero_optimization(self) -> bool:
        return self.settings.stage > 0

    def fp16_enabled(self) -> bool:
        return self.settings.compute is torch.float16

    def bfloat16_enabled(self) -> bool:
        return self.settings.compute is torch.bfloat16

    @property
    def device(self) -> torch.device:
        """Where batches belong."""
        return self._home.device or torch.device("cpu")

    @property
    def global_rank(self) -> int:
        return getattr(self._home, "number", 0)

    @property
    def world_size(self) -> int:
        return self._home.mesh.size()

    @property
    def dp_world_size(self) -> int:
        return self.world_size

    @property
    def _home(self) -> Home:
        return find_home(self.mesh)

    def _report(self, losses: Sequence[Tensor]) -> None:
        self._monitors.write(self, losses)
        self._profiler.write(self)
        every = self.settings.steps_per_print
        if not every or self.global_steps % every:
            return
        seconds, self._began = (time.perf_counter() - self._began) / every, time.perf_counter()
        if self.global_rank == 0:
            text = "step %d: rates %s, loss scale %g, %d steps skipped, %.4f s a step"
            _log.info(text, self.global_steps, self.get_lr(), self.loss_scale, self.skipped_steps, seconds)


def _compile(function: Callable[..., Any], engine: Engine) -> Any:
    settings = engine.settings
    passes = choose_passes(settings)
    how: dict[str, Any] = {"stage": settings.stage, "reduce_dtype": settings.reduce_dtype, "chunk": settings.chunk}
    how = how if passes is None else {"passes": passes}
    return compile_function(function, engine.mesh, compile=settings.compile, **how)


def _to_arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """`(args, kwargs)` of a batch."""
    if isinstance(batch, (tuple, list)):
        return tuple(batch), {}
    if isinstance(batch, dict):
        return (), dict(batch)
    return (batch,), {}


def _repeat(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader
