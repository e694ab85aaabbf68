"""docs/data.md: its code runs as it stands, on real ranks, and does what the page says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from processes import run
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fzero
import fzero.checkpoint
from fzero import tree

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "data.md").read_text()


def blocks() -> list[str]:
    return [part.partition("```")[0] for part in PAGE.split("```python\n")[1:]]


def read(mesh: DeviceMesh, path: str, rounds: int) -> dict[str, Any]:
    """The names of the page after `rounds` of its loop: state, loader, losses."""
    torch.manual_seed(0)
    dataset = []
    for i in range(22):
        tokens = torch.randint(1, 11, (21 if i == 0 else 3 + i % 7,), generator=torch.Generator().manual_seed(i))
        dataset.append({"inputs": tokens[:-1], "labels": tokens[1:]})
    names: dict[str, Any] = {
        "fzero": fzero, "torch": torch, "path": path, "dataset": dataset, "world_size": mesh.size(),
        "init_device_mesh": init_device_mesh, "optimizer": fzero.optim.adamw(1e-2),
        "model": torch.nn.Sequential(torch.nn.Embedding(11, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 11)),
    }  # fmt: skip
    first, train, resume, sums, lengths = blocks()
    exec(sums, names)
    exec(first, names)
    exec(train, names)
    for _ in range(rounds):
        exec(resume, names)
    exec(lengths, names)
    return names


def on_the_page(mesh: DeviceMesh, path: str) -> tuple[list[int], int, int, tuple[int, ...]]:
    names = read(mesh, path, 1)
    state, loader, step = names["state"], names["loader"], names["step"]
    programs = [known.finished.find_program() for known in step._pipeline._cache]
    lengths = sorted(program.placeholders[-1].meta["val"].shape[1] for program in programs)
    again = fzero.checkpoint.load(path, state._replace(data=loader.position), mesh)
    assert tree.paths(again) == tree.paths(state._replace(data=loader.position)) and int(again.data.epoch.local) == 1
    return lengths, int(state.step.local), int(loader.position.epoch), tuple(names["batch"]["inputs"].shape)


def test_the_page_runs(tmp_path: Path) -> None:
    outcomes = run(2, on_the_page, str(tmp_path / "checkpoints"))
    assert outcomes == [([8, 32], 9, 3, outcomes[0][-1])] * 2 and outcomes[0][-1][1] in (8, 32)
