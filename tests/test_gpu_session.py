"""The GPU session's jobs on a core: one that raises, dies or hangs loses nothing of the others."""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import json
import os
import runpy
import subprocess
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from processes import run
from torch.distributed.device_mesh import DeviceMesh

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "benchmarks" / "gpu.py"


class Forked(subprocess.Popen[bytes]):
    """A process that runs a script as a copy of this process, which has imported torch: that takes four seconds. Other
    commands, such as torchrun, are executed."""

    def __init__(self, command: list[str], *, env: dict[str, str], **named: Any) -> None:
        is_script = command[0] == sys.executable and command[1].endswith(".py")
        begin = functools.partial(run_alone, command[1:], env) if is_script else None
        super().__init__(command, env=env, preexec_fn=begin, **named)


def run_alone(argv: list[str], environment: dict[str, str]) -> None:
    """Run a script in this process, which has been forked for that, and end the process."""
    os.closerange(3, 1024)  # also the pipe on which `Popen` waits until the command begins
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = [str(Path(argv[0]).parent), *environment["PYTHONPATH"].split(os.pathsep)]
    sys.argv, status = argv, 0
    sys.stdout = sys.stderr = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    try:
        runpy.run_path(argv[0], run_name="__main__")
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    os._exit(status)


def use(mesh: DeviceMesh, flags: list[str], environment: dict[str, str]) -> int:
    """The exit status of `benchmarks/gpu.py` in this process, which has imported torch."""
    dist.destroy_process_group()
    os.environ.update(environment)
    sys.path.insert(0, str(SCRIPT.parent))
    sys.argv = [str(SCRIPT), *flags]
    gpu = importlib.import_module(SCRIPT.stem)
    gpu.subprocess = SimpleNamespace(Popen=Forked, TimeoutExpired=subprocess.TimeoutExpired)  # type: ignore[attr-defined]
    with contextlib.redirect_stdout(io.StringIO()):
        return gpu.main(gpu.parse())


def dry_run(folder: Path, *flags: str, path: str | None = None, is_alone: bool = False) -> tuple[int, dict[str, Any]]:
    """The exit status of `benchmarks/gpu.py` on a core, and the jobs in its record. Jobs have processes of their own,
    which are forked; so has the script where it `is_alone`, and that one is executed."""
    record = folder / "record.json"
    given = [*flags, "--device", "cpu", "--json", str(record)]
    environment = {"PYTHONPATH": str(ROOT)} | ({} if path is None else {"PATH": path})
    if is_alone:
        command = [sys.executable, str(SCRIPT), *given]
        status = subprocess.run(command, env={**os.environ, **environment}, timeout=280, check=False).returncode
    else:
        (status,) = run(1, use, given, environment, timeout=280, lost=())
    return status, json.loads(record.read_text())["jobs"]


def test_checks_go_on_behind_one_that_raises_and_one_that_dies(tmp_path: Path) -> None:
    failed, jobs = dry_run(
        tmp_path, "checks", "--broken", "--checks", "save and load,fp32,graph", "--contenders", "fsdp2,fzero-3"
    )
    assert failed == 2
    assert jobs["fails"]["status"] == "AssertionError: this check is broken" and "Traceback" in jobs["fails"]["log"]
    assert jobs["dies"]["status"] == "exit status 3"
    assert [jobs[name]["status"] for name in ("save and load", "fp32", "two ranks", "losses agree")] == ["ok"] * 4
    assert jobs["graph"]["status"] == "left out"
    assert jobs["fp32"]["result"]["apart"] <= 1e-4 and jobs["two ranks"]["result"]


def test_contenders_go_on_behind_one_that_raises_in_the_middle(tmp_path: Path) -> None:
    failed, jobs = dry_run(tmp_path, "1.5B", "--tiny", "--broken", "--contenders", "fsdp2,fzero-3", path="/nowhere")
    assert failed == 1  # and no git is found on the path
    assert list(jobs) == ["fsdp2", "broken", "fzero-3", "losses agree"]
    assert "RuntimeError: this contender is broken" in jobs["broken"]["log"]
    assert [jobs[name]["status"] for name in ("fsdp2", "fzero-3", "losses agree")] == ["ok"] * 3
    for name in ("fsdp2", "fzero-3"):
        assert jobs[name]["tokens"] > 0 and jobs[name]["mfu"] > 0 and jobs[name]["peak"] > 0


@pytest.mark.parametrize(("limit", "seconds", "status"), [("0.1", "400", "stopped"), ("60", "5", "no time")])
def test_a_job_that_takes_too_long_is_ended_and_none_begins_without_time(
    tmp_path: Path, limit: str, seconds: str, status: str
) -> None:
    failed, jobs = dry_run(
        *(tmp_path, "0.4B", "--tiny", "--contenders", "fzero-3", "--limit", limit, "--seconds", seconds),
        is_alone=status == "no time",
    )
    assert failed >= 1 and jobs["fzero-3"]["status"].startswith(status)
