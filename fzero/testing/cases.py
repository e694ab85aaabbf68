"""Cases: the train steps that a pass is tried on, from small to large, and the smaller ones of a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from fzero.base.mesh import VirtualMesh
from fzero.testing.steps import SGD, Op, Optimizer, TrainStep

_TWO, _THREE = VirtualMesh(fsdp=2), VirtualMesh(fsdp=3)
_DENSE, _LINEAR = Op("dense"), Op("linear", -1, 0, 1)
_SMALL = TrainStep(_TWO, (_DENSE,), width=5)

CORNERS = (
    _SMALL,
    replace(_SMALL, mesh=_THREE, ops=(_DENSE, _LINEAR), layers=2, optimizer=Optimizer("momentum")),
    replace(_SMALL, mesh=VirtualMesh(replica=2, fsdp=2)),
    replace(_SMALL, mesh=VirtualMesh(node=2, local=2), ops=(_DENSE, _LINEAR, Op("linear", -1, 0, 2)), layers=3),
    replace(_SMALL, stage=1, microbatches=2),
    replace(_SMALL, stage=2, layers=2, ops=(_DENSE, _LINEAR), donate=False),
    replace(_SMALL, layers=3, loop="scan"),
    replace(_SMALL, microbatches=2, loop="each"),
    replace(_SMALL, microbatches=2, loop="once"),
    replace(_SMALL, mesh=VirtualMesh(fsdp=1)),
    replace(_SMALL, mesh=_THREE, ops=(Op("tied"), Op("norm", remat=True)), optimizer=Optimizer("adamw", 0.1)),
)
"""One step for each way of ranks, stages, accumulation, loops and donation."""


def list_corners(dtypes: Sequence[str]) -> Iterator[TrainStep]:
    """`CORNERS` with leaves of the first of these dtypes, and the first of them in each other dtype."""
    for step in CORNERS:
        steady = dtypes[0] != "bfloat16" or step.optimizer.name != "adamw"
        yield _of_dtype(step if steady else replace(step, optimizer=SGD), dtypes[0])
    yield from (_of_dtype(CORNERS[1], dtype) for dtype in dtypes[1:])


def _of_dtype(step: TrainStep, dtype: str) -> TrainStep:
    return replace(step, dtypes=(dtype,) * 4, compute="float64" if dtype == "float64" else "float32")


def list_smaller(step: TrainStep) -> Iterator[TrainStep]:
    """Steps that are simpler than a step in one respect each, the largest changes first."""
    plain: dict[str, Any] = {
        "penalties": (), "others": (), "averaged": False, "functorch": False, "optimizer": SGD, "loss": "mean",
        "loop": "", "microbatches": 1, "layers": 1, "rows": 1, "stage": 3, "donate": True,
    }  # fmt: skip
    for field, value in plain.items():
        if getattr(step, field) != value:
            yield replace(step, **{field: value})
    for mesh in (_TWO, _THREE, VirtualMesh(replica=2, fsdp=2)):
        if mesh.size() < step.mesh.size():
            yield replace(step, mesh=mesh)
    if len(step.ops) > 1:
        yield from (replace(step, ops=(op,)) for op in step.ops)
        yield from (replace(step, ops=step.ops[:i] + step.ops[i + 1 :]) for i in range(len(step.ops)))
    for i, op in enumerate(step.ops):
        for simpler in dict.fromkeys([_DENSE, Op(op.name), op._replace(through=())]):
            if simpler != op and not (op.name == "dense" and simpler == _DENSE and not op.through and not op.remat):
                yield replace(step, ops=(*step.ops[:i], simpler, *step.ops[i + 1 :]))
    if len(set(step.dtypes)) > 1:
        yield replace(step, dtypes=(step.dtypes[0],) * 4)
    yield from (replace(step, width=width) for width in range(1, step.width))
