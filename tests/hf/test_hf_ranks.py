"""The Trainer on two processes: equal to transformers' on one, saved there and resumed on one."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate")  # without which transformers has no Trainer

import torch
import transformers
from hf_models import (
    assert_equal_seq2seq,
    make_arguments,
    make_model,
    make_ragged_dataset,
    pad_rows,
    read_logs,
    train_seq2seq,
)
from processes import Outcome, refusal, run_cases, values
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import TrainerCallback

import fzero.checkpoint
import fzero.hf
from fzero import FzeroError
from fzero.hf.padding import pad_to_longest
from fzero.ranks.live import find_ranks

FEW = 7
"""Rows that two ranks cannot share equally."""


def act_as_torchrun(mesh: DeviceMesh) -> None:
    rank = str(mesh.get_local_rank())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")


def make_trainer(cls: Any, folder: Path, how: dict[str, Any] | None = None, **changed: Any) -> Any:
    """A trainer of rows with different lengths: the batches of ranks have different shapes."""
    dataset = make_ragged_dataset()
    data = {"train_dataset": dataset, "eval_dataset": dataset[:8], "data_collator": pad_rows}
    return cls(make_model(), make_arguments(folder, **changed), **data, compute_metrics=measure, **(how or {}))


def measure(evaluation: Any) -> dict[str, float]:
    """A number that depends on each prediction at a label, and how many there are."""
    is_counted = evaluation.label_ids != -100
    return {"count": float(is_counted.sum()), "squares": float((evaluation.predictions[is_counted] ** 2).mean())}


def find_metrics(trainer: Any) -> dict[str, float]:
    metrics = trainer.predict(make_ragged_dataset(FEW)).metrics
    return {name: metrics[f"test_{name}"] for name in ("count", "squares")}


def train(mesh: DeviceMesh, folder: Path) -> tuple[list[dict[str, float]], float, dict[str, float]]:
    """Logs, evaluation loss and metrics of a rank, whose batches are half of those of one process."""
    act_as_torchrun(mesh)
    changed = {"per_device_train_batch_size": 2, "save_strategy": "steps", "save_steps": 3}
    trainer = make_trainer(fzero.hf.Trainer, folder, **changed)
    assert trainer.args.world_size == trainer.accelerator.num_processes == 2
    trainer.train()
    return read_logs(trainer), trainer.evaluate()["eval_loss"], find_metrics(trainer)


def train_seq2seq_on_ranks(mesh: DeviceMesh, folder: Path) -> dict[str, Any]:
    act_as_torchrun(mesh)
    return train_seq2seq(fzero.hf.Seq2SeqTrainer, "T5", folder, rows=2)


def pad_unequal(mesh: DeviceMesh) -> dict[str, Any]:
    """What a rank gets for batches that differ from those of the other rank."""
    longer, home = mesh.get_local_rank(), find_ranks(mesh)
    tokens, labels = torch.ones(2, 3 + longer, dtype=torch.long), torch.ones(2, 4 - longer, dtype=torch.long)
    padded = pad_to_longest({"input_ids": tokens, "labels": labels, "count": 1}, home.members, ["labels"], 5)
    found: dict[str, Any] = {name: x.tolist() for name, x in padded.items() if isinstance(x, torch.Tensor)}
    unequal = {
        "rows": {"labels": torch.ones(2 + longer, 3)}, "unknown": {"sound": torch.ones(2, 3 + longer)},
        "missing": {"labels" if longer else "input_ids": torch.ones(2, 3)},
    }  # fmt: skip
    for name, inputs in unequal.items():
        try:
            found[name] = list(pad_to_longest(inputs, home.members, ["labels"], 5))
        except FzeroError as error:
            found[name] = str(error)
    return found


SHARED: dict[str, Any] = {"optim": "sgd", "max_steps": 2, "gradient_accumulation_steps": 1, "warmup_steps": 0}


def train_on_ranks_that_share_layers(mesh: DeviceMesh, folder: Path) -> Any:
    """Logs, evaluation loss, metrics and tokens. Both ranks take all rows. SGD has no state in slices to save."""
    act_as_torchrun(mesh)
    shared = init_device_mesh("cpu", (1, 2), mesh_dim_names=("fsdp", "tp"))
    how = {"mesh": shared, "tp": "tp", "plan": {"transformer.wte": "replicate"}}  # of 61 tokens
    trainer = make_trainer(fzero.hf.Trainer, folder, how, **SHARED, save_strategy="steps", save_steps=2)
    trainer.train()
    prompt = make_ragged_dataset()[0]["input_ids"][None, :5]
    tokens = trainer.generate(prompt, max_new_tokens=3, do_sample=False, pad_token_id=0).tolist()
    other = refusal(lambda: trainer.generate(prompt + mesh.get_local_rank(), max_new_tokens=1, pad_token_id=0)).message
    return (read_logs(trainer), trainer.evaluate()["eval_loss"], find_metrics(trainer)), tokens, other


UNEVEN: dict[str, dict[str, Any]] = {
    r"accelerator_config: has even_batches=False, and 2 ranks.*drop_last=True": {
        "accelerator_config": {"even_batches": False}
    },
    r"train_sampling_strategy: is 'batch_rebalance', which gives 2 ranks": {
        "train_sampling_strategy": "batch_rebalance"
    },
    r"enable_jit_checkpoint: is True, and a signal reaches 2 ranks": {"enable_jit_checkpoint": True},
}


def refuse_uneven_batches(mesh: DeviceMesh, folder: Path) -> None:
    act_as_torchrun(mesh)
    for message, changed in UNEVEN.items():
        with pytest.raises(FzeroError, match=message):
            make_trainer(fzero.hf.Trainer, folder, **changed)


class Saves(TrainerCallback):
    """Saves at an event, on rank 0 alone: what transformers' users write."""

    def __init__(self, event: str, trainer: Any) -> None:
        setattr(self, event, lambda *_, **__: trainer.save_model() if trainer.is_world_process_zero() else None)


