"""Plan: what TrainingArguments ask of programs and of state. The loop is that of transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from fzero import optim, precision, tree
from fzero.base.errors import FzeroError
from fzero.base.mesh import SHARD_AXES, SHARD_AXIS, VirtualMesh
from fzero.base.placement import Placement, host
from fzero.deepspeed.quantized import choose_passes
from fzero.deepspeed.reading import Values
from fzero.deepspeed.settings import GROUP, SECOND_COPY, Settings
from fzero.hf.ds_config import read_deepspeed
from fzero.hf.fsdp import read_fsdp, read_parallelism
from fzero.hf.optimizers import BLOCK, has_codes
from fzero.optim.loss_scale import LossScale
from fzero.training.meshes import EVENLY, StateSpread
from fzero.training.models import WHOLE

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class TrainerPlan(NamedTuple):
    """What the arguments of a Trainer add up to."""

    stage: int
    how: dict[str, Any]  # keywords of `fzero.shard`
    held: dict[str, Any]  # keywords of `fzero.partition`: where parameters lie, and in which dtype
    autocast: torch.dtype | None = None  # of torch's autocast
    compute: torch.dtype | None = None  # to which parameters are cast; None: as they are
    scaler: LossScale | None = None
    optimizer_at: Placement | None = None
    offload_ratio: float = 1.0
    spread: StateSpread = EVENLY
    is_checkpointed: bool = False  # each layer, beside what transformers does
    settings: Settings | None = None  # of a ds_config
    keys: Values | None = None  # of a ds_config

    def cast(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function of parameters, computed in the dtype of compute."""
        return function if self.compute is None else precision(self.compute, output=torch.float32)(function)


def make_plan(args: Any, stage: int | None) -> TrainerPlan:
    """The plan of a Trainer. `stage` is the argument of the Trainer; None without it.

    Raises:
        FzeroError: for arguments that contradict each other, or that ask for what is not here.
    """
    if args.deepspeed and args.fsdp:
        raise FzeroError("TrainingArguments: deepspeed", "is given, and fsdp is given", "give one of both")
    how: dict[str, Any] = {"compile": bool(args.torch_compile)}
    held: dict[str, Any] = {"unit": BLOCK} if has_codes(args) else {}
    plan = TrainerPlan(3, how, held, autocast=DTYPES.get(args.mixed_precision))
    if args.mixed_precision == "fp16":
        plan = plan._replace(scaler=optim.loss_scale.standard())
    if args.deepspeed:
        plan = _follow_deepspeed(plan, args)
    if args.fsdp:
        wanted = read_fsdp(args)
        plan = plan._replace(
            stage=wanted.stage, is_checkpointed=wanted.is_checkpointed, spread=StateSpread(wanted.shard)
        )
        if wanted.offloads:
            plan = plan._replace(held={**held, "to": host()}, optimizer_at=host())
    if (args.deepspeed or args.fsdp) and stage not in (None, plan.stage):
        name = "deepspeed: zero_optimization.stage" if args.deepspeed else "fsdp_config"
        raise FzeroError(name, f"says stage {plan.stage}, and stage= is {stage}", "leave stage= out")
    plan = plan._replace(stage=plan.stage if stage is None else stage)
    if plan.stage == 0:
        plan = plan._replace(held={**plan.held, "persist": WHOLE})
    return plan._replace(how={"stage": plan.stage, **plan.how} if "passes" not in plan.how else plan.how)


def _follow_deepspeed(plan: TrainerPlan, args: Any) -> TrainerPlan:
    """A plan with what a ds_config asks for."""
    keys, settings = read_deepspeed(args)
    how = {**plan.how, "reduce_dtype": settings.reduce_dtype, "chunk": settings.chunk}
    how["compile"] = plan.how["compile"] or settings.compile
    passes = choose_passes(settings, in_place=True)
    held = {**plan.held, "dtype": settings.param_dtype, "to": settings.params_at}
    never = optim.loss_scale.dynamic(1.0, window=2**31 - 1, raise_at_min=False)  # skips, and scales nothing
    return plan._replace(
        stage=settings.stage,
        how=how if passes is None else {"compile": how["compile"], "passes": passes},
        held={name: value for name, value in held.items() if value is not None},
        autocast=settings.autocast,
        compute=settings.compute,
        scaler=settings.scaler or (never if settings.skips_nonfinite else None),
        optimizer_at=settings.optimizer_at,
        offload_ratio=settings.offload_ratio,
        spread=settings.spread,
        settings=settings,
        keys=keys,
    )


