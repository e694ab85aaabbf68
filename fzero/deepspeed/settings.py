"""Settings: what the keys of a configuration add up to, with sizes worked out and "auto" resolved."""

from __future__ import annotations

import logging
import os
from typing import Any, NamedTuple

import torch

from fzero.base.errors import FzeroError
from fzero.base.placement import Host, Placement, disk
from fzero.deepspeed.keys import KEYS
from fzero.deepspeed.reading import Values, look_up, render_table
from fzero.optim import loss_scale
from fzero.training.meshes import StateSpread

CLIPS_BY_DEFAULT = (0, 19)
"""The first version of DeepSpeed in which a missing `gradient_clipping` is 1.0; it was 0 before."""
GROUP, SECOND_COPY = (f"zero_optimization.{x}" for x in ("mics_shard_size", "zero_hpz_partition_size"))
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
MONITORS = ("tensorboard", "wandb", "comet", "csv_monitor")
_log = logging.getLogger("fzero")


class Settings(NamedTuple):
    """What an engine needs to know of a configuration."""

    train_batch_size: int
    micro_batch_size: int  # of one rank
    accumulation_steps: int
    stage: int
    clipping: float  # the largest global norm, 0 for none
    compute: torch.dtype | None  # None: the dtype of the leaves
    param_dtype: torch.dtype | None  # of parameters, gradients and optimizer state; None: that of the model
    autocast: torch.dtype | None  # of torch's autocast
    gradient_factor: int  # 1 for means over ranks, the number of ranks for sums
    reduce_dtype: torch.dtype | None
    scaler: loss_scale.LossScale | None
    skips_nonfinite: bool
    params_at: Placement | None
    optimizer_at: Placement | None
    offload_ratio: float  # how much of the optimizer state lies at `optimizer_at`
    chunk: int | None
    compile: bool
    optimizer: tuple[str, dict[str, Any]] | None  # type and params
    scheduler: tuple[str, dict[str, Any]] | None
    steps_per_print: int | None
    drop_last: bool
    counts_batches: bool  # and updates at the last of them; else each `step` updates
    monitors: dict[str, dict[str, Any]]  # block -> its options, of the monitors that are enabled
    profiler: dict[str, Any] | None  # the options of flops_profiler
    wall_clock: bool
    spread: StateSpread
    quantizes_weights: bool  # that are gathered
    quantizes_gradients: bool
    quantizes_frozen: bool  # as they are held


def settle(given: Values, world: int, *, version: str = "0.19", args: Any = None, rank: int = 0) -> Settings:
    """The settings of a configuration's values on `world` ranks. `args` are TrainingArguments of transformers, or an
    object with some of their attributes, from which "auto" is resolved. On rank 0 the table of given keys is logged.

    Raises:
        FzeroError: for batch sizes that contradict each other, fp16 beside bf16, an offload that there is not, and an
            "auto" that nothing tells.
    """
    given = resolve_auto(given, args)
    sizes = find_batch_sizes(given, world)
    stage = _find_stage(given)
    compute, scaler = _find_precision(given, stage)
    clipping = _find_clipping(given, version, rank)
    reduce = look_up(given, "communication_data_type")
    if rank == 0:
        _log.info("fzero.deepspeed: keys of the configuration\n%s", render_table(given))
    chunk = look_up(given, "zero_optimization.stage3_partition_stream_chunk_size")
    return Settings(
        *sizes,
        stage,
        clipping,
        compute,
        _find_param_dtype(given, compute, stage),
        _find_autocast(given, compute),
        world if look_up(given, "gradient_allreduce_op") == "sum" else 1,
        DTYPES[reduce] if reduce else None,
        scaler,
        scaler is not None or (compute is torch.bfloat16 and look_up(given, "bf16.check_grad_overflow")),
        _find_place(given, "param", stage),
        _find_place(given, "optimizer", stage),
        _find_ratio(given, stage),
        int(chunk) if chunk else None,
        look_up(given, "compile.deepcompile"),
        _find_algorithm(given, "optimizer"),
        _find_algorithm(given, "scheduler"),
        look_up(given, "steps_per_print"),
        look_up(given, "dataloader_drop_last"),
        look_up(given, "managed_gradient_accumulation"),
        {name: block for name in MONITORS if (block := _find_block(given, name)) is not None},
        _find_block(given, "flops_profiler"),
        look_up(given, "wall_clock_breakdown"),
        find_spread(given),
        *(_quantizes(given, what, stage) for what in ("weights", "gradients", "nontrainable_weights")),
    )


SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def find_batch_sizes(given: Values, world: int) -> tuple[int, int, int]:
    """`(train batch, micro batch of a rank, accumulation steps)` by DeepSpeed's arithmetic: two give the third, the
    product of micro batch, steps and ranks is the train batch.

    Raises:
        FzeroError: where neither batch size is given, or where the product is another one.
    """
    train: Any
    micro: Any
    steps: Any
    train, micro, steps = (None if given.get(name) == "auto" else given.get(name) for name in SIZES)
    if train is None and micro is None:
        way_out = "give one of both"
        raise FzeroError("train_batch_size", "and train_micro_batch_size_per_gpu are missing", way_out)
    if steps is None:
        steps = 1 if train is None or micro is None else train // micro // world if micro else 0
    if micro is None:
        micro = train // world // steps if steps else 0
    if train is None:
        train = micro * steps * world
    for name, size in zip(SIZES, (train, micro, steps)):
        if size < 1 and given.get(name) not in (None, "auto"):
            raise FzeroError(name, f"is {size}", "give a whole number of at least 1")
    absent = [name for name in SIZES[1:] if given.get(name) in (None, "auto")]
    if train != micro * steps * world and absent:
        part, what = (steps * world, f"{steps} steps") if SIZES[1] in absent else (micro * world, f"{micro} a rank")
        problem = f"is {train}, which is no multiple of {what} x {world} ranks"
        raise FzeroError("train_batch_size", problem, f"give a multiple of {part}")
    if train != micro * steps * world or train < 1:
        problem = f"is {train}, and {micro} a rank x {steps} steps x {world} ranks are {micro * steps * world}"
        raise FzeroError("train_batch_size", problem, "leave one of the three sizes out, or mend one")
    return int(train), int(micro), int(steps)


_ATTRIBUTES: dict[str, tuple[str, ...]] = {
    "train_micro_batch_size_per_gpu": ("per_device_train_batch_size",),
    "gradient_accumulation_steps": ("gradient_accumulation_steps",),
    "gradient_clipping": ("max_grad_norm",),
    "fp16.enabled": ("fp16",),
    "bf16.enabled": ("bf16",),
    "optimizer.params.lr": ("learning_rate",),
    "optimizer.params.betas": ("adam_beta1", "adam_beta2"),
    "optimizer.params.eps": ("adam_epsilon",),
    "optimizer.params.weight_decay": ("weight_decay",),
    "scheduler.params.warmup_max_lr": ("learning_rate",),
    "scheduler.params.warmup_num_steps": ("warmup_steps",),
    "scheduler.params.total_num_steps": ("max_steps",),
}
"""Path of a key -> the attributes of TrainingArguments that "auto" stands for, as in transformers."""


def resolve_auto(given: Values, args: Any) -> Values:
    """`given` with each "auto" replaced, as transformers does from its TrainingArguments. Batch sizes that nothing
    tells are left out, because two give the third.

    Raises:
        FzeroError: for an "auto" that neither `args` nor another key tells.
    """
    resolved: Values = {}
    for path, value in given.items():
        if isinstance(value, dict) and path.endswith(".params"):
            value = {name: _resolve(f"{path}.{name}", each, given, args) for name, each in value.items()}
        elif path in KEYS and KEYS[path].meaning != "no meaning":
            value = _resolve(path, value, given, args)
        resolved[path] = value
    return resolved


def _resolve(path: str, value: Any, given: Values, args: Any) -> Any:
    if value != "auto":
        return value
    found = [getattr(args, name, None) for name in _ATTRIBUTES.get(path, ())]
    if path == "scheduler.params.total_num_steps" and found[0] is not None and found[0] <= 0:
        found = []  # TrainingArguments count epochs then
    if found and None not in found:
        return found[0] if len(found) == 1 else found
    if path in SIZES:
        return None
    if path == "scheduler.params.warmup_min_lr":
        return 0.0
    if path == "scheduler.params.warmup_max_lr":
        rate = (given.get("optimizer.params") or {}).get("lr", "auto")
        if rate != "auto":
            return rate
    names = " and ".join(_ATTRIBUTES.get(path, ()))
    told = f", or args= with {names}, as TrainingArguments have" if names else ""
    raise FzeroError(path, 'is "auto", and nothing tells the value', f"give the value{told}")


def _find_stage(given: Values) -> int:
    stage = look_up(given, "zero_optimization.stage")
    if stage not in (0, 1, 2, 3):
        raise FzeroError("zero_optimization.stage", f"is {stage!r}", "stages are 0, 1, 2 and 3")
    return int(stage)


