"""The command line: what it prints of checkpoints, and its exit status."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import fzero
from fzero.__main__ import main
from fzero.checkpoint import save


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    params = fzero.partition({"w": torch.arange(12.0).view(3, 4)}, fzero.VirtualMesh(replica=2, fsdp=2))
    for step in (9, 10):
        save(tmp_path, fzero.State(params=params, step=torch.tensor(step)))
    return tmp_path


def test_checkpoints_are_listed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "ls", str(folder)]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("step-9  2 tensors, 0.0 MiB, saved on replica=2, fsdp=2") and second.startswith("step-10")


def test_a_checkpoint_is_verified(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "verify", str(folder)]) == 0
    assert "step-10" in (out := capsys.readouterr().out) and "as it was written" in out
    (folder / "step-9" / "rank-00002.safetensors").write_bytes(b"")
    assert main(["checkpoint", "verify", str(folder), "--step", "9"]) == 1
    assert "rank-00002.safetensors has 0 bytes" in capsys.readouterr().err


def test_tensors_are_exported(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = folder / "out.safetensors"
    assert main(["checkpoint", "export", str(folder), str(file), "--prefix", "params"]) == 0
    assert capsys.readouterr().out == f"1 tensors of {folder / 'step-10'} in {file}\n"
    assert load_file(file)["w"].equal(torch.arange(12.0).view(3, 4)) and len(load_file(file)) == 1
    assert main(["checkpoint", "export", str(folder), str(file), "--prefix", "parms"]) == 1
    assert "parms: is no path in" in capsys.readouterr().err


def test_the_module_runs(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fzero", "checkpoint", "ls", str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 1 and f"{tmp_path}: has no checkpoint" in ran.stderr
