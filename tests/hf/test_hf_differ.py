"""Ranks whose arguments, models, data or callbacks differ: the Trainer names the difference on every rank."""

from __future__ import annotations

import dataclasses
import enum
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate")  # without which transformers has no Trainer

import torch
from hf_models import make_arguments, make_dataset, make_model
from processes import refusal, run
from torch.distributed.device_mesh import DeviceMesh
from transformers import Seq2SeqTrainingArguments

import fzero.hf
from fzero.hf.alike import list_arguments, list_order
from fzero.hf.arguments import OF_A_RANK

FIELDS = [each.name for each in dataclasses.fields(Seq2SeqTrainingArguments)]


def change(value: Any) -> Any:
    """Another value of the same type."""
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, enum.Enum):
        return next(each for each in type(value) if each is not value)
    if isinstance(value, (int, float)):
        return value + 1
    return value + "x" if isinstance(value, str) else ["other"] if isinstance(value, list) else "other"


def act_as_torchrun(mesh: DeviceMesh) -> int:
    rank = mesh.get_local_rank()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    return rank


def change_each_argument(mesh: DeviceMesh, folder: Path) -> dict[str, str]:
    """What each rank gets where rank 1 has another value of one field. The old value stays in the message."""
    rank, found, model = act_as_torchrun(mesh), {}, make_model()
    plain = {name: x for name, x in make_arguments(folder).to_dict().items() if name in FIELDS}
    args = Seq2SeqTrainingArguments(**plain)
    for name in sorted(set(FIELDS) - OF_A_RANK):
        held = getattr(args, name)
        if rank == 1:
            setattr(args, name, change(held))  # past the checks of transformers
        found[name] = refusal(lambda: fzero.hf.Seq2SeqTrainer(model, args)).message
        setattr(args, name, held)
    return found


class Broken(list[Any]):
    """A data set that has lost its rows."""

    def __getitem__(self, at: Any) -> Any:
        raise ValueError(f"row {at} cannot be read")


class Stream(torch.utils.data.IterableDataset[Any]):
    """A data set without a length. Rank 0 reads it for all ranks."""

    def __iter__(self) -> Iterator[Any]:
        yield Broken()[0]


def differ(mesh: DeviceMesh, folder: Path) -> dict[str, str]:
    """What a rank gets where rank 1 has something else. What one case leaves does not disturb the next."""
    rank = act_as_torchrun(mesh)
    rows, evaluated = make_dataset(), make_dataset(8)

    def trainer(model: Any = None, **changed: Any) -> Any:
        named = {"train_dataset": rows, "eval_dataset": evaluated, **changed}
        options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 1, **named.pop("args", {})}
        made = make_arguments(folder / "out", **options)
        return fzero.hf.Trainer(make_model() if model is None else model, made, **named)

    def only(value: Any, other: Any = None) -> Any:
        return value if rank == 1 else other

    def configure() -> Any:
        model = make_model()
        model.config.layer_norm_epsilon = only(0.5, 1e-5)
        return trainer(model)

    def freeze() -> Any:
        model = make_model()
        model.transformer.wpe.requires_grad_(rank == 0)
        return trainer(model)

    def set_rate() -> None:
        made = trainer()
        made.args.learning_rate = only(0.5, 0.25)
        made.train()

    def fail(_: Any) -> dict[str, float]:
        return {"number": 1.0 / (1 - rank)}

    def run_epoch(**options: Any) -> None:
        made = trainer(args=options)
        torch.manual_seed(rank)
        made._run_epoch(train_dataloader=made.get_train_dataloader())

    def take_batches() -> None:
        made = trainer(train_dataset=[only({"input_ids": x["input_ids"]}, x) for x in rows])
        made.get_batch_samples(iter(made.get_train_dataloader()), 1, torch.device("cpu"))

    def wish() -> None:
        made = trainer()
        made.control.should_save = only(True, False)
        made._maybe_log_save_evaluate(None, None, None, None, 0.0, None, 0.0)

    cases: dict[str, Callable[[], Any]] = {
        "stage": lambda: trainer(stage=only(2, 3)),
        "no arguments": lambda: fzero.hf.Trainer(make_model(), only("out", make_arguments(folder)), mesh=mesh),
        "a refused argument": lambda: trainer(args=only({"fp16": True}, {})),
        "an argument that transformers refuses": lambda: trainer(optimizers=only(3, (None, None))),
        "configuration": configure,
        "frozen": freeze,
        "arguments that are set later": set_rate,
        "rows": lambda: trainer(train_dataset=rows[: only(23, 24)]).train(),
        "no rows": lambda: trainer(train_dataset=only(None, rows)).train(),
        "random state": run_epoch,
        "random state, grouped": lambda: run_epoch(train_sampling_strategy="group_by_length"),
        "broken": lambda: trainer(train_dataset=only(Broken(rows), rows)).train(),
        "broken evaluation": lambda: trainer(eval_dataset=only(Broken(evaluated), evaluated)).evaluate(),
        "rows of evaluation": lambda: trainer().evaluate(evaluated[: only(4, 8)]),
        "rows of prediction": lambda: trainer().predict(evaluated[: only(4, 8)]),
        "labels": take_batches,
        "metrics": lambda: trainer(compute_metrics=only(fail)).evaluate(),
        "metrics that fail": lambda: trainer(compute_metrics=fail).evaluate(),
        "wishes": wish,
        "a stream that breaks": lambda: trainer().evaluate(Stream()),  # the last: ranks part
    }
    return {name: "{0.kind}: {0.message}".format(refusal(case)) for name, case in cases.items()}


