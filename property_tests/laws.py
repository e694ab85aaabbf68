"""How laws of steps are run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import example, settings

from fzero import VirtualMesh
from fzero.testing.steps import OPERATIONS, PENALTIES, THROUGH, Of, Op, Optimizer, Penalty, TrainStep

_CASES = settings.default.max_examples
slow = settings(max_examples=max(1, _CASES // (5 if _CASES > 30 else 10)))
"""For laws that trace and run a step, at up to a second a case: a fifth of the cases of the deep profile, and a tenth
of those of the quick one, which are the same each time."""


def everything(law: Callable[..., Any]) -> Callable[..., Any]:
    """Try the steps of `EVERYTHING` first."""
    for step in EVERYTHING:
        law = example(step)(law)
    return law


_OPS, _THROUGH = ([name for name in names if name not in ("low", "rounded")] for names in (OPERATIONS, THROUGH))
_MESHES = (
    VirtualMesh(fsdp=2),
    VirtualMesh(fsdp=3),
    VirtualMesh(replica=2, fsdp=2),
    VirtualMesh(fsdp=2, replica=2),
    VirtualMesh(fsdp=4),
)
EVERYTHING = tuple(
    TrainStep(
        mesh=mesh,
        ops=(
            Op("dense", -1, 0, 0, tuple(_THROUGH[i::10])),
            *(Op(name, -1, 0, 1, remat=i % 2 == 0) for name in _OPS[i::5]),
            Op("linear", -1, 0, 1, tuple(_THROUGH[i + 5 :: 10]), remat=True),
        ),
        penalties=tuple(Penalty(name, j) for j, name in enumerate(PENALTIES)),
        optimizer=Optimizer(("adamw", "momentum", "masked", "adam", "squashed")[i], (None, 0.1)[i % 2], schedule=i > 2),
        others={"a": [Of((0, 2)), Of(())], "b": Of((3, 3))},
        layers=2,
        width=5,
        microbatches=1 if "center" in _OPS[i::5] else 2,
        averaged=i % 2 == 0,
        functorch=i > 1,
        stage=(3, 1, 2, 3, 1)[i],
        donate=i != 1,
    )
    for i, mesh in enumerate(_MESHES)
)
"""Steps that together have every operation and every function of `THROUGH` but the ones that round to bfloat16."""
