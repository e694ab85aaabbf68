"""The ways to train that are compared. Each takes the same module on the same mesh, AdamW with the same numbers.

A contender is a function of `Setup`'s type; to add one, write it and name it in the `CONTENDERS` of its file.
"""

from __future__ import annotations

from functools import partial

import broken
import deepspeed_steps
import fzero_steps
import matrix
import peers
from environments import DEEPSPEED, OURS, Environment, deepspeed_version
from training import Setup

CONTENDERS: dict[str, Setup] = {
    **fzero_steps.CONTENDERS,
    **peers.CONTENDERS,
    **deepspeed_steps.CONTENDERS,
    **matrix.CONTENDERS,
    **broken.CONTENDERS,
}
BUDGET = "fzero-memory-"
"""With a number of bytes behind it the name of fzero's step with this budget."""
TRAINING = tuple(name for name in CONTENDERS if name not in ("floor", "matrix", "broken"))
"""Those whose losses must agree."""


def set_up_of(name: str) -> Setup:
    """The contender of a name."""
    if name.startswith(BUDGET):
        return partial(fzero_steps.sharded, calibrate=True, memory=int(name.removeprefix(BUDGET)))
    return CONTENDERS[name]


def environment(name: str) -> Environment:
    """Where a contender's ranks run."""
    return DEEPSPEED if name in deepspeed_steps.CONTENDERS else OURS


def obstacle(name: str, device: str) -> str | None:
    """Why a contender cannot run here; None where it can."""
    if name.endswith("-graph") and device == "cpu":
        return "CUDA graphs need a GPU"
    if name in deepspeed_steps.CONTENDERS and device != "cpu":
        return "its environment is made for CPU cores"
    if name in deepspeed_steps.CONTENDERS and deepspeed_version() is None:
        return "not installed; benchmarks/deepspeed_environment.sh does that"
    return None


def able(names: tuple[str, ...], device: str) -> tuple[str, ...]:
    """Those of `names` that can run here. Prints why others cannot.

    Raises:
        SystemExit: for a name that nobody has, or when none is left.
    """
    unknown = [name for name in names if name not in CONTENDERS and not name.startswith(BUDGET)]
    if unknown:
        raise SystemExit(f"no contender is named {', '.join(unknown)}; there are {', '.join(CONTENDERS)}")
    obstacles = {name: obstacle(name, device) for name in names}
    for name, reason in obstacles.items():
        if reason:
            print(f"{name} is left out: {reason}")
    left = tuple(name for name, reason in obstacles.items() if reason is None)
    if not left:
        raise SystemExit("no contender is left")
    return left