def find_all(mesh: DeviceMesh, folder: Path) -> tuple[dict[str, str], dict[str, str]]:
    return change_each_argument(mesh, folder), differ(mesh, folder)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return run(2, find_all, tmp_path_factory.mktemp("differ"), lost=())


def test_each_argument_that_differs_is_named_with_both_values(outcomes: list[Any]) -> None:
    (first, _), (second, _) = outcomes
    args, failures = make_arguments("folder"), []
    for name, message in first.items():
        held = getattr(args, name, None)
        told = f"configuration TrainingArguments.{name}: ranks have different configurations: rank 0 has "
        if message != second[name] or not message.startswith(told) or "rank 1 has" not in message:
            failures.append((name, message))
        if isinstance(held, (int, float)) and f"{name}: {held!r}" not in message:
            failures.append((name, message))
    assert not failures and set(first) | OF_A_RANK >= set(FIELDS)


def test_arguments_of_a_rank_may_differ() -> None:
    args, others = make_arguments("folder"), make_arguments("folder")
    for name in OF_A_RANK & set(FIELDS):
        setattr(others, name, change(getattr(args, name, None)))
    assert list(list_arguments(args)) == list(list_arguments(others))


DIFFERENT = {
    "a refused argument": r"configuration TrainingArguments\.fp16: .*False.*True",
    "stage": "configuration stage: ranks have different configurations: .*3.*2",
    "configuration": "configuration of the model, layer_norm_epsilon: .*1e-05.*0.5",
    "frozen": r"leaf transformer\.wpe\.weight: ranks give different leaves: .*trained",
    "arguments that are set later": r"configuration TrainingArguments\.learning_rate: .*0\.25'.*0\.5'",
    "rows": "data train_dataset: ranks take different data: .*24 rows.*23 rows",
    "no rows": "data train_dataset: ranks take different data: .*24 rows.*None",
    "random state": "data of an epoch, SeedableRandomSampler: .*rows of seed 0.*rows of seed 1",
    "random state, grouped": "data of an epoch, LengthGroupedSampler: .*rows of random state",
    "rows of evaluation": "data eval_dataset: .*8 rows.*4 rows",
    "rows of prediction": "data test_dataset: .*8 rows.*4 rows",
    "labels": "data of an update: .*input_ids of 2 dims, labels of 2 dims.*input_ids of 2 dims'",
    "metrics": "configuration compute_metrics: .*None.*a function",
    "wishes": "control should_save: callbacks of ranks ask for different things: .*False.*True",
}
"""What both ranks say."""
ALONE = {
    "no arguments": ("FzeroError: args: is 'out'", "FzeroError: args: is 'out'"),
    "an argument that transformers refuses": ("TypeError: ", "TypeError: "),
    "broken": (r"ValueError: row \d+ cannot be read", r"ValueError: row \d+ cannot be read"),
    "broken evaluation": (r"ValueError: row \d+ cannot be read", r"ValueError: row \d+ cannot be read"),
    "metrics that fail": ("ZeroDivisionError", "ZeroDivisionError"),
}
"""What rank 1 says, whose own error it is, and what rank 0 says of it."""


def test_what_differs_between_ranks_is_named_before_anything_is_exchanged(outcomes: list[Any]) -> None:
    (_, first), (_, second) = outcomes
    for name, pattern in DIFFERENT.items():
        assert first[name] == second[name], name
        assert_matches(name, f"FzeroError: {pattern}", first[name])


def test_an_error_of_one_rank_is_named_on_the_other(outcomes: list[Any]) -> None:
    (_, first), (_, second) = outcomes
    for name, (own, told) in ALONE.items():
        assert_matches(name, own, second[name])
        assert_matches(name, f"FzeroError: rank 1: could not go on: .*{told}", first[name])
    assert_matches("stream", "ValueError: row 0 cannot be read", first["a stream that breaks"])
    told = "FzeroError: a batch that rank 0 gives to all ranks: rank 0 left .*ValueError: row 0 cannot be read"
    assert_matches("stream", told, second["a stream that breaks"])


def assert_matches(name: str, pattern: str, message: str) -> None:
    assert re.match(pattern, message, re.DOTALL), name


def test_the_order_of_a_sampler_with_a_generator_of_its_own_is_compared() -> None:
    rows = list(range(4))
    lines = []
    for seed in (1, 2, 1):
        sampler = torch.utils.data.RandomSampler(rows, generator=torch.Generator().manual_seed(seed))
        lines += list_order(torch.utils.data.DataLoader(rows, sampler=sampler))
    assert lines[0] == lines[2] != lines[1]
    assert list(list_order(torch.utils.data.DataLoader(rows))) == ["data of an epoch, SequentialSampler: rows as given"]
