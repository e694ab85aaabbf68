"""TRL's trainers on two processes: logs are those of TRL on two processes, where DDP trains."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate")  # without which transformers has no Trainer
pytest.importorskip("peft")
pytest.importorskip("trl", reason="TRL is not installed: pip install fzero[trl]")

from hf_trl import UPDATES, assert_equal_logs, find_class, make_language_model, make_trainer, read_all_logs
from processes import run_cases, values
from torch.distributed.device_mesh import DeviceMesh

import fzero.hf

CASES: dict[str, dict[str, Any]] = {
    "SFT of packed texts": {
        "kind": "text",
        "changed": {
            "packing": True, "max_length": 40, "per_device_train_batch_size": 1, "gradient_checkpointing": False,
        },
    },
    "DPO": {"kind": "DPO", "changed": {"per_device_train_batch_size": 2, "pad_to_multiple_of": 64, "max_steps": 5}},
    "GRPO of adapters": {"kind": "GRPO", "lora": "new", "changed": {"pad_to_multiple_of": 32, "max_steps": 5}},
}  # fmt: skip


def act_as_torchrun(mesh: DeviceMesh) -> None:
    rank = str(mesh.get_local_rank())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")


def train(mesh: DeviceMesh, folder: Path, case: dict[str, Any]) -> list[list[dict[str, float]]]:
    """The logs of a rank: TRL's, and ours."""
    import trl

    act_as_torchrun(mesh)
    found = []
    for module in (trl, fzero.hf):
        trainer = make_trainer(find_class(module, case["kind"]), folder / module.__name__, **case)
        assert trainer.accelerator.num_processes == 2
        trainer.train()
        trainer.evaluate()
        trainer.save_model(folder / module.__name__ / "last")
        found.append(read_all_logs(trainer))
    return found


@pytest.mark.parametrize("name", CASES)
def test_logs_of_two_ranks_are_those_of_trl_on_two_ranks(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    make_language_model(tmp_path / "of a rank")
    outcomes = run_cases(2, {name: functools.partial(train, folder=tmp_path, case=case)})
    for expected, got in values(outcomes[name]):
        assert len(got) == case["changed"].get("max_steps", UPDATES) + 2  # the last two are of the run, and evaluate
        assert_equal_logs(got, expected)
