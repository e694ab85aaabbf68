"""Alike: what all ranks of a Trainer must have alike, as lines that ranks compare. The first that differs is named."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import transformers
from torch import nn

from fzero.hf.arguments import OF_A_RANK
from fzero.ranks.agreement import digest

FUNCTIONS = ("compute_loss_func", "compute_metrics", "preprocess_logits_for_metrics", "model_init")
"""The functions of a Trainer that decide what ranks compute and gather."""
PLACES = ("_name_or_path", "name_or_path")
"""The keys of a model's configuration that say where its files lie on a rank."""
CONTROL = ("should_training_stop", "should_epoch_stop", "should_log", "should_evaluate", "should_save")


def list_arguments(args: Any) -> Iterator[str]:
    """A line for each of the TrainingArguments that changes what ranks do together. The fields of a subclass of the
    user's are his own."""
    for field in dataclasses.fields(transformers.Seq2SeqTrainingArguments):
        if field.name not in OF_A_RANK and hasattr(args, field.name):
            yield f"configuration TrainingArguments.{field.name}: {describe(getattr(args, field.name))}"
    yield f"configuration of accelerate: mixed_precision {getattr(args, 'mixed_precision', 'no')}"


def list_model(model: nn.Module) -> Iterator[str]:
    """A line for each key of the configuration, and for each parameter and buffer. Values are those of rank 0."""
    yield f"configuration of the model: {type(model).__name__}"
    config = getattr(model, "config", None)
    keys = config.to_dict() if isinstance(config, transformers.PretrainedConfig) else {}
    for name, value in sorted(keys.items()):
        if name not in PLACES:
            yield f"configuration of the model, {name}: {describe(value)}"
    for path, x in (*model.named_parameters(), *model.named_buffers()):
        yield f"leaf {path}: {x.dtype} {list(x.shape)}{', trained' if x.requires_grad else ''}"


def list_functions(trainer: Any) -> Iterator[str]:
    """A line for each argument of the Trainer itself that some ranks may have and others not."""
    for name in FUNCTIONS:
        yield f"configuration {name}: {'None' if getattr(trainer, name) is None else 'a function'}"
    yield f"configuration label_names: {trainer.label_names}"
    yield f"configuration lr_scheduler: {type(trainer.lr_scheduler).__name__}"


def list_data(name: str, dataset: Any) -> Iterator[str]:
    """A line for each data set and its length."""
    if isinstance(dataset, dict):
        for key in dataset:
            yield from list_data(f"{name}[{key!r}]", dataset[key])
        return
    try:
        length = "None" if dataset is None else f"{len(dataset)} rows"
    except (TypeError, NotImplementedError):  # of a stream
        length = "of no length"
    yield f"data {name}: {length}"


def list_order(loader: Any) -> Iterator[str]:
    """A line for the order of the rows. A rank takes its part of a permutation that each rank draws for itself."""
    sampler: Any = getattr(loader, "batch_sampler", None)
    while hasattr(sampler, "batch_sampler"):  # each of accelerate's takes batches of another
        sampler = sampler.batch_sampler
    sampler = getattr(sampler, "sampler", None)
    seed, generator = getattr(sampler, "initial_seed", None), getattr(sampler, "generator", None)
    synchronized = getattr(loader, "synchronized_generator", None)  # to which accelerate gives the state of rank 0
    order = "as given"
    if isinstance(seed, int):
        order = f"of seed {seed}, which is data_seed, or torch's seed when train was called"
    elif hasattr(sampler, "generator") and (generator is None or generator is not synchronized):
        state = torch.get_rng_state() if generator is None else generator.get_state()
        order = f"of random state {digest([str(state.tolist())]):x}"
    yield f"data of an epoch, {type(sampler).__name__}: rows {order}"


def list_progress(trainer: Any, numbers: Mapping[str, Any]) -> Iterator[str]:
    """A line for each number that says where a run is, and how long it is."""
    yield f"data of an epoch: begins behind update {trainer.state.global_step} of {trainer.state.max_steps}"
    for name, number in numbers.items():
        if isinstance(number, int):
            yield f"data of an epoch, {name}: {number}"


def list_control(control: Any) -> Iterator[str]:
    """A line for each wish of the callbacks."""
    for name in CONTROL:
        yield f"control {name}: {getattr(control, name)}"


def describe_batches(batches: list[Any]) -> str:
    """A line for the batches of an update: their number, and the names and dims of what is in them."""
    return f"data of an update: {len(batches)} batches of {'; '.join(dict.fromkeys(map(_describe_batch, batches)))}"


def _describe_batch(batch: Any) -> str:
    if not isinstance(batch, Mapping):
        return type(batch).__name__
    dims = {name: f"{x.ndim} dims" if isinstance(x, torch.Tensor) else type(x).__name__ for name, x in batch.items()}
    return ", ".join(f"{name} of {what}" for name, what in sorted(dims.items()))


def describe(value: Any) -> str:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    if isinstance(value, transformers.GenerationConfig):
        value = value.to_dict()
    return repr(dict(sorted(value.items(), key=str)) if isinstance(value, dict) else value)
