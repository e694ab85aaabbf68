"""Engine: DeepSpeed's training loop, from programs of pure functions. It holds a state, and the programs hold none."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fzero import tree
from fzero.base.arguments import check_arguments
from fzero.base.errors import FzeroError
from fzero.base.state import State
from fzero.deepspeed.calls import Call, Inputs, find_calls
from fzero.deepspeed.controls import Controls
from fzero.deepspeed.functions import Batch, Functions, NoLoss, find_loss
from fzero.deepspeed.handles import GivenOptimizer, Handle, SchedulerHandle
from fzero.deepspeed.monitors import Monitors
from fzero.deepspeed.plateau import Plateau
from fzero.deepspeed.profiling import GRADIENTS, Profiler
from fzero.deepspeed.programs import EnginePrograms, compile_programs
from fzero.deepspeed.saving import EngineFiles
from fzero.deepspeed.schedulers import Scheduled
from fzero.deepspeed.settings import Settings
from fzero.deepspeed.tables import find_end
from fzero.optim.kinds import Group
from fzero.training.models import copy_without_values
from fzero.training.outputs import Cotangents

_log = logging.getLogger("fzero")


class _Open(NamedTuple):
    """A call that computed gradients ahead, for the loss that it returned."""

    call: Call
    loss: Tensor
    pending: Any  # the sums with the gradients of that loss
    has_sums: bool  # whether gradients of batches before are in them


class Engine(EngineFiles, Controls):
    """The engine that `initialize` returns.

    In training `engine(batch)` computes output and gradients, `engine.backward(loss)` takes that loss, and
    `engine.step()` updates behind `gradient_accumulation_steps` batches. Where the model returns no loss, or the loss
    is computed from what it returned, `engine.backward(loss)` runs the model again for gradients.

    `engine.train_step(state, *batches)` is the same as one function of a state; both run the same programs. `state` has
    params, optimizer state, loss scale, the running statistics of the model and the count of updates.
    """

    def __init__(
        self,
        module: nn.Module,
        applies: tuple[Any, Any],
        state: State,
        make: Callable[[Settings], Functions],
        names: tuple[str, ...],
        settings: Settings,
        scheduled: Scheduled,
        mesh: Any,
        local_rank: int,
    ) -> None:
        self.module, self.state, self.mesh = copy_without_values(module, tree.paths(state.buffers)), state, mesh
        self.local_rank, self.training = local_rank, True
        self._applies, self._scheduled, self._make, self._names = applies, scheduled, make, names
        self._profiler = Profiler(settings.profiler, settings.wall_clock, self.device)
        self._prepare(settings)
        self._sums: Any = None  # of gradients, since the last update
        self._open: _Open | None = None  # the call whose loss backward has not taken yet
        self._computes_ahead = True  # gradients in the call itself, while each loss is what the call returned
        self._may_step, self._is_scaled = False, False
        self._shapes: Any = None  # and dtypes of the last outputs that a loss outside depended on
        self._boundary: bool | None = None  # the answer that the user gave
        self._norm: Any = None
        self._began = time.perf_counter()
        self.micro_steps = 0
        self._losses: list[Tensor] = []  # since the last update
        self._monitors = Monitors(settings.monitors, self.global_rank)
        self.training_dataloader: Any = None
        self.given: GivenOptimizer | None = None
        self.groups: list[Group] = []
        self.optimizer = Handle(self)
        self.lr_scheduler: SchedulerHandle | Plateau = SchedulerHandle(self)

    def _prepare(self, settings: Settings) -> None:
        """Make the programs of settings. Each is traced at its first call."""
        self.settings = settings
        compiled = compile_programs(self._make(settings), settings, self.mesh)
        self._programs = EnginePrograms(settings, self._names, find_end(self._scheduled), self._profiler, compiled)

    # DeepSpeed's loop

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The output of the model for a batch. In training it has a gradient, unless `torch.no_grad` is set.

        Raises:
            FzeroError: where gradients of a batch before are in those of the last call, and its loss was not given to
                `backward`.
        """
        named = self._programs.name(args)
        if not self.training:
            return self._programs.evaluate(self.state, named, kwargs)
        if not torch.is_grad_enabled():
            return self._run_forward(named, kwargs)
        call = Call(self, Inputs.of(named, kwargs), self._take)
        self._note_rows(call.inputs.count_rows())
        if self._open is not None:
            self._drop("engine", "is called again, and the loss before was not given to engine.backward")
        named, kwargs = call.inputs.detach()
        if self._computes_ahead and not call.inputs.wanted:
            try:
                output, self.state, pending = self._programs.differentiate(self.state, self._sums, named, kwargs)
            except NoLoss:
                self._compute_behind("the model returns no loss")
            else:
                output = call.attach(output)
                self._open = _Open(call, find_loss(output), pending, self._sums is not None)
                self._sums = None  # the call took their memory
                return output
        return call.attach(self._run_forward(named, kwargs))

    forward = __call__

    def _run_forward(self, args: Any, kwargs: Any) -> Any:
        """The output of the model in training, which changes its buffers."""
        output, self.state = self._programs.forward(self.state, args, kwargs)
        return output

    @check_arguments
    def backward(self, loss: Any, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Any:
        """Add the gradients of a loss to those of the next update: of the loss that the last call returned, or of one
        that is computed from outputs of calls. Returns the loss's share of the mean over
        `gradient_accumulation_steps`, as DeepSpeed does. With `scale_wrt_gas=False` the share is the whole.

        Raises:
            FzeroError: for a loss that does not depend on outputs of this engine, or is not one number.
        """
        steps = self.settings.accumulation_steps if scale_wrt_gas else 1
        is_share = steps == self.settings.accumulation_steps
        if self._open is not None and loss is self._open.loss and is_share and not retain_graph:
            self._sums, self._may_step = self._open.pending, True
            self._open.call.close()
            self._open = None
            self._losses.append(loss.detach())
            return self._losses[-1] / steps
        calls = self._find_calls(loss)
        share = loss / steps
        scale = self.loss_scale
        for call in calls:
            call.factor = call.engine.loss_scale / scale * (1 if call.engine is self else steps)
        try:
            with torch.autograd.set_multithreading_enabled(False):  # programs run in this thread, on GPUs too
                (share * scale if scale != 1 else share).backward(retain_graph=retain_graph)
        finally:
            for call in calls:
                call.factor = None
        self._losses.append(loss.detach())
        return share.detach()

    def scale(self, loss: Tensor) -> Tensor:
        """The loss times the loss scale, for `engine.scale(loss).backward()` in the place of
        `engine.backward(loss)`. Raises as `backward`."""
        self._find_calls(loss, "engine.scale")
        self._is_scaled = True
        self._losses.append(loss.detach())
        return loss * self.loss_scale

    def _find_calls(self, loss: Any, where: str = "engine.backward") -> list[Call]:
        """The calls of engines that a loss depends on.

        Raises:
            FzeroError: for what is no loss; for a loss that depends on no call of this engine.
        """
        if not isinstance(loss, Tensor) or loss.ndim:
            kind = f"of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"of type {type(loss).__name__}"
            is_read = isinstance(loss, (int, float))
            way_out = "give the tensor, without .item()" if is_read else "give a mean over examples"
            raise FzeroError(where, f"got a value {kind}, not a tensor of one number", way_out)
        calls = find_calls(loss)
        if not any(call.engine is self for call in calls):
            problem = "the loss does not depend on an output of this engine in training"
            way_out = "compute it from what engine(...) returned, in the place of model(...), outside of torch.no_grad"
            raise FzeroError(where, problem, way_out)
        return calls

    def _take(self, call: Call, cotangents: Cotangents) -> list[Tensor]:
        """Add the gradients of a call to the sums. Returns the gradients of its arguments."""
        if call.params is not self.state.params:
            problem = "the parameters have changed since the call whose output the loss depends on"
            raise FzeroError("engine.backward", problem, "call the engine again before backward")
        if call.factor is None and self.state.scale is not None and not self._is_scaled:
            problem = "runs without the loss scale of fp16"
            raise FzeroError("loss.backward", problem, "call engine.backward(loss), or engine.scale(loss).backward()")
        if self._open is not None and call is self._open.call:
            self._drop("engine.backward", "the loss is not the one that engine(...) returned last")
            self._compute_behind("the loss is computed from what the model returned")
        factor = 1 / self.settings.accumulation_steps if call.factor is None else call.factor
        weight = None if factor == 1 else torch.tensor(factor, device=self.device)
        inputs, (args, kwargs) = call.inputs.separate()
        given_args, given_kwargs = call.inputs.detach()
        measured = self._profiler.measure(GRADIENTS, self.state.step, tuple(given_args.values()), given_kwargs)
        cotangents = tuple(x if x is None else x.contiguous() for x in cotangents)  # a program belongs to strides
        with call.surround(), measured:
            given = call.params, weight, inputs, Batch(call.buffers, args, kwargs), cotangents
            if self._sums is None:
                self._sums, found = self._programs.compiled.pull(*given)
            else:  # an error leaves the sums as they were
                self._sums, found = self._programs.compiled.pull_more(self._sums, *given)
        self._may_step, self._shapes = True, [None if x is None else (x.shape, x.dtype) for x in cotangents]
        return [found[name] for name in inputs]

    def _drop(self, where: str, problem: str) -> None:
        """Forget the gradients that the last call computed ahead.

        Raises:
            FzeroError: where those of batches before are in them.
        """
        assert self._open is not None
        if self._open.has_sums:
            way_out = "give engine.backward what engine(...) returned, for each batch of an update or for none"
            raise FzeroError(where, f"{problem}, in the middle of an accumulation", way_out)
        self._open = None
        self._compute_behind(problem)

    def _compute_behind(self, reason: str) -> None:
        """From now on compute gradients in `backward`, where torch's gradient of the outputs is known."""
        if self._computes_ahead and self.global_rank == 0:
            text = "fzero.deepspeed: %s: backward runs the model again; initialize(loss=) runs it once a batch"
            _log.info(text, reason)
        self._computes_ahead = False

    @check_arguments
    def step(self, lr_kwargs: Any = None) -> None:
        """Count a batch, and update the state where it is the last of `gradient_accumulation_steps`. With
        `managed_gradient_accumulation` false each `step` updates.

        Raises:
            FzeroError: without a `backward` before; within `no_sync`; for `lr_kwargs`.
        """
        if lr_kwargs:
            raise FzeroError("engine.step", f"got lr_kwargs={lr_kwargs!r}", "give a scheduler to initialize")
        if self._is_held:
            raise FzeroError("engine.step", "is called within no_sync", "call it behind the context")
        if not self._may_step or self._sums is None:
            problem = "gradients were dropped by zero_grad" if self._may_step else "is called without a backward before"
            raise FzeroError("engine.step", problem, "call engine(batch), then backward")
        if self.is_gradient_accumulation_boundary() or not self.settings.counts_batches:
            self._check_given()
            self.state, self._norm = self._programs.update(self.state, self._sums)
            self._sums = None
            self._report(self._losses)
            self._losses = []
        self._may_step = self._is_scaled = False
        self.micro_steps += 1

    def zero_grad(self) -> None:
        """Drop the gradients since the last update. An update does so itself."""
        self._sums, self._losses = None, []

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the next `step` updates the state."""
        if self._boundary is not None:
            return self._boundary
        if not self.settings.counts_batches:
            return False  # but within `step`, as in DeepSpeed
        return (self.micro_steps + 1) % self.settings.accumulation_steps == 0

    @check_arguments
    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Say whether the next `step` calls update the state, in the place of the count of batches."""
        self._boundary = is_boundary

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """The mean loss of `gradient_accumulation_steps` batches of an iterator, by default of `training_data`, after
        an update by them. A batch is a tuple or list of arguments of the model, a dict of its keywords, or one
        argument."""
        if self._open is not None or self._sums is not None:
            raise FzeroError("engine.train_batch", "is called between engine(...) and an update", "call step first")
        if data_iter is None:
            if self.training_dataloader is None:
                raise FzeroError("engine.train_batch", "there is no training_data", "give it an iterator of batches")
            data_iter = self._batches = getattr(self, "_batches", None) or _repeat(self.training_dataloader)
        if not isinstance(data_iter, Iterator):
            problem = f"got a {type(data_iter).__name__}, not an iterator of batches"
            raise FzeroError("engine.train_batch", problem, "give iter(loader), one iterator for all calls")
        batches = [next(data_iter) for _ in range(self.settings.accumulation_steps)]
        self.state, loss = self.train_step(self.state, *batches)
        self.micro_steps += len(batches)
        self._report([loss])
        return loss

    @check_arguments
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
    def apply(self) -> Any:
        """The function of the model in the present mode: `apply(params, *args, **kwargs)`. A model that changes its
        buffers has `apply(params, buffers, *args, **kwargs)`, which returns `(output, new buffers)`."""
        return self._applies[0 if self.training else 1]

    def train_step(self, state: State, *batches: Any) -> tuple[State, Tensor]:
        """`(new state, mean loss)` after one update by the gradients of `gradient_accumulation_steps` batches. The
        state that is given becomes unusable. Batches are as in `train_batch`.

        Raises:
            FzeroError: for another number of batches, and for what is no state.
        """
        self._check_given()
        state, loss, self._norm = self._programs.train_step(state, *batches)
        return state, loss

    def report(self, *args: Any, **kwargs: Any) -> Any:
        """What the program that adds the gradients of a batch does: its peak, and the bytes that move. With a loss
        outside of the model it is the program of the last `backward`.

        Raises:
            FzeroError: with a loss outside of the model, before the first `backward`.
        """
        state, batch = self.state, Batch(self.state.buffers, self._programs.name(args), kwargs)
        compiled: Any = self._programs.compiled
        if self._computes_ahead or self._shapes is None:
            return compiled.begin.report(state.params, state.scale, batch)
        cotangents = tuple(x and torch.zeros(x[0], dtype=x[1], device=self.device) for x in self._shapes)
        return compiled.pull.report(state.params, None, {}, batch, cotangents)

    def _check_given(self) -> None:
        if self.given is not None:
            self.given.check()

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


def _repeat(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader
