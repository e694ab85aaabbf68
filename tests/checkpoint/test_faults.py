"""Faults around saving: what is in the way of a save, what fails within it, and who else writes into the folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fzero.checkpoint import save
from fzero.checkpoint.folder import list_steps


@pytest.mark.parametrize("there", range(6))
@pytest.mark.parametrize("keep", [1, 2, 4, 9])
def test_keep_leaves_so_many_checkpoints_or_all_that_there_are(tmp_path: Path, there: int, keep: int) -> None:
    for step in range(there):
        save(tmp_path, {"x": torch.ones(2)}, step=step)
    save(tmp_path, {"x": torch.ones(2)}, step=there, keep=keep)
    assert list_steps(tmp_path) == list(range(there + 1))[-keep:]
