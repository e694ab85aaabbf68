"""What commands have in common: the flags of those that start ranks, and the files that they write."""

from __future__ import annotations

import argparse
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from runs import SIZES


def parser(documentation: str | None, sized: bool = True) -> argparse.ArgumentParser:
    """A parser of the flags that all of them take; with `sized` those of a run of one size, too."""
    made = argparse.ArgumentParser(description=(documentation or "").partition("\n")[0])
    if sized:
        made.add_argument("--size", choices=SIZES, default="S")
        made.add_argument("--ranks", type=int, help="2 on cpu, 1 on cuda")
        made.add_argument("--bf16", action="store_true", help="cast weights to bf16 for compute and all-gathers")
    made.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="gloo on cores, or NCCL on GPUs")
    made.add_argument("--json", type=Path, help="a file for every figure, the versions and the machine")
    made.add_argument("--timeout", type=float, default=1800, help="seconds for a launch")
    return made


def parsed(of: argparse.ArgumentParser) -> argparse.Namespace:
    """The flags of the command line, with the number of ranks that the device asks for."""
    given = of.parse_args()
    given.ranks = given.ranks or {"cpu": 2, "cuda": 1}[given.device]
    return given


def picture(path: str) -> Path:
    """The file of a picture. Without matplotlib an error, before anything is measured."""
    if find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError('matplotlib is not installed: pip install "fzero[plot]"')
    return Path(path)


def write(path: Path | None, record: dict[str, Any]) -> None:
    """The record, as JSON, where a file was asked for. Whoever reads the file meanwhile finds the last record whole."""
    if path:
        new = path.with_suffix(".new")
        new.write_text(json.dumps(record, indent=1) + "\n")
        new.replace(path)
