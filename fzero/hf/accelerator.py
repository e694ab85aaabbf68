"""Accelerator: accelerate's Accelerator, whose models are in slices."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import accelerate
import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType, DynamoBackend
from torch import Tensor, nn

from fzero.base.arguments import check_arguments
from fzero.base.errors import FzeroError
from fzero.hf.prepared import How, Prepared, Words
from fzero.hf.signatures import join_signatures
from fzero.program.plan import check_stage
from fzero.ranks.live import find_ranks
from fzero.ranks.members import Members
from fzero.ranks.together import tell_others
from fzero.training.meshes import PORT, make_mesh

STATE = "fzero"
"""The folder of slices in what `save_state` writes. That of a second model is "fzero_1"."""
PLUGINS = ("deepspeed_plugin", "deepspeed_plugins", "fsdp_plugin", "megatron_lm_plugin", "torch_tp_plugin")
LAUNCHED = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
"""How processes may be started."""
WORDS = Words(
    owner="Accelerator",
    prepare="accelerator.prepare",
    backward="accelerator.backward",
    clip="accelerator.clip_grad_norm_",
    save="accelerator.save_state",
    read="accelerator.get_state_dict(model) gathers values, model.save_pretrained and save_state write them; "
    "load and cast a model before prepare",
    clips="accelerator.clip_grad_norm_ and clip_grad_value_ clip gradients, optimizer.zero_grad() drops them",
)


class Accelerator(accelerate.Accelerator):
    """accelerate's Accelerator, with its arguments.

        accelerator = fzero.hf.Accelerator(gradient_accumulation_steps=2)
        model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

    * `mesh`: a mesh of torch, or a `VirtualMesh` to run all ranks in this process, where each batch of this process is
      cut over the ranks. By default all ranks lie along one axis, "fsdp".
    * `stage`: as in `fzero.shard`.

    A prepared model has the class and the attributes of the model, and its calls, `generate`, `state_dict` and
    `save_pretrained` work as before. All ranks make these calls together. Any other use of a parameter's values is an
    `FzeroError`. The optimizer of torch holds groups and rates, which a scheduler moves; each update is a program.

    Raises:
        FzeroError: for an argument that is not supported.
    """

    _models: list[Any]

    @check_arguments
    def __init__(self, *args: Any, mesh: Any = None, stage: int = 3, **named: Any) -> None:
        check_stage(stage)
        for name in PLUGINS:
            if named.get(name) is not None:
                problem = "is given, and fzero cuts parameters into slices itself"
                raise FzeroError(f"Accelerator: {name}", problem, "leave it out; stage=3 is that of ZeRO")
        super().__init__(*args, **named)
        compiles = _check_state(self)
        self.mesh = make_mesh(self.local_process_index, PORT, None, self.device.type) if mesh is None else mesh
        autocast = torch.bfloat16 if self.native_amp else None
        self._how = How(self.mesh, stage, self.device, autocast, compiles, WORDS)
        self._prepared: list[Prepared] = []

    @property
    def _members(self) -> Members:
        return find_ranks(self.mesh).members

    # prepare

    def prepare(self, *args: Any, device_placement: Any = None) -> Any:
        """As accelerate's `prepare`. All ranks call it together."""
        with tell_others(self._members, "accelerator.prepare"):
            for each in args:  # an optimizer finds its model, wherever it stands
                if type(each).__name__ in ("DummyOptim", "DummyScheduler"):
                    problem = f"got a {type(each).__name__}, which stands for a part of a DeepSpeed configuration"
                    raise FzeroError("accelerator.prepare", problem, "give an optimizer and a scheduler of torch")
                if isinstance(each, nn.Module):
                    self.prepare_model(each)
            return super().prepare(*args, device_placement=device_placement)

    @check_arguments
    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        """The model whose calls compute from slices. All ranks call it together."""
        known = self._find_model(model)
        if known is None:
            known = Prepared(model, self._how, lambda: 1 / self.gradient_accumulation_steps)
            self._prepared.append(known)
            self._models.append(known.stand_in)
        return known.stand_in

    @check_arguments
    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None) -> Any:
        """The optimizer whose `step` moves the slices of a model that is prepared."""
        if isinstance(optimizer, SlicedOptimizer):
            return optimizer
        prepared = self._find_owner([x for group in optimizer.param_groups for x in group["params"]])
        if prepared is None:
            problem = f"{type(optimizer).__name__} has parameters of no model that is prepared"
            raise FzeroError("accelerator.prepare", problem, "give the model to prepare, with the optimizer or before")
        prepared.take_optimizer(optimizer)
        made = SlicedOptimizer(optimizer, prepared)
        self._optimizers.append(made)
        return made

    def _find_model(self, model: Any) -> Prepared | None:
        return next((each for each in self._prepared if model in (each.structure, each.stand_in)), None)

    def _find_owner(self, parameters: list[Any]) -> Prepared | None:
        return next((each for each in self._prepared if each.owns(parameters)), None)

    # gradients

    def backward(self, loss: Any, **kwargs: Any) -> None:
        """Add the gradients of a loss, divided by `gradient_accumulation_steps`, to those of the update."""
        if not kwargs and any(each.take_loss(loss) for each in self._prepared):
            return
        with torch.autograd.set_multithreading_enabled(False):  # programs run in this thread, on GPUs too
            super().backward(loss, **kwargs)

    @check_arguments
    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """The norm of the gradients of a model, which are scaled down to the norm `max_norm`.

        Raises:
            FzeroError: for a part of the parameters of a model, and for a `norm_type` other than 2.
        """
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        prepared = self._find_owner(given)
        if prepared is None:
            return super().clip_grad_norm_(given, max_norm, norm_type)
        prepared.check_all(given)
        if norm_type != 2:
            raise FzeroError("accelerator.clip_grad_norm_", f"got norm_type={norm_type!r}", "give 2")
        return prepared.clip_norm(max_norm)

    @check_arguments
    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Bound each element of the gradients of a model. Raises as `clip_grad_norm_`."""
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        prepared = self._find_owner(given)
        if prepared is None:
            super().clip_grad_value_(given, clip_value)
            return
        prepared.check_all(given)
        prepared.clip_value(clip_value)

    @check_arguments
    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> NoReturn:
        """Not supported."""
        problem = "lets ranks make unequal numbers of steps, and all ranks take each step together"
        raise FzeroError(
            "accelerator.join_uneven_inputs", problem, "give the loader even_batches=True, or drop_last=True"
        )

    # files

    @check_arguments
    def save_state(self, output_dir: Any = None, safe_serialization: bool = True, **named: Any) -> Any:
        """As accelerate's `save_state`, with parameters, running statistics and optimizer state in a folder "fzero",
        which any number of ranks reads. All ranks call it together."""
        with self._hide_models():
            folder = super().save_state(output_dir, safe_serialization, **named)
        for each, name in self._name_folders():
            each.save(Path(folder) / name)
        return folder

    def load_state(self, input_dir: Any = None, load_kwargs: Any = None, **named: Any) -> None:
        """As accelerate's `load_state`, of what `save_state` wrote. All ranks call it together."""
        found: list[str] = []
        hook = super().register_load_state_pre_hook(lambda _, folder: found.append(folder))
        try:
            with self._hide_models():
                super().load_state(input_dir, load_kwargs, **named)
        finally:
            hook.remove()
        for each, name in self._name_folders():
            each.load(Path(found[0]) / name)

    def _name_folders(self) -> list[tuple[Prepared, str]]:
        return [(each, f"{STATE}_{i}" if i else STATE) for i, each in enumerate(self._prepared)]

    @contextmanager
    def _hide_models(self) -> Iterator[None]:
        """A context in which accelerate writes and reads all but models."""
        models, self._models = self._models, []
        try:
            yield
        finally:
            self._models = models

    def register_save_state_pre_hook(self, hook: Any) -> NoReturn:
        """Not supported."""
        raise _refuse_hook("save")

    def register_load_state_pre_hook(self, hook: Any) -> NoReturn:
        """Not supported."""
        raise _refuse_hook("load")

    def free_memory(self, *objects: Any) -> Any:
        """As accelerate's `free_memory`."""
        self._prepared = []
        return super().free_memory(*objects)


