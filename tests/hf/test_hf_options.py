"""Options of transformers' Trainer: each means the same for fzero's, or is refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate")  # without which transformers has no Trainer

import torch
import transformers
from hf_models import make_arguments, make_dataset, make_model, make_ragged_dataset, pad_rows
from torch import Tensor, nn
from torch.utils.data import IterableDataset
from transformers import EarlyStoppingCallback

import fzero.hf
from fzero import FzeroError, VirtualMesh


class Stream(IterableDataset):  # type: ignore[type-arg]
    """Rows without a length."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(make_dataset())


def measure(evaluation: Any) -> dict[str, float]:
    return {"mean": float(evaluation.predictions.mean()), "inputs": float(evaluation.inputs.sum())}


def count_hits(logits: Tensor, labels: Tensor) -> Tensor:
    return (logits.argmax(-1) == labels).float()


def compute_cross_entropy(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    return (
        nn.functional.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten(), reduction="sum")
        / num_items_in_batch
    )


def read_all_logs(trainer: Any) -> list[dict[str, float]]:
    """All that was logged, but for times."""
    times = ("runtime", "per_second", "preparation_time")
    return [{k: v for k, v in entry.items() if not k.endswith(times)} for entry in trainer.state.log_history]


def list_checkpoints(trainer: Any) -> list[str]:
    return sorted(path.name for path in Path(trainer.args.output_dir).glob("checkpoint-*"))


def train(cls: Any, folder: Path, changed: dict[str, Any], **named: Any) -> Any:
    data = {"train_dataset": make_dataset(), "eval_dataset": make_dataset(8), **named}
    if not {"model", "model_init"} & set(data):
        data["model"] = make_model()
    trainer = cls(args=make_arguments(folder, **changed), **data)
    trainer.train()
    return trainer


def assert_equal(got: Any, expected: Any) -> None:
    for ours, theirs in zip(read_all_logs(got), read_all_logs(expected), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-5)
    assert got.state.best_global_step == expected.state.best_global_step
    assert list_checkpoints(got) == list_checkpoints(expected)


EACH_STEP = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
CASES: dict[str, dict[str, Any]] = {
    "a stream, metrics of some logits and of inputs, in parts": {
        "changed": {
            "eval_strategy": "steps", "eval_steps": 3, "per_device_eval_batch_size": 2, "eval_accumulation_steps": 1,
            "include_for_metrics": ["inputs"], "include_num_input_tokens_seen": "all", "label_names": ["labels"],
            "remove_unused_columns": False, "optim": "adagrad", "gradient_accumulation_steps": 1, "max_steps": 3,
        },
        "train_dataset": Stream(), "compute_metrics": measure, "preprocess_logits_for_metrics": count_hits,
    },
    "stops early, keeps the best": {
        "changed": {
            **EACH_STEP, "learning_rate": 0.1, "max_steps": 8, "load_best_model_at_end": True, "save_total_limit": 1,
            "gradient_accumulation_steps": 1,
            "lr_scheduler_type": "reduce_lr_on_plateau", "warmup_steps": 0,
        },
        "callbacks": [EarlyStoppingCallback(2)],
    },
    "rows grouped by length, a last batch of two": {
        "changed": {
            "train_sampling_strategy": "group_by_length", "max_steps": -1, "num_train_epochs": 1, "optim": "rmsprop",
            "eval_on_start": True, "average_tokens_across_devices": False, "max_grad_norm": 0.0,
            "gradient_accumulation_steps": 1,
        },
        "train_dataset": make_ragged_dataset(18), "eval_dataset": make_ragged_dataset(8), "data_collator": pad_rows,
        "compute_loss_func": compute_cross_entropy,
    },
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_options_mean_the_same(case: str, tmp_path: Path) -> None:
    expected = train(transformers.Trainer, tmp_path / "theirs", **CASES[case])
    got = train(fzero.hf.Trainer, tmp_path / "ours", **CASES[case], mesh=VirtualMesh(fsdp=2))
    assert_equal(got, expected)


BOTH: tuple[Any, ...] = (
    ("theirs", transformers.Trainer, {}),
    ("ours", fzero.hf.Trainer, {"mesh": VirtualMesh(fsdp=2)}),
)


def test_a_model_of_model_init_goes_on_from_a_checkpoint_and_trains_twice(tmp_path: Path) -> None:
    trainers = []
    for name, cls, mesh in BOTH:
        changed = {"max_steps": 2, "gradient_accumulation_steps": 1, "save_strategy": "steps", "save_steps": 1}
        trainer = train(cls, tmp_path / name, changed, model_init=lambda: make_model("bigram"), **mesh)
        trainer.train(resume_from_checkpoint=str(tmp_path / name / "checkpoint-1"))
        trainers.append(trainer)
    assert_equal(trainers[1], trainers[0])


def test_a_given_optimizer_and_its_schedule_mean_the_same(tmp_path: Path) -> None:
    trainers = []
    for name, cls, mesh in BOTH:
        model = make_model("bigram")
        bias = [x for x in model.parameters() if x.ndim == 1]
        others = [x for x in model.parameters() if x.ndim > 1]
        optimizer = torch.optim.SGD([{"params": bias, "lr": 0.1}, {"params": others}], lr=0.5, momentum=0.9)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        changed = {"max_steps": 3, "gradient_accumulation_steps": 1}
        trainers.append(train(cls, tmp_path / name, changed, model=model, optimizers=(optimizer, schedule), **mesh))
    assert_equal(trainers[1], trainers[0])


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "compile mode": ({"torch_compile_mode": "max-autotune"}, r"torch_compile_mode: is 'max-autotune'"),
    "compile backend": ({"torch_compile_backend": "eager"}, r"torch_compile_backend: is 'eager'.*inductor"),
    "each node": ({"save_on_each_node": True}, r"save_on_each_node: is True.*one folder"),
    "offload": ({"activation_checkpointing_kwargs": {"offload": True}}, r"_kwargs: asks for offload"),
    "debug": ({"debug": "underflow_overflow"}, r"debug: is .*overflow"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_here_is_refused_by_name(case: str, tmp_path: Path) -> None:
    changed, message = REFUSED[case]
    with pytest.raises(FzeroError, match=message):
        fzero.hf.Trainer(make_model(), make_arguments(tmp_path, **changed), train_dataset=make_dataset())


def test_what_accelerate_was_launched_with_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    with pytest.raises(FzeroError, match=r"mixed_precision: is 'fp8'.*fp16"):
        fzero.hf.Trainer(make_model(), make_arguments(tmp_path))
