"""Initialize: DeepSpeed's entry point. A model and a configuration become an engine."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn

from fzero.base import torch_private, tree
from fzero.base.arguments import check_arguments
from fzero.base.errors import FzeroError
from fzero.base.mesh import mesh_shape
from fzero.base.state import State
from fzero.deepspeed.absent import refuse_arguments
from fzero.deepspeed.engine import Engine
from fzero.deepspeed.functions import add_autocast, make_functions, make_optimizer
from fzero.deepspeed.handles import GivenOptimizer
from fzero.deepspeed.loading import load
from fzero.deepspeed.marks import mark_parameters
from fzero.deepspeed.plan import EnginePlan, agree_on_plan, make_plan
from fzero.deepspeed.plateau import Plateau
from fzero.deepspeed.programs import list_names
from fzero.deepspeed.quantized import quantize_frozen
from fzero.deepspeed.settings import GROUP, SECOND_COPY
from fzero.optim.groups import combine
from fzero.ranks.live import find_ranks
from fzero.state.build.deferred import is_deferring
from fzero.training.live import LiveModel
from fzero.training.meshes import EVENLY, PORT, StateSpread, find_local_rank, make_mesh, split_world
from fzero.training.models import (
    WHOLE,
    Bound,
    Call,
    carry_buffers,
    find_store,
    init_state,
    lower_modes,
    partition_buffers,
    partition_model,
)
from fzero.training.spent import spend_model


class Initialized(NamedTuple):
    """What `initialize` returns, in DeepSpeed's order."""

    engine: Engine
    optimizer: Any
    training_dataloader: Any
    lr_scheduler: Any


@check_arguments
def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Any = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = PORT,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[..., Any] | None = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
    *,
    loss: Callable[..., Any] | None = None,
    mesh: Any = None,
    version: str = "0.19",
) -> Initialized:
    """An engine for a model, with DeepSpeed's arguments in DeepSpeed's order.

        engine, optimizer, loader, scheduler = fzero.deepspeed.initialize(model=model, config="ds_config.json")
        for batch in batches:
            loss = engine(batch)
            engine.backward(loss)
            engine.step()

    All ranks call `initialize` together; parameters are those of rank 0. Without a process group it makes one, from
    `args.local_rank` and torchrun's variables; a process without these is alone. The engine takes the
    values of `model`: any use of them is an error afterwards that names what to do instead.

    * `optimizer`: an optimizer of torch, a function of parameters that makes one, or one of `fzero.optim`. It goes
      before that of the configuration.
    * `lr_scheduler`: a scheduler of torch, or a function of an optimizer that makes one. Its rates become a table;
      those of a ReduceLROnPlateau move by `scheduler.step(metric)`. It goes before that of the configuration.
    * `model_parameters`: the parameters that are updated, or dicts of them, groups with params of their own.
    * `loss(model, *args, **kwargs)` returns the loss of a call `engine(*args, **kwargs)`, where `model` is a function
      with the module's arguments. Without `loss` the loss is the model's output, its `.loss` or its first element.
    * `mesh`: a mesh of torch, or a `VirtualMesh` to run all ranks in this process. By default all ranks lie along one
      axis, "fsdp".
    * `version`: which DeepSpeed a configuration was written for. It says what a missing `gradient_clipping` means.
    * `args`: an object with `local_rank`, `deepspeed_config`, and TrainingArguments of transformers for "auto".

    Raises:
        FzeroError: for a configuration that contradicts itself, a key that is refused or unknown, an argument that is
            not supported. docs/deepspeed.md lists all keys.
    """
    local_rank = find_local_rank(args)

    def plan() -> EnginePlan:
        refuse_arguments("initialize", {"mpu": (mpu, "give mesh="), "mesh_param": (mesh_param, "give mesh=")})
        sources = {"config": config, "config_params": config_params}
        return make_plan(args, sources, model, optimizer, model_parameters, lr_scheduler, on=on, version=version)

    with torch_private.disable_modes() if is_deferring() else nullcontext():  # suspends a zero.Init around this call
        on = find_ranks(make_mesh(local_rank, distributed_port, dist_init_required) if mesh is None else mesh)
        planned = agree_on_plan(on, plan)
        mesh = choose_mesh(mesh, planned.settings.spread, local_rank, distributed_port, dist_init_required)
        engine = _build_engine(planned, loss, mesh, local_rank)
        if training_data is not None:
            engine.training_dataloader = load(training_data, collate_fn, planned.settings, mesh)
        for name, each in {"model": planned.model, "engine.module": engine.module}.items():  # nothing is refused now
            spend_model(each, engine.device, functools.partial(_refuse_use, name))
            mark_parameters(each, engine)
    return Initialized(
        engine,
        engine.optimizer if planned.groups is not None else None,
        engine.training_dataloader,
        None if planned.settings.scheduler is None and lr_scheduler is None else engine.lr_scheduler,
    )


