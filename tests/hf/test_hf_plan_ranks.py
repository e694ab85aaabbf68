"""What TrainingArguments ask of programs and state, on two processes: the numbers are those of one."""

from __future__ import annotations

import functools
import itertools
import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate")  # without which transformers has no Trainer

import transformers
from accelerate import ParallelismConfig
from hf_models import make_arguments, make_dataset, make_model, read_logs
from processes import refusal, run_cases, values
from torch.distributed.device_mesh import DeviceMesh

import fzero.hf

SHORT = {"max_steps": 4, "gradient_accumulation_steps": 1, "optim": "adamw_torch"}
OFFLOADED: dict[str, Any] = {
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
    "train_micro_batch_size_per_gpu": "auto", "train_batch_size": "auto", "gradient_clipping": "auto",
    "gradient_accumulation_steps": "auto",
}  # fmt: skip


def on_disk(folder: Path) -> dict[str, Any]:
    places = {f"offload_{what}": {"device": "nvme", "nvme_path": str(folder)} for what in ("param", "optimizer")}
    return {**OFFLOADED, "zero_optimization": {"stage": 3, **places}}


def make(mesh: DeviceMesh, folder: Path, **changed: Any) -> Any:
    rank = str(mesh.get_local_rank())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    deepspeed, ranks_of_a_host = changed.pop("deepspeed", None), changed.pop("local", "2")
    arguments = make_arguments(folder, per_device_train_batch_size=2, **SHORT, **changed)
    arguments.deepspeed = deepspeed
    os.environ["LOCAL_WORLD_SIZE"] = ranks_of_a_host
    return fzero.hf.Trainer(make_model("llama"), arguments, train_dataset=make_dataset())


def train(mesh: DeviceMesh, folder: Path, **changed: Any) -> tuple[list[dict[str, float]], dict[str, int], str, int]:
    """Logs, the axes of the mesh, where the first parameter lies, and the stage."""
    trainer = make(mesh, folder, **changed)
    trainer.train()
    first = fzero.tree.leaves(trainer.sharded.params)[0]
    axes = dict(zip(trainer.mesh.mesh_dim_names, trainer.mesh.mesh.shape))
    return read_logs(trainer), axes, str(first.form.place), trainer.stage


def refuse(mesh: DeviceMesh, folder: Path, **changed: Any) -> Any:
    return refusal(functools.partial(make, mesh, folder, **changed))


ALONG, CUT = {"fsdp": 2}, {"replica": 2, "fsdp": 1}
HYBRID = {"version": 1, "reshard_after_forward": "hybrid_shard"}
CASES: dict[str, tuple[dict[str, Any], dict[str, int], str, int]] = {
    "a ds_config on the host": ({"deepspeed": OFFLOADED}, ALONG, "host", 3),
    "a ds_config of groups": (
        {"deepspeed": {**OFFLOADED, "zero_optimization": {"stage": 3, "mics_shard_size": 1}}}, CUT, "None", 3,
    ),
    "fsdp": ({"fsdp": True, "fsdp_config": {"reshard_after_forward": False}}, ALONG, "None", 2),
    "fsdp of hosts": ({"fsdp": True, "fsdp_config": HYBRID, "local": "1"}, CUT, "None", 3),
    "a parallelism_config": (
        {"parallelism_config": ParallelismConfig(dp_replicate_size=2, dp_shard_size=1)}, CUT, "None", 3,
    ),
}  # fmt: skip
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "three ranks": ({"parallelism_config": ParallelismConfig(dp_shard_size=3)}, "has 1 replicas of 3 ranks"),
    "another clipping": ({"deepspeed": {**OFFLOADED, "gradient_clipping": 0.1}}, "ds gradient_clipping=0.1"),
    "another batch": ({"deepspeed": {**OFFLOADED, "train_batch_size": 2}}, "vs hf train_batch_size (calculated)=4"),
}


def test_two_ranks_train_as_one_process(tmp_path: Path) -> None:
    plain = make_arguments(tmp_path, per_device_train_batch_size=4, **SHORT)
    expected = transformers.Trainer(make_model("llama"), plain, train_dataset=make_dataset())
    expected.train()
    cases: dict[str, Any] = {
        name: functools.partial(train, folder=tmp_path, **changed) for name, (changed, *_) in CASES.items()
    }
    cases["a ds_config on a disk"] = functools.partial(train, folder=tmp_path, deepspeed=on_disk(tmp_path))
    cases |= {name: functools.partial(refuse, folder=tmp_path, **changed) for name, (changed, _) in REFUSED.items()}
    outcomes = run_cases(2, cases)
    expectations = {**CASES, "a ds_config on a disk": ({}, ALONG, "disk", 3)}
    for (name, (_, axes, place, stage)), rank in itertools.product(expectations.items(), range(2)):
        logs, found, where, at = values(outcomes[name])[rank]
        assert (found, at) == (axes, stage), name
        assert place in where.lower() or where == place, name
        for ours, theirs in zip(logs, read_logs(expected), strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-5), name
    for name, (_, message) in REFUSED.items():
        for error in values(outcomes[name]):
            assert message in error.message, name