def find_spread(plan: TrainerPlan, args: Any) -> StateSpread:
    """How state is spread over ranks, for a mesh that the arguments choose.

    Raises:
        FzeroError: as `read_parallelism`.
    """
    if args.parallelism_config is not None:
        return StateSpread(read_parallelism(args.parallelism_config, args.world_size)[SHARD_AXIS])
    return plan.spread


def check_mesh(plan: TrainerPlan, args: Any, shape: VirtualMesh) -> None:
    """Refuse a mesh whose axes are not those that the arguments ask for.

    Raises:
        FzeroError: naming the argument and the mesh.
    """
    if args.parallelism_config is not None:
        axes = read_parallelism(args.parallelism_config, shape.size())
        if shape.sizes not in (axes, {"replica": 1, **axes}):
            problem = f"asks for the axes {axes}, and mesh= is {shape}"
            raise FzeroError("parallelism_config", problem, "leave one of both out")
    (shard, local), size = plan.spread, shape.size(shape.shard_axis)
    if args.deepspeed and not (shard in (None, size) and local in (None, shape.sizes.get(SHARD_AXES[-1]))):
        key, wanted = (SECOND_COPY, local) if shard is None else (GROUP, shard)
        raise FzeroError(f"deepspeed: {key}", f"is {wanted}, and mesh= is {shape}", "leave one of both out")
    if shard is not None and args.fsdp and "replica" not in shape.sizes:
        problem = f"is hybrid, and mesh= is {shape}, which has no replicas"
        raise FzeroError("fsdp_config: reshard_after_forward", problem, "leave one of both out")


def place(params: tree.Tree, plan: TrainerPlan) -> tree.Tree:
    """Parameters that are in slices already, where the plan wants them.

    Raises:
        FzeroError: naming the first of another dtype.
    """
    to, dtype = plan.held.get("to"), plan.held.get("dtype")
    for path, leaf in zip(tree.paths(params), tree.leaves(params)):
        if dtype is not None and leaf.is_floating_point() and leaf.dtype != dtype:
            problem = f"is {leaf.dtype}, and deepspeed= wants {dtype} beside narrow compute"
            raise FzeroError(path, problem, f"give dtype={dtype} to from_pretrained")
    return params if to is None else tree.map(lambda x: x.at(to), params)


def enable_checkpointing(model: Any) -> None:
    """Make a model compute each layer again in the backward pass.

    Raises:
        FzeroError: for a model that cannot.
    """
    enable = getattr(model, "activation_checkpointing_enable", None)
    enable = enable or getattr(model, "gradient_checkpointing_enable", None)
    if enable is None:
        problem = f"{type(model).__name__} has no activation_checkpointing_enable"
        raise FzeroError("fsdp_config: activation_checkpointing", problem, "leave it out, and call fzero.remat")
    enable()


HIDDEN = {"fsdp": False, "fsdp_plugin_args": None, "deepspeed_plugin": None, "parallelism_config": None}
"""What transformers and accelerate must not see: they would wrap the model."""


@contextmanager
def hide(args: Any) -> Iterator[None]:
    """A context in which TrainingArguments ask for no wrapper of a model, and for no scaler of accelerate."""
    without = HIDDEN | ({"mixed_precision": "no"} if getattr(args, "mixed_precision", "no") == "fp16" else {})
    held = {name: vars(args)[name] for name in without if name in vars(args)}
    vars(args).update({name: without[name] for name in held})
    try:
        yield
    finally:
        vars(args).update(held)
