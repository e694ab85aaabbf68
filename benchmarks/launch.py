"""Runs a plan on ranks of this machine, under torchrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from runs import Plan

HERE = Path(__file__).resolve().parent
GRACE_SECONDS = 60
"""torchrun itself gives its ranks 30 seconds before it kills them."""


def launch(plan: Plan, ranks: int, timeout: float) -> dict[str, Any]:
    """What rank 0 of the plan wrote. All processes have ended when this returns or raises.

    Raises:
        subprocess.TimeoutExpired: after `timeout` seconds.
        subprocess.CalledProcessError: when a rank fails.
    """
    with TemporaryDirectory() as folder:
        given, out = Path(folder) / "plan.json", Path(folder) / "result.json"
        plan.write(given)
        _run(_torchrun(ranks, given, out), _environment(plan), timeout)
        return json.loads(out.read_text())


def _torchrun(ranks: int, given: Path, out: Path) -> list[str]:
    """`--standalone` finds a free port; torchrun ends the other ranks when one fails."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [*torchrun, str(HERE / "worker.py"), str(given), str(out)]


def _environment(plan: Plan) -> dict[str, str]:
    """Ours, with one thread a rank on CPU cores, and fzero and the examples on the path."""
    path = [*filter(None, [os.environ.get("PYTHONPATH")]), str(HERE.parent), str(HERE.parent / "examples")]
    threads = {"OMP_NUM_THREADS": "1"} if plan.device == "cpu" else {}
    return os.environ | threads | {"PYTHONPATH": os.pathsep.join(path)}


def _run(command: list[str], environment: dict[str, str], timeout: float) -> None:
    """Runs `command`; when it is late or interrupted, ends it and with it its ranks, which torchrun ends on SIGTERM."""
    process = subprocess.Popen(command, env=environment)
    try:
        code = process.wait(timeout)
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(GRACE_SECONDS)
    if code:
        raise subprocess.CalledProcessError(code, command)