EARLY_EVENTS = ("on_train_begin", "on_epoch_begin", "on_step_begin")  # before anything is traced


def call_apart(mesh: DeviceMesh, folder: Path) -> dict[str, str]:
    """What a rank gets where ranks are in different calls: the error of each pair, and of each event."""
    act_as_torchrun(mesh)
    trainer, rank = make_trainer(fzero.hf.Trainer, folder, per_device_train_batch_size=2), mesh.get_local_rank()
    home = find_ranks(mesh)
    calls: dict[str, Callable[[], Any]] = {
        "trainer.train": trainer.train,
        "trainer.save_model": trainer.save_model,
        "trainer.evaluate": trainer.evaluate,
        "trainer.predict": lambda: trainer.predict(make_ragged_dataset(FEW)),
        "generate": lambda: trainer.generate(torch.ones(1, 3, dtype=torch.long), max_new_tokens=1),
        "unpartition": lambda: fzero.unpartition(trainer.sharded.params),
        "save": lambda: fzero.checkpoint.save(folder / "state", trainer.sharded.params, step=1),
        "the shapes of a batch": lambda: pad_to_longest({"labels": torch.ones(2, 3)}, home.members, ["labels"], 0),
    }
    found = {" ".join(pair): refusal(calls[pair[rank]]).message for pair in itertools.permutations(calls, 2)}
    for event in EARLY_EVENTS:
        callback = Saves(event, trainer)
        trainer.add_callback(callback)
        found[event] = refusal(trainer.train).message
        trainer.remove_callback(callback)
    trainer.save_model()  # ranks are still in step
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> dict[str, list[Outcome]]:
    cases: dict[str, Any] = {"train": functools.partial(train, folder=folder / "two"), "pad": pad_unequal}
    cases["seq2seq"] = functools.partial(train_seq2seq_on_ranks, folder=folder / "seq2seq")
    cases["shared"] = functools.partial(train_on_ranks_that_share_layers, folder=folder / "shared")
    cases["apart"] = functools.partial(call_apart, folder=folder / "apart")
    return run_cases(2, {**cases, "uneven": functools.partial(refuse_uneven_batches, folder=folder / "uneven")})


def test_two_ranks_train_as_one_and_one_goes_on_from_their_checkpoint(
    outcomes: dict[str, list[Outcome]], folder: Path
) -> None:
    expected = make_trainer(transformers.Trainer, folder / "theirs")
    expected.train()
    logs = read_logs(expected)
    for got, loss, metrics in values(outcomes["train"]):
        assert len(got) == len(logs) == 6
        for ours, theirs in zip(got, logs):
            assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-5)
        assert loss == pytest.approx(expected.evaluate()["eval_loss"], abs=1e-5)
        assert metrics == pytest.approx(find_metrics(expected), abs=1e-5)
    resumed = make_trainer(fzero.hf.Trainer, folder / "one")
    resumed.train(resume_from_checkpoint=str(folder / "two" / "checkpoint-3"))
    for ours, theirs in zip(read_logs(resumed)[-3:], logs[-3:], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-5)


def test_an_encoder_decoder_trains_and_generates_on_two_ranks_as_in_transformers_on_one(
    outcomes: dict[str, list[Outcome]], tmp_path: Path
) -> None:
    """Each rank generates for its half of the rows."""
    expected = train_seq2seq(transformers.Seq2SeqTrainer, "T5", tmp_path)
    for got in values(outcomes["seq2seq"]):
        assert_equal_seq2seq(got, expected)


def test_two_ranks_that_share_layers_train_and_generate_as_one(
    outcomes: dict[str, list[Outcome]], folder: Path, tmp_path: Path
) -> None:
    expected = make_trainer(transformers.Trainer, tmp_path, **SHARED)
    expected.train()
    prompt = make_ragged_dataset()[0]["input_ids"][None, :5]
    text = expected.model.generate(prompt, max_new_tokens=3, do_sample=False, pad_token_id=0).tolist()
    for (logs, loss, metrics), tokens, other in values(outcomes["shared"]):
        for ours, theirs in zip(logs, read_logs(expected), strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-5)
        assert loss == pytest.approx(expected.evaluate()["eval_loss"], abs=1e-5)
        assert metrics == pytest.approx(find_metrics(expected), abs=1e-5)
        assert tokens == text
        assert "along 'tp'" in other
    assert (folder / "shared" / "checkpoint-2" / "fzero").is_dir()


def test_batches_get_the_length_of_the_longest_rank(outcomes: dict[str, list[Outcome]]) -> None:
    first, second = values(outcomes["pad"])
    assert first["input_ids"] == [[1, 1, 1, 5]] * 2 and second["input_ids"] == [[1, 1, 1, 1]] * 2
    assert first["attention_mask"] == [[1, 1, 1, 0]] * 2 and second["attention_mask"] == [[1, 1, 1, 1]] * 2
    assert first["labels"] == [[1, 1, 1, 1]] * 2 and second["labels"] == [[1, 1, 1, -100]] * 2
    for found in (first, second):
        assert "labels: differs in more than its length, by rank: [2, 3], [3, 3]" in found["rows"]
        assert "sound: has other lengths on other ranks, and its padding is not known" in found["unknown"]
    assert first["missing"] == ["input_ids"] and second["missing"] == ["labels"]  # the step says which inputs differ


def test_a_call_of_one_rank_alone_is_an_error_on_both_that_names_the_calls(
    outcomes: dict[str, list[Outcome]], folder: Path
) -> None:
    first, second = values(outcomes["apart"])
    assert first == second and len(first) == 8 * 7 + len(EARLY_EVENTS)
    for call, message in first.items():
        assert "rank 0 has 'call of " in message or call.startswith("unpartition"), call
        assert "let all ranks call the same functions together: none may save, evaluate or generate alone" in message
    assert (
        "rank 0 has 'call of trainer.save_model', rank 1 has 'call of generate'" in first["trainer.save_model generate"]
    )
    for event in EARLY_EVENTS:
        assert "rank 0 has 'call of trainer.save_model', rank 1 has 'call of " in first[event], event
    assert transformers.GPT2LMHeadModel.from_pretrained(folder / "apart").num_parameters() > 0


def test_batches_that_some_ranks_lack_are_refused(outcomes: dict[str, list[Outcome]]) -> None:
    values(outcomes["uneven"])
