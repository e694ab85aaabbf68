"""Where and with what a benchmark ran."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from environments import deepspeed_version


def machine() -> dict[str, Any]:
    """Date, command, commit, versions, processor and GPU, ready for JSON."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python", *sys.argv]),
        "commit": commit(),
        "torch": torch.__version__,
        "deepspeed": deepspeed_version(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else None,
    }


def add_runs(path: Path | None, runs: dict[str, dict[str, Any]]) -> None:
    """Add runs to the JSON of a file, each with where and with what it ran. Runs of other names stay."""
    if path is not None:
        before = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(before | {name: machine() | run for name, run in runs.items()}, indent=1) + "\n")


def commit() -> str | None:
    """The commit of this checkout, with "-dirty" where files differ from it; None outside git and without it."""
    if shutil.which("git") is None:
        return None
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude", "*"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


def processor() -> str:
    """The processor's name as Linux has it, else as Python does."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.processor())