def _find_precision(given: Values, stage: int) -> tuple[torch.dtype | None, loss_scale.LossScale | None]:
    """The dtype of compute, and for float16 the loss scale."""
    half, brain = look_up(given, "fp16.enabled"), look_up(given, "bf16.enabled")
    if half and brain:
        raise FzeroError("fp16.enabled", "is true, and bf16.enabled is true", "compute in one of both")
    if not half:
        return (torch.bfloat16 if brain else None), None
    fixed = look_up(given, "fp16.loss_scale")
    if fixed:  # a scale that neither falls nor grows
        never = 2**31 - 1
        return torch.float16, loss_scale.dynamic(fixed, window=never, min_scale=fixed, raise_at_min=False)
    for name in ("loss_scale_window", "min_loss_scale"):
        if look_up(given, f"fp16.{name}") < 1:
            raise FzeroError(f"fp16.{name}", f"is {look_up(given, f'fp16.{name}')}", "give at least 1")
    if look_up(given, "fp16.initial_scale_power") > 127:
        problem = f"is {look_up(given, 'fp16.initial_scale_power')}"
        raise FzeroError("fp16.initial_scale_power", problem, "give at most 127: the scale is float32")
    return torch.float16, loss_scale.dynamic(
        init_scale=2.0 ** look_up(given, "fp16.initial_scale_power"),
        window=int(look_up(given, "fp16.loss_scale_window")),
        min_scale=float(look_up(given, "fp16.min_loss_scale")),
        hysteresis=look_up(given, "fp16.hysteresis") if stage else 1,  # DeepSpeed has none at stage 0
        consecutive_hysteresis=look_up(given, "fp16.consecutive_hysteresis"),
        raise_at_min=stage > 0,
    )


def _find_param_dtype(given: Values, compute: torch.dtype | None, stage: int) -> torch.dtype | None:
    """The dtype in which parameters are held: float32 beside narrow compute, unless the configuration wants bfloat16
    for parameters and optimizer state. DeepSpeed keeps one without the other on the host alone."""
    weights, states = (f"bf16.bf16_{name}" for name in ("master_weights_and_grads", "optimizer_states"))
    wanted = [path for path in (weights, states) if look_up(given, path)]
    if not wanted:
        return None if compute is None else torch.float32
    if len(wanted) == 1:
        other = states if wanted == [weights] else weights
        raise FzeroError(wanted[0], f"is true, and {other} is false", "give both: leaf and state have one dtype")
    if compute is not torch.bfloat16 or not stage:
        problem = f"is true at stage {stage}" if not stage else "is true, and bf16.enabled is false"
        raise FzeroError(
            weights, problem, "give bf16.enabled and zero_optimization.stage 1, 2 or 3, as DeepSpeed wants"
        )
    if look_up(given, "data_types.grad_accum_dtype") == "fp32":
        problem = f'is "fp32", and with {weights} gradients add up in bfloat16'
        raise FzeroError("data_types.grad_accum_dtype", problem, "give one of both")
    return torch.bfloat16


def _find_autocast(given: Values, compute: torch.dtype | None) -> torch.dtype | None:
    """The dtype of torch's autocast."""
    if not look_up(given, "torch_autocast.enabled"):
        return None
    if compute is not None:
        raise FzeroError("torch_autocast.enabled", f"is true, and compute is {compute}", "give one of both")
    name = look_up(given, "torch_autocast.dtype")
    if name not in ("bfloat16", "bf16", "torch.bfloat16"):
        raise FzeroError("torch_autocast.dtype", f"is {name!r}", 'give "bfloat16"; for float16 there is the block fp16')
    return torch.bfloat16


def find_spread(given: Values) -> StateSpread:
    """How state is spread over ranks: in groups (MiCS), of which those of several hosts gather in two hops if that is
    wanted; or over all ranks, of which each node has a second copy of weights (hpZ).

    Raises:
        FzeroError: at other stages than 3; for groups and a second copy; for weights that are quantized in two hops.
    """
    shard, copy = (_find_size(given, key, least) for key, least in ((GROUP, 1), (SECOND_COPY, 2)))
    hops, host = "zero_optimization.mics_hierarchical_params_gather", 1
    if shard is not None and copy is not None:
        raise FzeroError(SECOND_COPY, f"is {copy}, and {GROUP} is {shard}", "leave one of both out")
    if shard is not None and look_up(given, hops):
        host = _find_host_size()
    if shard is None or not 1 < host < shard:
        return StateSpread(shard, copy)
    if look_up(given, "zero_optimization.zero_quantized_weights"):
        problem = f"is true, and so is {hops}, with {GROUP} {shard} on hosts of {host} ranks"
        raise FzeroError("zero_optimization.zero_quantized_weights", problem, "leave one of both out")
    return StateSpread(shard, host)


