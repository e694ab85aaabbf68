"""TrainingArguments, one by one, on two virtual ranks: the logs are those of transformers' Trainer."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate")  # without which transformers has no Trainer

import torch
import transformers
from hf_models import make_arguments, make_dataset, make_model, make_ragged_dataset, pad_rows
from transformers.trainer_utils import SchedulerType

import fzero.hf
from fzero import VirtualMesh

TIMES = ("runtime", "per_second", "preparation_time")
SHORT = {"gradient_accumulation_steps": 1, "max_steps": 3}
EVALUATE = {"eval_strategy": "steps", "eval_steps": 1}
RAGGED = {"train_dataset": make_ragged_dataset(18), "eval_dataset": make_ragged_dataset(8), "data_collator": pad_rows}


def train(cls: Any, folder: Path, changed: dict[str, Any], kind: str = "bigram", **named: Any) -> Any:
    data = {"train_dataset": make_dataset(), "eval_dataset": make_dataset(8), **named}
    trainer = cls(make_model(kind), make_arguments(folder, **{**SHORT, **changed}), **data)
    trainer.train()
    return trainer


def read_all_logs(trainer: Any) -> list[dict[str, Any]]:
    return [{k: v for k, v in entry.items() if not k.endswith(TIMES)} for entry in trainer.state.log_history]


def assert_same(folder: Path, changed: dict[str, Any], **named: Any) -> Any:
    plain = {**changed, **named.pop("plain", {})}
    expected = train(transformers.Trainer, folder / "theirs", plain, **named)
    got = train(fzero.hf.Trainer, folder / "ours", changed, **named, mesh=VirtualMesh(fsdp=2))
    for ours, theirs in zip(read_all_logs(got), read_all_logs(expected), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-5)
    return got


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "accelerator_config: split_batches": ({"accelerator_config": {"split_batches": True}}, {}),
    "accelerator_config: sync_each_batch": (
        {"accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}}}, {},
    ),
    "activation_checkpointing_kwargs": (
        {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": False}},
        {"kind": "llama"},
    ),
    "activation_checkpointing_kwargs: reentrant": (
        {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": True}},
        {"kind": "llama"},
    ),
    "activation_checkpointing_kwargs: every_n_layers": (
        {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"every_n_layers": 2}},
        {"kind": "llama"},
    ),
    "adam_beta1, adam_beta2, adam_epsilon": ({"adam_beta1": 0.8, "adam_beta2": 0.9, "adam_epsilon": 1e-3}, {}),
    "average_tokens_across_devices": ({"average_tokens_across_devices": False}, {"kind": "gpt2"}),
    "data_seed": ({"data_seed": 5}, {}),
    "dataloader_drop_last": ({"dataloader_drop_last": True, "max_steps": -1, "num_train_epochs": 1}, {}),
    "eval_delay": ({"eval_delay": 2, **EVALUATE}, {}),
    "include_num_input_tokens_seen: all": ({"include_num_input_tokens_seen": "all"}, RAGGED),
    "include_num_input_tokens_seen: non_padding": ({"include_num_input_tokens_seen": "non_padding"}, {}),
    "label_smoothing_factor": ({"label_smoothing_factor": 0.2, **EVALUATE}, {"kind": "gpt2"}),
    "logging_first_step": ({"logging_first_step": True, "logging_steps": 2}, {}),
    "max_grad_norm": ({"max_grad_norm": 0.1}, {}),
    "optim_args": ({"optim": "adamw_torch", "optim_args": "amsgrad=True"}, {}),
    "torch_compile_mode": (  # plain torch traces, and does not write C++ for a minute
        {"torch_compile_mode": "default"}, {"plain": {"torch_compile_backend": "eager"}},
    ),
    "train_sampling_strategy: group_by_length": ({"train_sampling_strategy": "group_by_length"}, RAGGED),
    "train_sampling_strategy: sequential": ({"train_sampling_strategy": "sequential"}, {}),
    "warmup_steps: a ratio": ({"warmup_steps": 0.5}, {}),
    "weight_decay": ({"weight_decay": 0.5}, {"kind": "llama"}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_an_argument_means_the_same(case: str, tmp_path: Path) -> None:
    changed, named = CASES[case]
    assert_same(tmp_path, changed, **named)


KWARGS: dict[str, dict[str, Any]] = {
    "cosine_with_restarts": {"lr_scheduler_kwargs": {"num_cycles": 2}},
    "cosine_with_min_lr": {"lr_scheduler_kwargs": {"min_lr": 1e-5}},
    "cosine_warmup_with_min_lr": {"lr_scheduler_kwargs": {"min_lr": 1e-5}},
    "polynomial": {"lr_scheduler_kwargs": {"power": 2.0}},
    "warmup_stable_decay": {"lr_scheduler_kwargs": {"num_decay_steps": 1}},
    "reduce_lr_on_plateau": {"lr_scheduler_kwargs": {"factor": 0.5, "patience": 0}, **EVALUATE, "learning_rate": 0.3},
    "greedy": {"lr_scheduler_kwargs": {"patience": 1}, **EVALUATE},
}


@pytest.mark.parametrize("kind", [each.value for each in SchedulerType])
def test_a_schedule_and_its_arguments_mean_the_same(kind: str, tmp_path: Path) -> None:
    changed = {"lr_scheduler_type": kind, "warmup_steps": 1, "max_steps": 4, "optim": "sgd", **KWARGS.get(kind, {})}
    got = assert_same(tmp_path, changed)
    assert (
        len({entry["learning_rate"] for entry in got.state.log_history if "loss" in entry}) > (kind == "constant") * 0
    )


# noise of embeddings


def add_bound(module: Any, inputs: Any, output: Any) -> Any:
    """NEFTune's hook of transformers with the largest noise that it draws."""
    if module.training:
        output = output + module.neftune_noise_alpha / (output.size(1) * output.size(2)) ** 0.5
    return output


