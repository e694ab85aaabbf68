"""examples/elastic.py under torchrun on two hosts, of which one ends: the other goes on, with the same losses."""

from __future__ import annotations

import contextlib
import io
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hosts import Host, two_hosts
from processes import run

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))

import elastic  # noqa: E402

STEPS, EVERY = 64, 5
STEP = re.compile(r"^step (\d+) on (\d) ranks: loss (\S+)$", re.MULTILINE)


def train(mesh: Any, folder: Path) -> str:
    """What the example prints on a mesh."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        elastic.main(mesh, str(folder), STEPS, EVERY)
    return printed.getvalue()


def start(host: Host, folder: Path) -> subprocess.Popen[str]:
    """torchrun on one of one or two hosts. A host that is silent for 15 s is gone."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc-per-node", "1"]
    command += ["--max-restarts", "3", "--rdzv-backend", "c10d", "--rdzv-endpoint", "host0:29400", "--rdzv-conf"]
    command += ["last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=15"]
    command += [str(ROOT / "examples" / "elastic.py"), "--folder", str(folder)]
    command += ["--steps", str(STEPS), "--every", str(EVERY)]
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return host.start(command, environment | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})


def test_a_host_ends_and_the_other_goes_on(tmp_path: Path) -> None:
    last = random.Random("elastic").randrange(EVERY, STEPS // 4)  # early: this process sees it a moment later
    with two_hosts() as (one, other):
        agent, _ = start(one, tmp_path / "hosts"), start(other, tmp_path / "hosts")
        assert agent.stdout is not None
        said = ""
        for line in agent.stdout:
            said += line
            if line.startswith(f"step {last} on 2 "):
                other.end()
        assert agent.wait(60) == 0, said[-8000:]
    assert re.search(r"FzeroError: .*: rank 1 died or left; ", said), said[-8000:]
    steps = [(int(number), int(world), float(loss)) for number, world, loss in STEP.findall(said)]
    both, alone = [{number: loss for number, world, loss in steps if world == size} for size in (2, 1)]
    assert list(both) == list(range(1, len(both) + 1)) and len(both) >= last
    first = next(iter(alone))
    assert list(alone) == list(range(first, STEPS + 1)) and first % EVERY == 1 and 1 < first <= len(both) + 1
    (printed,) = run(1, train, tmp_path / "whole")
    whole = {int(number): float(loss) for number, _, loss in STEP.findall(printed)}
    assert both | alone == pytest.approx(whole, rel=1e-5) and len(whole) == STEPS