def _refuse_use(name: str, path: str, what: str) -> FzeroError:
    """The error for the use `what` of a parameter at `path` of the module `name`, or of the module itself."""
    if what == "load_state_dict":
        return FzeroError(name, "load_state_dict is called behind initialize", "load the model before initialize")
    way_out = "call engine(...), after engine.eval() for outputs alone; all ranks read engine.module_state_dict()"
    if what == ".grad":
        way_out = (
            "engine.zero_grad() drops gradients, gradient_clipping of the configuration clips them, "
            "fzero.deepspeed.utils.safe_get_full_grad reads them"
        )
    problem = f"{what} needs values, which are in the slices of an engine since initialize"
    return FzeroError(f"{name}: {path}" if path else name, problem, way_out)


def choose_mesh(mesh: Any, spread: StateSpread, local_rank: int, port: int, required: bool | None) -> Any:
    """The mesh that is given, or one of all ranks, over which state is spread as a configuration wants it.

    Raises:
        FzeroError: for a mesh that is given and whose state is spread otherwise.
    """
    if mesh is None:
        return make_mesh(local_rank, port, required, spread=spread)
    shape = mesh_shape(mesh)
    if spread != EVENLY and shape.sizes != split_world(shape.size(), spread):
        key, size = (SECOND_COPY, spread.local) if spread.shard is None else (GROUP, spread.shard)
        raise FzeroError(key, f"is {size}, and mesh= is {shape}", "give one of both")
    return mesh


def _build_engine(plan: EnginePlan, loss: Callable[..., Any] | None, mesh: Any, local_rank: int) -> Engine:
    """An engine with its first state."""
    model, groups, settings = plan.model, plan.groups, plan.settings
    scheduled = plan.scheduled.scheduled if isinstance(plan.scheduled, Plateau) else plan.scheduled
    store = find_store(model)
    lowered = lower_modes(model)
    held = partition_model(
        model,
        lowered.params,
        store,
        mesh,
        persist=WHOLE if settings.stage == 0 else 0,
        dtype=settings.param_dtype,
        to=settings.params_at,
    )
    held = quantize_frozen(held) if settings.quantizes_frozen else held
    inner = combine(groups, scheduled) if isinstance(groups, list) else groups
    chosen = None if inner is None else make_optimizer(inner, settings)
    state = State(
        params=held,
        opt_state=None if chosen is None else init_state(chosen, held, settings.optimizer_at, settings.offload_ratio),
        scale=None if settings.scaler is None else settings.scaler.init(held),
        step=0,
        buffers=partition_buffers(model, lowered.buffers, mesh),
    )
    on = find_ranks(mesh)
    live = LiveModel(model, tree.paths(lowered.buffers), first=lowered)
    applies: tuple[Any, Any] = live.train, live.evaluate
    if settings.autocast is not None:
        device = on.choose_device().type
        applies = (
            add_autocast(applies[0], settings.autocast, device),
            add_autocast(applies[1], settings.autocast, device),
        )
    train, evaluate = (_take_loss(carry_buffers(each, lowered.buffers), loss) for each in applies)
    make = functools.partial(make_functions, train, evaluate, chosen, virtual_ranks=len(on.numbers))
    names = list_names(model.forward) if loss is None else list_names(loss, skip=1)
    engine = Engine(model, applies, state, make, names, settings, scheduled, mesh, local_rank)
    engine.groups = groups if isinstance(groups, list) else []
    engine.lr_scheduler = plan.scheduled if isinstance(plan.scheduled, Plateau) else engine.lr_scheduler
    engine.given = GivenOptimizer(plan.given) if isinstance(plan.given, torch.optim.Optimizer) else None
    return engine


def _take_loss(call: Call, loss: Callable[..., Any] | None) -> Call:
    """The function of a model, or of a loss that the user computes with calls of the model, one behind another."""
    if loss is None:
        return call

    def compute(params: Any, buffers: Any, /, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        model = Bound(call, params, buffers)
        output = loss(model, *args, **kwargs)
        return output, model.buffers

    return compute
