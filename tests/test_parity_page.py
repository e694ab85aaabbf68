"""docs/parity.md: complete, and within the limits that `benchmarks/parity.py` has; and the parts of that benchmark."""

from __future__ import annotations

import sys

import pytest
import torch
from processes import run
from test_docs import ROOT, rows
from torch.distributed.device_mesh import DeviceMesh

sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "examples")]

import parity  # noqa: E402
import parity_rank  # noqa: E402

PAGE = (ROOT / "docs" / "parity.md").read_text()
HERE = [name for name in parity.CONTENDERS if "DeepSpeed" not in name]


def names(head: str) -> list[str]:
    return [name.strip("`") for name, *_ in rows(PAGE, head)]


def test_the_page_has_every_contender_in_every_precision() -> None:
    found = {(name, precision) for name, precision, *_ in rows(PAGE, "contender ")}
    assert found >= {(name, precision) for name in HERE for precision in parity.DTYPES}


def test_the_page_has_every_optimizer_and_schedule() -> None:
    assert names("optimizer ") == [*parity.references.CASES, "muon"]
    assert names("schedule ") == list(parity.schedule_references.CASES)
    listed = {name.strip("`") for name, *_ in rows((ROOT / "docs" / "optimizers.md").read_text(), "optimizer ")}
    assert listed <= {name.partition(",")[0] for name in names("optimizer ")}


def test_the_figures_on_the_page_are_within_their_limits() -> None:
    beyond = [
        f"{name} in {precision}"
        for name, precision, *_, distance, _ in rows(PAGE, "contender ")
        if float(distance) > parity.LIMITS[precision]
    ]
    assert all(name.startswith("DeepSpeed") for name in beyond)  # nobody here can mend a peer: the page names it
    assert f"Beyond: {', '.join(beyond) or 'none'}." in PAGE
    for _, _, moved, *singles_and_doubles in rows(PAGE, "optimizer "):
        figures = [float(figure) for figure in singles_and_doubles]
        for dtype, found in zip((torch.float32, torch.float64), (figures[:2], figures[2:])):
            assert max(found) <= parity.OPTIMIZER_LIMIT * torch.finfo(dtype).eps < float(moved)
    for _, _, *figures in rows(PAGE, "schedule "):
        assert max(map(float, figures)) <= parity.SCHEDULE_LIMIT


def test_what_is_too_far_from_its_reference_is_named() -> None:
    case, schedule = parity.references.CASES["adam"], parity.schedule_references.CASES["linear_schedule"]
    right = parity.compare_optimizer("adam", case), parity.compare_schedule("linear", schedule)
    other = case._replace(optimizer=parity.optim.adam(1.001e-3))
    wrong = (
        parity.compare_optimizer("off", other),
        parity.compare_schedule("late", schedule._replace(schedule=lambda count: schedule.schedule(count - 1))),
    )
    assert parity.find_wrong([right[0], wrong[0]], [right[1], wrong[1]]) == ["off", "late"]
    losses = {"fp32": {parity.REFERENCE: [1.0, 2.0], "same": [1.0, 2.00001], "other": [1.0, float("nan")]}}
    assert parity.find_wrong_losses(losses) == ["other in fp32"]


def train(mesh: DeviceMesh) -> dict[str, list[float]]:
    """Losses of three contenders, of a few steps that pass the overflow."""
    steps = parity_rank.OVERFLOW + 2
    return {name: parity_rank.losses(name, torch.float16, steps, mesh) for name in (parity.HALVES, "fzero, stage 3")}


def test_contenders_train_alike() -> None:
    found, _ = run(2, train)
    first, second = found.values()
    assert second == pytest.approx(first, rel=1e-4)  # in fp16; seen: 4e-6
    assert first[0] > first[-1]
