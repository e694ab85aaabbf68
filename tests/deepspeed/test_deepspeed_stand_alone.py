"""zero_to_fp32.py, which an engine puts beside its checkpoints: it reads their weights without fzero."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fzero.deepspeed
from fzero import VirtualMesh


def compute_loss(model: Any, x: Tensor) -> Tensor:
    return model(x).square().mean()


def save(folder: Path, mesh: Any, **changed: Any) -> dict[str, Tensor]:
    """The weights of an engine that saved a checkpoint after one update."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3), nn.Linear(3, 1, bias=False))
    model[2].weight.requires_grad_(False)
    config = {
        "train_micro_batch_size_per_gpu": 4, "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}, **changed,
    }  # fmt: skip
    engine, *_ = fzero.deepspeed.initialize(model=model, config=config, mesh=mesh, loss=compute_loss)
    engine.backward(engine(torch.randn(4 * mesh.size(), 5)))
    engine.step()
    engine.save_checkpoint(folder)
    return engine.module_state_dict()


def read(folder: Path, tag: str | None = None) -> dict[str, Tensor]:
    """The weights that the script in a folder reads."""
    script = runpy.run_path(str(folder / "zero_to_fp32.py"), run_name="script")
    return script["get_fp32_state_dict_from_zero_checkpoint"](str(folder), tag)


def assert_equal(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for path, x in expected.items():
        assert torch.equal(got[path], x.float() if x.is_floating_point() else x), path
        assert got[path].dtype == (torch.float32 if x.is_floating_point() else x.dtype)


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "one rank": (VirtualMesh(fsdp=1), {}),
    "three ranks at stage 3": (VirtualMesh(fsdp=3), {"zero_optimization": {"stage": 3}}),
    "replicas at stage 2": (VirtualMesh(replica=2, fsdp=2), {"zero_optimization": {"stage": 2}}),
    "bfloat16 masters": (
        VirtualMesh(fsdp=2),
        {
            "bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True},
            "zero_optimization": {"stage": 1},
        },
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_script_reads_what_the_engine_has(case: str, tmp_path: Path) -> None:
    mesh, changed = CASES[case]
    expected = save(tmp_path, mesh, **changed)
    assert_equal(read(tmp_path), expected)
    assert_equal(read(tmp_path, "global_step1"), expected)


def test_the_script_runs_where_fzero_is_not(tmp_path: Path) -> None:
    expected = save(tmp_path / "saved", VirtualMesh(fsdp=2), zero_optimization={"stage": 3})
    code = (
        "import runpy, sys; sys.modules['fzero'] = None; *given, first, second = sys.argv[1:]\n"
        "for output in (first, second):\n"
        "    sys.argv = [*given, output]\n"
        "    runpy.run_path(given[0], run_name='__main__')\n"
    )
    script, outputs = str(tmp_path / "saved" / "zero_to_fp32.py"), (tmp_path / "whole", tmp_path / "one.bin")
    command = [sys.executable, "-I", "-c", code, script, str(tmp_path / "saved"), *map(str, outputs)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert re.findall(r"^\d+ tensors of ", done.stdout, re.MULTILINE) == [f"{len(expected)} tensors of "] * 2
    for file in (tmp_path / "whole" / "pytorch_model.bin", tmp_path / "one.bin"):
        assert_equal(torch.load(file), expected)


def test_what_is_no_checkpoint_and_a_changed_byte_are_told(tmp_path: Path) -> None:
    save(tmp_path, VirtualMesh(fsdp=2))
    with pytest.raises(SystemExit, match=r"no checkpoint of fzero"):
        read(tmp_path, "global_step7")
    file = next(tmp_path.rglob("rank-00001.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(SystemExit, match=r"rank-00001\.safetensors is damaged"):
        read(tmp_path)
    (tmp_path / "latest").unlink()
    with pytest.raises(SystemExit, match=r"has no file 'latest'"):
        read(tmp_path)
