"""Ranks with folders of their own: one has a file and another has none, and they run one program."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run
from programs import layers, mlp
from torch.distributed.device_mesh import DeviceMesh

import fzero
from fzero import optim, tree

OPTIMIZER = optim.adamw(0.1)


def train_step(params: Any, state: Any, x: torch.Tensor) -> Any:
    value, grads = fzero.value_and_grad(lambda p: mlp(p, x).square().mean())(params)
    updates, state = OPTIMIZER.update(grads, state, params)
    return optim.apply_updates(params, updates), state, value


class Said(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def train(mesh: DeviceMesh, folder: Path | None, is_shared: bool) -> tuple[list[torch.Tensor], bool]:
    """What three steps give on this rank, and whether its program came from its folder."""
    said, log = Said(), logging.getLogger("fzero")
    log.addHandler(said)
    log.setLevel(logging.INFO)
    own = folder if folder is None or is_shared else folder / str(mesh.get_rank())
    step = fzero.shard(train_step, mesh, cache=own)
    params = fzero.partition(layers(), mesh)
    state = OPTIMIZER.init(params)
    rows = torch.randn(2, 5, generator=torch.Generator().manual_seed(mesh.get_rank()))
    for _ in range(3):
        params, state, value = step(params, state, rows)
    made = [leaf.local.clone() for leaf in tree.leaves(params)] + [value]
    return made, any("has its program from" in text for text in said.texts)


@pytest.mark.parametrize("is_shared", [False, True])
def test_one_rank_has_a_file_and_another_has_none(is_shared: bool, tmp_path: Path) -> None:
    plain = run(2, train, None, is_shared)
    cold = run(2, train, tmp_path, is_shared)
    assert [found for _, found in cold] == [False, False]
    if is_shared:
        assert len(list(tmp_path.iterdir())) == 1  # ranks share it
    else:
        for file in (tmp_path / "1").iterdir():
            file.unlink()
    warm = run(2, train, tmp_path, is_shared)
    assert [found for _, found in warm] == [True, is_shared]
    for runs in zip(plain, cold, warm):
        for others in runs[1:]:
            assert all(torch.equal(a, b) for a, b in zip(runs[0][0], others[0], strict=True))