def test_noise_has_the_bound_of_transformers_in_training_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.integrations.neftune.neftune_post_forward_hook", add_bound)
    got = assert_same(tmp_path, {"neftune_noise_alpha": 5.0, **EVALUATE}, kind="llama")
    plain = train(fzero.hf.Trainer, tmp_path, EVALUATE, kind="llama", mesh=VirtualMesh(fsdp=2))
    assert read_all_logs(got)[0]["loss"] != pytest.approx(read_all_logs(plain)[0]["loss"], rel=1e-4)


def test_noise_is_drawn_anew_at_each_batch_and_is_that_of_the_seed(tmp_path: Path) -> None:
    rows = [make_dataset()[0]] * 24
    changed = {"neftune_noise_alpha": 50.0, "learning_rate": 0.0, "weight_decay": 0.0}
    first, again = (
        train(fzero.hf.Trainer, tmp_path, changed, "llama", train_dataset=rows, mesh=VirtualMesh(fsdp=2))
        for _ in range(2)
    )
    losses = [entry["loss"] for entry in first.state.log_history if "loss" in entry]
    assert len(set(losses)) == len(losses)
    assert losses == [entry["loss"] for entry in again.state.log_history if "loss" in entry]


# the Hub, reports and help


class Seen(transformers.TrainerCallback):
    """A report: what is logged."""

    def __init__(self) -> None:
        self.logs: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **named: Any) -> None:
        self.logs.append(dict(logs))


def test_memory_is_counted_in_a_thread_while_a_step_is_traced(tmp_path: Path) -> None:
    pytest.importorskip("psutil")
    changed = {"skip_memory_metrics": False, "max_steps": 1}
    metrics = train(fzero.hf.Trainer, tmp_path, changed, mesh=VirtualMesh(fsdp=2)).evaluate()
    assert {key for key in metrics if "mem_" in key} == {"eval_mem_cpu_alloc_delta", "eval_mem_cpu_peaked_delta"}


def test_reports_get_what_transformers_reports(tmp_path: Path) -> None:
    theirs, ours = Seen(), Seen()
    train(transformers.Trainer, tmp_path, {}, callbacks=[theirs])
    train(fzero.hf.Trainer, tmp_path, {}, callbacks=[ours], mesh=VirtualMesh(fsdp=2))
    assert [entry.keys() for entry in ours.logs] == [entry.keys() for entry in theirs.logs]


def test_push_to_hub_uploads_the_files_of_save_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uploads: list[tuple[str, list[str]]] = []

    class Repository:
        repo_id = "me/model"
        url = "https://hub/me/model"

    def upload(repo_id: str, folder_path: Any, **named: Any) -> Any:
        uploads.append((repo_id, sorted(path.name for path in Path(folder_path).iterdir())))

    monkeypatch.setattr("huggingface_hub.HfApi.create_repo", lambda *args, **named: Repository())
    monkeypatch.setattr("huggingface_hub.HfApi.upload_folder", lambda self, **named: upload(**named))
    for name, function in (("create_repo", lambda *args, **named: Repository()), ("upload_folder", upload)):
        monkeypatch.setattr(f"transformers.trainer.{name}", function, raising=False)  # of releases before 5.24
    arguments = make_arguments(tmp_path, **SHORT, push_to_hub=True, hub_model_id="me/model", hub_token="token")
    trainer = fzero.hf.Trainer(make_model(), arguments, train_dataset=make_dataset(), mesh=VirtualMesh(fsdp=2))
    trainer.train()
    trainer.save_model()
    assert uploads
    for repo_id, names in uploads:
        assert repo_id == "me/model" and {"config.json", "model.safetensors"} <= set(names)


def test_help_shows_the_arguments_of_transformers() -> None:
    theirs = list(inspect.signature(transformers.Trainer).parameters)
    for cls in (fzero.hf.Trainer, fzero.hf.Seq2SeqTrainer):
        ours = "mesh", "stage", "quantize", "tp", "ep", "sp", "plan", "capacity"
        assert list(inspect.signature(cls).parameters) == [*theirs, *ours]


def test_an_optimizer_class_and_its_keywords_mean_the_same(tmp_path: Path) -> None:
    assert_same(tmp_path, {}, optimizer_cls_and_kwargs=(torch.optim.SGD, {"lr": 0.5, "momentum": 0.9}))
