"""docs/fsdp2.md: its code runs on two ranks, and both of its loops compute the same."""

from __future__ import annotations

import contextlib
import functools
import io
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run_cases, values
from test_docs import ROOT, blocks
from torch.distributed.device_mesh import DeviceMesh

import fzero

PAGE = (ROOT / "docs" / "fsdp2.md").read_text()


def execute(mesh: DeviceMesh, folder: Path) -> dict[str, Any]:
    """What the page computes, in float32: losses and norms of both loops, and weights behind a move from each to the
    other. In bfloat16, as on the page, sums are rounded at other places."""
    os.chdir(folder)
    names, printed = dict[str, Any](), io.StringIO()
    with contextlib.redirect_stdout(printed):
        for number, block in enumerate(blocks(PAGE.replace("torch.bfloat16, 2, 4", "torch.float32, 2, 4"), "python")):
            exec(compile(block, f"docs/fsdp2.md, block {number}", "exec"), names)
    trained, moved = (dict(fzero.iter_full(names[name])) for name in ("params", "moved"))
    read = {path: x.full_tensor() for path, x in names["state"]["model"].items()}
    return {
        **{name: names[name] for name in ("fsdp2", "ours", "flops")},
        "moved": moved,
        "read": read,
        "trained": trained,
    }


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_cases(2, {"page": functools.partial(execute, folder=tmp_path_factory.mktemp("page"))})


def test_both_loops_compute_the_same(outcomes: dict[str, Any]) -> None:
    first, second = values(outcomes["page"])
    assert "torch.bfloat16, 2, 4" in PAGE
    assert first["ours"] == second["ours"] and len(first["ours"]) == 4
    torch.testing.assert_close(first["ours"], first["fsdp2"], atol=1e-5, rtol=0.0)
    assert max(norm for _, norm in first["ours"]) > 0.5 and first["flops"] > 0


def test_weights_move_from_one_to_the_other(outcomes: dict[str, Any]) -> None:
    """`trained` has made a further step."""
    (found, _) = values(outcomes["page"])
    for path, x in found["moved"].items():
        assert torch.equal(found["read"][path], x) and not torch.equal(found["trained"][path], x)
        torch.testing.assert_close(x, found["trained"][path], atol=2e-2, rtol=0.0)