class SlicedOptimizer(AcceleratedOptimizer):
    """accelerate's AcceleratedOptimizer, whose steps move slices. The optimizer of torch holds groups and rates."""

    def __init__(self, optimizer: torch.optim.Optimizer, prepared: Prepared) -> None:
        super().__init__(optimizer, device_placement=False, scaler=None)
        self._prepared = prepared

    def step(self, closure: Any = None) -> None:
        """Update, unless gradients accumulate."""
        if closure is not None:
            problem = "got a closure, which computes the loss several times an update"
            raise FzeroError("optimizer.step", problem, "call accelerator.backward, then optimizer.step()")
        super().step()  # schedulers of torch count its steps; its parameters have no gradients
        if self.gradient_state.sync_gradients:
            self._prepared.update(self.optimizer)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Drop gradients, unless they accumulate."""
        if self.gradient_state.sync_gradients:
            self._prepared.zero_grad()


def _check_state(accelerator: accelerate.Accelerator) -> bool:
    """Whether programs are compiled.

    Raises:
        FzeroError: for what arguments, or `accelerate launch` by its environment, ask of accelerate.
    """
    kind = accelerator.distributed_type
    if kind not in LAUNCHED:
        problem = f"is {kind.value}, and fzero cuts parameters into slices itself"
        way_out = "start the script with torchrun, or with accelerate launch --multi_gpu"
        raise FzeroError("accelerate: distributed_type", problem, way_out)
    if accelerator.parallelism_config is not None:
        raise FzeroError("Accelerator: parallelism_config", "is given", "give mesh= with the axes replica and fsdp")
    precision = accelerator.mixed_precision
    if precision == "fp8" or (precision == "fp16" and accelerator.scaler is not None):
        way_out = 'give "bf16", or train by fzero.hf.Trainer, which has fp16'
        raise FzeroError("Accelerator: mixed_precision", f"is {precision!r}, which is not supported", way_out)
    comm_hook = getattr(accelerator.ddp_handler, "comm_hook", "no")
    if getattr(comm_hook, "value", comm_hook) != "no":
        problem = f"has comm_hook {comm_hook}, which changes gradients"
        raise FzeroError("DistributedDataParallelKwargs", problem, "leave it out, or see fzero.variants")
    if accelerator.autocast_handler is not None and not accelerator.autocast_handler.enabled:
        raise FzeroError("AutocastKwargs", "has enabled=False", 'give mixed_precision="no"')
    backend = accelerator.state.dynamo_plugin.backend
    if backend not in (DynamoBackend.NO, DynamoBackend.INDUCTOR):
        raise FzeroError("Accelerator: dynamo_backend", f"is {backend.value!r}", 'give "inductor"')
    return backend == DynamoBackend.INDUCTOR


def _refuse_hook(what: str) -> FzeroError:
    problem = "would get whole models and weights, which are in slices"
    way_out = f"{what} what is your own beside accelerator.{what}_state, or call register_for_checkpointing"
    return FzeroError(f"accelerator.register_{what}_state_pre_hook", problem, way_out)


Accelerator.__init__.__signature__ = join_signatures(accelerate.Accelerator.__init__, Accelerator.__init__)  # type: ignore[attr-defined]