def _find_host_size() -> int:
    """The ranks of a host, as torchrun says."""
    found = os.environ.get("LOCAL_WORLD_SIZE") or "1"
    if not found.isdecimal():
        way_out = "give the number of ranks on a host, as torchrun does, or leave it out"
        raise FzeroError("LOCAL_WORLD_SIZE", f"is {found!r} in the environment", way_out)
    return int(found)


def _find_size(given: Values, path: str, least: int) -> int | None:
    """A number of ranks at stage 3; None where the key asks for nothing."""
    size, stage = look_up(given, path), _find_stage(given)
    if size == "auto" or size < least:
        return None
    if stage != 3:
        problem = f"is {size} at stage {stage}, where DeepSpeed has no groups"
        raise FzeroError(path, problem, "give zero_optimization.stage 3")
    return int(size)


def _find_clipping(given: Values, version: str, rank: int) -> float:
    """The largest norm. What a missing key means depends on the version of DeepSpeed."""
    try:
        number = tuple(int(part) for part in version.split(".")[:2])
    except ValueError:
        raise FzeroError("version", f"is {version!r}", 'give one of DeepSpeed, such as "0.19"') from None
    value = given.get("gradient_clipping")
    if value is not None:
        return float(value)
    bound = 1.0 if number >= CLIPS_BY_DEFAULT else 0.0
    if rank == 0:
        text = 'gradient_clipping is missing, which is %s in DeepSpeed %s; write "gradient_clipping": 1.0, or 0'
        _log.warning(f"fzero.deepspeed: {text}", bound, version)
    return bound


def _find_place(given: Values, what: str, stage: int) -> Placement | None:
    """Where parameters, or optimizer state, lie."""
    path = f"zero_optimization.offload_{what}"
    device = look_up(given, f"{path}.device")
    if device == "none":
        return None
    needed = 3 if what == "param" else 1
    if stage < needed:
        problem = f'is "{device}" at stage {stage}, where DeepSpeed does not offload it'
        raise FzeroError(f"{path}.device", problem, f"give zero_optimization.stage {needed} or more")
    if device == "nvme":
        folder = look_up(given, f"{path}.nvme_path")
        if folder is None:
            raise FzeroError(f"{path}.nvme_path", 'is missing, and the device is "nvme"', "give a folder")
        return disk(folder)
    pin = given.get(f"{path}.pin_memory", given.get("zero_optimization.cpu_offload_use_pin_memory"))
    return Host(pin=True if pin is None else pin)


def _find_ratio(given: Values, stage: int) -> float:
    """How much of the optimizer state is offloaded."""
    path = "zero_optimization.offload_optimizer.ratio"
    ratio = look_up(given, path)
    if not 0 <= ratio <= 1:
        raise FzeroError(path, f"is {ratio}", "give a number from 0 to 1")
    if ratio != 1 and stage != 3:
        raise FzeroError(path, f"is {ratio} at stage {stage}", "give zero_optimization.stage 3, as DeepSpeed wants")
    return float(ratio)


def _quantizes(given: Values, what: str, stage: int) -> bool:
    """Whether ZeRO++ quantizes something, which it does at stage 3."""
    path = f"zero_optimization.zero_quantized_{what}"
    if look_up(given, path) and stage < 3:
        problem = f"is true at stage {stage}, where DeepSpeed does not quantize"
        raise FzeroError(path, problem, "give zero_optimization.stage 3")
    return bool(look_up(given, path))


def _find_algorithm(given: Values, what: str) -> tuple[str, dict[str, Any]] | None:
    """The type and the params of the optimizer, or of the scheduler."""
    kind, params = given.get(f"{what}.type"), given.get(f"{what}.params")
    if kind is None:
        if params:
            raise FzeroError(f"{what}.type", f"is missing, and {what}.params is given", "name the type")
        return None
    return kind, dict(params or {})


def _find_block(given: Values, name: str) -> dict[str, Any] | None:
    """The values of a block's keys, those that are missing among them; None unless the block is enabled."""
    if not look_up(given, f"{name}.enabled"):
        return None
    paths = [path for path in KEYS if path.startswith(f"{name}.")]
    return {path.removeprefix(f"{name}."): look_up(given, path) for path in paths}
