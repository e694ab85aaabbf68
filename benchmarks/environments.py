"""The Python environments that ranks run in: this one, and DeepSpeed's."""

from __future__ import annotations

import os
import sys
from importlib.metadata import distributions
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]


class Environment(NamedTuple):
    """A Python interpreter, and variables that ranks have in it beside this process's own."""

    python: Path
    variables: tuple[tuple[str, str], ...] = ()

    def of_ranks(self, device: str) -> dict[str, str]:
        """All variables of a rank: one thread each on CPU cores; fzero and the examples on the path."""
        threads = {"OMP_NUM_THREADS": "1"} if device == "cpu" else {}
        modules = [*filter(None, [os.environ.get("PYTHONPATH")]), str(ROOT), str(ROOT / "examples")]
        programs = [str(self.python.parent), os.environ.get("PATH", "")]  # ninja, for one
        paths = {"PYTHONPATH": os.pathsep.join(modules), "PATH": os.pathsep.join(programs)}
        quiet = {"PYTHONWARNINGS": "ignore::FutureWarning"}  # of names of collectives that torch 2.11 has no others for
        return os.environ | threads | paths | quiet | dict(self.variables)


_FOLDER = ROOT / "build" / "deepspeed"

OURS = Environment(Path(sys.executable))
DEEPSPEED = Environment(
    _FOLDER / "bin" / "python",
    (
        ("DS_ACCELERATOR", "cpu"),
        ("TORCH_EXTENSIONS_DIR", str(_FOLDER / "extensions")),  # what it compiles
    ),
)


def deepspeed_version() -> str | None:
    """What is installed in DeepSpeed's environment; None where there is none."""
    folders = [str(folder) for folder in _FOLDER.glob("lib/python*/site-packages")]
    return next((found.version for found in distributions(name="deepspeed", path=folders)), None)
