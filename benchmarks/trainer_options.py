"""Options: each option of TrainingArguments in `fzero.hf.Trainer` beside transformers' Trainer, on one rank.

    python benchmarks/trainer_options.py                       all options, two minutes
    python benchmarks/trainer_options.py save_strategy optim   those whose name has one of the words

Prints "same" where all logs but times, and the names of checkpoints, are equal to 1e-5; an error where both raise it.
"""

from __future__ import annotations

import contextlib
import io
import sys
import tempfile
from pathlib import Path
from typing import Any

import transformers
from transformers.trainer_utils import SchedulerType

import fzero.hf
from fzero import VirtualMesh

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from hf_models import make_arguments, make_dataset, make_model

TIMES = ("runtime", "per_second", "preparation_time", "mem_")
EVALUATE = {"eval_strategy": "steps", "eval_steps": 1}
SAVE = {"save_strategy": "steps", "save_steps": 2}
WORKERS = {"dataloader_num_workers": 1}
OPTIONS: dict[str, dict[str, Any]] = {
    "accelerator_config: non_blocking": {"accelerator_config": {"non_blocking": True}},
    "accelerator_config: sync_each_batch": {
        "accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
    },
    "adam_beta1, adam_beta2, adam_epsilon": {"adam_beta1": 0.8, "adam_beta2": 0.9, "adam_epsilon": 1e-3},
    "batch_eval_metrics": {"batch_eval_metrics": True, **EVALUATE},
    "data_seed": {"data_seed": 5},
    "dataloader_drop_last": {"dataloader_drop_last": True, "max_steps": -1, "num_train_epochs": 1},
    "dataloader_in_order": {"dataloader_in_order": False, **WORKERS},
    "dataloader_multiprocessing_context": {"dataloader_multiprocessing_context": "fork", **WORKERS},
    "dataloader_persistent_workers": {"dataloader_persistent_workers": True, **WORKERS},
    "dataloader_prefetch_factor": {"dataloader_prefetch_factor": 2, **WORKERS},
    "enable_jit_checkpoint": {"enable_jit_checkpoint": True},
    "eval_delay": {"eval_delay": 2, **EVALUATE},
    "eval_use_gather_object": {"eval_use_gather_object": True, **EVALUATE},
    "fsdp_config": {"fsdp_config": {"min_num_params": 3}},
    "full_determinism": {"full_determinism": True},
    "gradient_checkpointing": {"gradient_checkpointing": True},
    "ignore_data_skip, resumed": {"ignore_data_skip": True, **SAVE},
    "include_num_input_tokens_seen": {"include_num_input_tokens_seen": "non_padding"},
    "liger_kernel_config": {"liger_kernel_config": {"rope": True}},
    "logging_first_step": {"logging_first_step": True, "logging_steps": 2},
    "logging_nan_inf_filter": {"logging_nan_inf_filter": False},
    "logging_strategy": {"logging_strategy": "epoch"},
    "optim": {"optim": "adamw_torch"},
    "optim_args": {"optim": "adamw_torch", "optim_args": "amsgrad=True"},
    "optim_target_modules": {"optim_target_modules": ["lm_head"]},
    "prediction_loss_only": {"prediction_loss_only": True, **EVALUATE},
    "restore_callback_states_from_checkpoint, resumed": {"restore_callback_states_from_checkpoint": True, **SAVE},
    "resume_from_checkpoint": {"resume_from_checkpoint": "nowhere"},
    "save_only_model": {"save_only_model": True, **SAVE},
    "save_strategy": {**EVALUATE, "save_strategy": "best", "metric_for_best_model": "loss", "greater_is_better": False},
    "save_total_limit": {**SAVE, "save_steps": 1, "save_total_limit": 2},
    "skip_memory_metrics": {"skip_memory_metrics": False},
    "tf32": {"tf32": False},
    "torch_empty_cache_steps": {"torch_empty_cache_steps": 1},
    "use_cache": {"use_cache": True, **EVALUATE},
    "warmup_steps": {"warmup_steps": 0.5},
}
"""What is compared -> the arguments. "resumed" goes on from the checkpoint of the second update."""
SCHEDULES: dict[str, dict[str, Any]] = {
    "cosine_with_min_lr": {"lr_scheduler_kwargs": {"min_lr": 1e-5}},
    "cosine_warmup_with_min_lr": {"lr_scheduler_kwargs": {"min_lr": 1e-5}},
    "warmup_stable_decay": {"lr_scheduler_kwargs": {"num_decay_steps": 1}},
    "reduce_lr_on_plateau": EVALUATE,
    "greedy": EVALUATE,
}
for kind in SchedulerType:
    changed = {"lr_scheduler_type": kind.value, **SCHEDULES.get(kind.value, {})}
    OPTIONS[f"lr_scheduler_type: {kind.value}"] = changed


class Measure:
    """A metric that sums over batches."""

    def __init__(self) -> None:
        self.sum = 0.0

    def __call__(self, evaluation: Any, compute_result: bool = True) -> dict[str, float]:
        self.sum += float(evaluation.predictions.sum())
        return {"sum": self.sum} if compute_result else {}


def train(cls: Any, name: str, folder: Path, **mesh: Any) -> Any:
    """Logs without times, and the names of checkpoints; the error where there is one."""
    changed = {"gradient_accumulation_steps": 1, "max_steps": 3, **OPTIONS[name]}
    metrics = {"compute_metrics": Measure()} if "metrics" in name else {}
    try:
        for resume in (None, str(folder / "checkpoint-2")) if "resumed" in name else (None,):
            data = {"train_dataset": make_dataset(), "eval_dataset": make_dataset(8)}
            trainer = cls(make_model(), make_arguments(folder, **changed), **data, **metrics, **mesh)
            trainer.train(resume_from_checkpoint=resume)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    logs = [
        {key: x for key, x in each.items() if not any(word in key for word in TIMES)}
        for each in trainer.state.log_history
    ]
    return logs, sorted(path.name for path in folder.glob("checkpoint*"))


def is_close(got: Any, expected: Any) -> bool:
    """Whether two trees of dicts and lists are equal, numbers to 1e-5."""
    if isinstance(expected, dict):
        return got.keys() == expected.keys() and all(is_close(got[key], x) for key, x in expected.items())
    if isinstance(expected, (list, tuple)):
        return len(got) == len(expected) and all(map(is_close, got, expected))
    if isinstance(expected, float):
        return abs(got - expected) <= 1e-5 * max(1.0, abs(expected))
    return bool(got == expected)


def main() -> None:
    transformers.logging.set_verbosity_error()
    words = sys.argv[1:]
    for name in OPTIONS:
        if words and not any(word in name for word in words):
            continue
        found = []
        for cls, mesh in ((transformers.Trainer, {}), (fzero.hf.Trainer, {"mesh": VirtualMesh(fsdp=1)})):
            with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
                found.append(train(cls, name, Path(folder), **mesh))
        expected, got = found
        is_same = type(got) is type(expected) and is_close(got, expected)
        verdict = "same" if is_same else f"DIFFERENT: {got!r:.200}, transformers: {expected!r:.200}:"
        print(f"both raise {got}:" if is_same and isinstance(got, str) else verdict, name, flush=True)


if __name__ == "__main__":
    main()
