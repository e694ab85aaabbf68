"""DsConfig: the ds_config.json of `TrainingArguments.deepspeed`, with "auto" filled from the arguments.

`fzero.deepspeed` reads the file and says what its keys mean. What the arguments say as well must agree, as in
transformers' integration. The loop, data and logs are those of the Trainer: keys of DeepSpeed's own are refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import torch

from fzero.base.errors import FzeroError
from fzero.deepspeed.reading import Values, look_up, read_config
from fzero.deepspeed.schedulers import rate_at, schedule_groups
from fzero.deepspeed.settings import MONITORS, Settings, settle
from fzero.optim.kinds import Group

OF_ENGINE = {
    **{f"{name}.enabled": "give report_to of TrainingArguments" for name in MONITORS},
    "flops_profiler.enabled": "leave it out: trainer.state.total_flos counts operations",
    "wall_clock_breakdown": "leave it out: the logs have train_runtime",
}
"""Keys of DeepSpeed's own loop -> what to do instead."""


def read_deepspeed(args: Any) -> tuple[Values, Settings]:
    """`(values of keys, settings)` of `args.deepspeed`. The total of updates is not known yet: "auto" of a scheduler
    stays.

    Raises:
        FzeroError: as `fzero.deepspeed.initialize`; for a key that contradicts an argument; for a key of DeepSpeed's
            own loop.
    """
    config = args.deepspeed
    given = read_config(json.loads(config) if isinstance(config, str) and config.startswith("{") else config)
    if args.optim == "adafactor" and "optimizer.type" in given:
        problem = f"is {given['optimizer.type']!r}, and TrainingArguments.optim is 'adafactor'"
        raise FzeroError("deepspeed: optimizer.type", problem, "give one of both")
    batch = args.per_device_train_batch_size
    steps = args.gradient_accumulation_steps
    fill(given, [
        ("train_micro_batch_size_per_gpu", batch, "per_device_train_batch_size"),
        ("gradient_accumulation_steps", steps, "gradient_accumulation_steps"),
        ("train_batch_size", args.world_size * batch * steps, "train_batch_size (calculated)"),
        ("gradient_clipping", args.max_grad_norm, "max_grad_norm"),
        ("optimizer.params.lr", args.learning_rate, "learning_rate"),
        ("optimizer.params.betas", [args.adam_beta1, args.adam_beta2], "adam_beta1+adam_beta2"),
        ("optimizer.params.eps", args.adam_epsilon, "adam_epsilon"),
        ("optimizer.params.weight_decay", args.weight_decay, "weight_decay"),
        ("scheduler.params.warmup_max_lr", args.learning_rate, "learning_rate"),
        ("fp16.enabled", args.fp16 or args.fp16_full_eval, "fp16|fp16_full_eval"),
        ("bf16.enabled", args.bf16 or args.bf16_full_eval, "bf16|bf16_full_eval"),
    ])  # fmt: skip
    params = given.get("scheduler.params") or {}
    if params.get("warmup_min_lr") == "auto":
        given["scheduler.params"] = {**params, "warmup_min_lr": 0}
    for path, way_out in OF_ENGINE.items():
        if look_up(given, path):
            raise FzeroError(f"deepspeed: {path}", "is true, and the loop is that of the Trainer", way_out)
    if given.get("dataloader_drop_last") not in (None, args.dataloader_drop_last):
        problem = f"is true, and TrainingArguments.dataloader_drop_last is {args.dataloader_drop_last}"
        raise FzeroError("deepspeed: dataloader_drop_last", problem, "give dataloader_drop_last=True")
    sizes = {"train_micro_batch_size_per_gpu": batch, "gradient_accumulation_steps": steps, "gradient_clipping": 0.0}
    known = {**given, **sizes, "train_batch_size": args.world_size * batch * steps}
    settings = settle({path: x for path, x in known.items() if not path.startswith("scheduler.")}, args.world_size)
    if not settings.counts_batches:
        problem = "is false, and the Trainer updates behind gradient_accumulation_steps batches"
        raise FzeroError("deepspeed: managed_gradient_accumulation", problem, "leave it out")
    if look_up(given, "gradient_allreduce_op") == "sum":
        raise FzeroError("deepspeed: gradient_allreduce_op", 'is "sum"', 'give "mean", or leave it out')
    return given, settings


def fill(given: Values, told: list[tuple[str, Any, str]]) -> None:
    """Replace each "auto" by what the arguments tell, in `given`. `told` has key, value and the argument's name.

    Raises:
        FzeroError: with all keys whose values are not those of the arguments.
    """
    differing = []
    for path, value, name in told:
        block, _, key = path.rpartition(".params.")
        held = given.get(f"{block}.params") or {} if block else given
        found = held.get(key if block else path)
        if found == "auto":
            if block:
                given[f"{block}.params"] = {**held, key: value}
            else:
                given[path] = value
        elif found is not None and found != value:
            differing.append(f"ds {path}={found} vs hf {name}={value}")
    if differing:
        way_out = 'give "auto" in the ds_config, which takes the value of TrainingArguments'
        raise FzeroError("deepspeed", f"says something else than TrainingArguments: {'; '.join(differing)}", way_out)


class Schedule(torch.optim.lr_scheduler.LRScheduler):
    """The scheduler of a ds_config for the rates of groups."""

    def __init__(self, optimizer: Any, scheduled: list[dict[str, Any]]) -> None:
        self._scheduled = scheduled
        super().__init__(optimizer)

    def get_lr(self) -> list[float | torch.Tensor]:
        return [rate_at(each, self.last_epoch) for each in self._scheduled]

    def state_dict(self) -> dict[str, Any]:
        return {"last_epoch": self.last_epoch, "_last_lr": self._last_lr}


def make_schedule(args: Any, given: Values, groups: list[Group], optimizer: Any, updates: int) -> Schedule:
    """The scheduler of a ds_config for a run of so many updates.

    Raises:
        FzeroError: as `fzero.deepspeed.initialize`; for a scheduler that moves more than rates.
    """
    given = dict(given)
    warmup = max(1, args.get_warmup_steps(updates))
    fill(given, [
        ("scheduler.params.total_num_steps", updates, "num_training_steps (calculated)"),
        ("scheduler.params.warmup_num_steps", warmup, "warmup_steps"),
    ])  # fmt: skip
    kind, params = given["scheduler.type"], given.get("scheduler.params") or {}
    scheduled = schedule_groups(groups, (kind, params))
    if moved := sorted({name for each in scheduled for name in each} - {"learning_rate"}):
        way_out = 'give "cycle_momentum": false'
        raise FzeroError("deepspeed: scheduler.params", f"{kind} moves {moved}, and here rates alone move", way_out)
    return Schedule(optimizer, scheduled)


def list_held_groups(groups: list[Group], parameters: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The groups of an optimizer that holds the rates of `groups`. `parameters` are those that train, by name."""
    for group in groups:
        paths = parameters.keys() if group.paths is None else group.paths & parameters.keys()
        yield {"params": [parameters[path] for path in parameters if path in paths], "lr": group.rate}
