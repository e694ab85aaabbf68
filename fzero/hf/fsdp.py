"""Fsdp: `fsdp`, `fsdp_config` and `parallelism_config` of TrainingArguments as a stage, a place and axes of a mesh."""

from __future__ import annotations

import difflib
import os
from typing import Any, NamedTuple

from fzero.base.errors import FzeroError
from fzero.base.mesh import SHARD_AXIS

_STAGES = {"true": 3, "full_shard": 3, "false": 2, "shard_grad_op": 2, "no_shard": 0}
_STAGES |= {"hybrid_shard": 3, "hybrid_shard_zero2": 2, "_hybrid_shard_zero2": 2}
_NUMBERS = {str(number): name for number, name in enumerate(
    ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2"), 1
)}  # fmt: skip
KEYS: dict[str, tuple[str, str]] = {
    "version": ("no meaning", "both versions of FSDP mean the same slices"),
    "reshard_after_forward": (
        "mapped",
        "true, full_shard: stage 3; false, shard_grad_op: 2; no_shard: 0; hybrid_shard: slices of a host's ranks",
    ),
    "cpu_offload": ("mapped", "parameters and optimizer state at `fzero.host()`"),
    "activation_checkpointing": ("mapped", "to activation_checkpointing of TrainingArguments"),
    "auto_wrap_policy": ("no meaning", "each layer is a bucket of its own"),
    "transformer_layer_cls_to_wrap": ("no meaning", "each layer is a bucket of its own"),
    "min_num_params": ("no meaning", "each layer is a bucket of its own"),
    "state_dict_type": ("no meaning", "each rank writes its part of the files of save_pretrained"),
    "cpu_ram_efficient_loading": ("no meaning", "fzero.hf.from_pretrained makes a model that no rank holds whole"),
    "sync_module_states": ("no meaning", "values are those of rank 0"),
    "use_orig_params": ("no meaning", "parameters keep their names"),
    "forward_prefetch": ("no meaning", "transfers are scheduled by cost"),
    "backward_prefetch": ("no meaning", "transfers are scheduled by cost"),
    "limit_all_gathers": ("no meaning", "transfers are scheduled by cost"),
    "xla": ("refused", "there is no XLA"),
    "xla_fsdp_v2": ("refused", "there is no XLA"),
    "xla_fsdp_grad_ckpt": ("refused", "there is no XLA"),
    "xla_fsdp_settings": ("refused", "there is no XLA"),
}
"""Key of fsdp_config -> its meaning, and a note."""


class Fsdp(NamedTuple):
    """What `fsdp_config` asks for."""

    stage: int
    offloads: bool
    is_checkpointed: bool  # each layer
    shard: int | None  # how many ranks state lies along; None for all


def read_fsdp(args: Any) -> Fsdp:
    """The meaning of `fsdp_config`, as TrainingArguments keep it.

    Raises:
        FzeroError: for a key or a value that FSDP does not have, and for one that is refused.
    """
    config: dict[str, Any] = args.fsdp_config or {}
    for name, value in config.items():
        if name not in KEYS:
            near = difflib.get_close_matches(name, KEYS, 1, 0)
            raise FzeroError(f"fsdp_config: {name}", "is no key of fsdp_config", f"the nearest one is {near[0]}")
        if KEYS[name][0] == "refused" and value:
            raise FzeroError(f"fsdp_config: {name}", f"is {value!r:.80}, which is not supported", "leave it out")
    name = str(config.get("reshard_after_forward", True)).lower()
    name = _NUMBERS.get(name, name)
    if name not in _STAGES:
        known = "give true, false, full_shard, shard_grad_op, no_shard, hybrid_shard or hybrid_shard_zero2"
        raise FzeroError("fsdp_config: reshard_after_forward", f"is {name!r}", known)
    is_checkpointed = _is_true(config.get("activation_checkpointing", False))
    if is_checkpointed and args.activation_checkpointing:
        problem = "is true, and TrainingArguments.activation_checkpointing is True"
        raise FzeroError("fsdp_config: activation_checkpointing", problem, "give one of both")
    shard = int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if "hybrid" in name else None
    return Fsdp(_STAGES[name], _is_true(config.get("cpu_offload", False)), is_checkpointed, shard)


def _is_true(value: Any) -> bool:
    return str(value).lower() in ("true", "1", "yes")


def read_parallelism(config: Any, world: int) -> dict[str, int]:
    """The axes of a mesh of `world` ranks and their sizes, for accelerate's ParallelismConfig.

    Raises:
        FzeroError: for an axis that there is not, and for sizes that are not those of the ranks.
    """
    for axis, way_out in (
        ("tp", 'leave it out, and give fzero.hf.Trainer mesh= and tp="tp": docs/hf_parallel.md'),
        ("cp", 'leave it out, and give fzero.hf.Trainer mesh= and sp="sp": docs/hf_parallel.md'),
        ("sp", 'leave it out, and give fzero.hf.Trainer mesh= and sp="sp": docs/hf_parallel.md'),
    ):
        size = getattr(config, f"{axis}_size", None) or 1
        if size > 1:
            raise FzeroError(f"parallelism_config: {axis}_size", f"is {size}, which is not supported", way_out)
    replicas, shards = config.dp_replicate_size or 1, config.dp_shard_size or 1
    if replicas * shards != world:
        problem = f"has {replicas} replicas of {shards} ranks, and there are {world} ranks"
        raise FzeroError("parallelism_config", problem, f"give dp_replicate_size times dp_shard_size of {world}")
    return {SHARD_AXIS: shards} if replicas == 1 else {"replica": replicas, SHARD_AXIS: shards}
