"""Accelerator on two processes: equal to accelerate's own on two, which wraps the model in DistributedDataParallel."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate")  # without which fzero.hf is not there

import accelerate
from accelerate.utils import DataLoaderConfiguration
from hf_accelerate import assert_equal, prepare, start, train
from processes import run_cases, values
from torch.distributed.device_mesh import DeviceMesh

import fzero.hf


def act_as_torchrun(mesh: DeviceMesh) -> None:
    rank = str(mesh.get_local_rank())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")


def compare(mesh: DeviceMesh, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a rank gets from both, for batches whose lengths differ from those of the other rank, and a last batch whose
    rows are repeated. Losses are this rank's own."""
    act_as_torchrun(mesh)
    both = []
    for cls in (fzero.hf.Accelerator, accelerate.Accelerator):
        how = {"gradient_accumulation_steps": 2, "dataloader_config": DataLoaderConfiguration(split_batches=True)}
        accelerator = start(cls, **how)
        assert accelerator.num_processes == 2
        prepared = prepare(accelerator, rows=6)
        both.append(train(accelerator, prepared, folder=folder / cls.__module__))
        weights = both[-1]["weights"]
        both[-1]["weights"] = {name.removeprefix("module."): x for name, x in weights.items()}
    return both[0], both[1]


def save_on_one(mesh: DeviceMesh, folder: Path) -> None:
    act_as_torchrun(mesh)
    accelerator = start(fzero.hf.Accelerator)
    model = prepare(accelerator)[0]
    if accelerator.is_main_process:
        accelerator.save_model(model, folder)
    else:
        accelerator.save_state(folder)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("accelerate")
    cases = {each.__name__: functools.partial(each, folder=folder / each.__name__) for each in (compare, save_on_one)}
    return run_cases(2, cases)


def test_two_processes_are_those_of_accelerate(outcomes: dict[str, Any]) -> None:
    pairs = values(outcomes["compare"])
    for got, expected in pairs:
        assert_equal(got, expected)
    (first, _), (second, _) = pairs
    assert first["losses"] != second["losses"] and first["norms"] == second["norms"]


def test_a_call_of_one_process_alone_is_named_on_both(outcomes: dict[str, Any]) -> None:
    for outcome in outcomes["save_on_one"]:
        assert "call of save" in outcome.error and "none may save, evaluate or generate alone" in outcome.error
