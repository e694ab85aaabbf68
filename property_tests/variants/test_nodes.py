"""Laws of meshes whose state lies along two axes: drawn steps are plain torch's, and stay so with hpZ and MiCS."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import example, given, settings
from hypothesis import strategies as st

from fzero import FzeroError, VirtualMesh, check_equivalence
from fzero.testing import TrainStep, check_pass, strategies
from fzero.testing.steps import Op
from fzero.variants.hpz import hpz
from fzero.variants.mics import mics

MESHES = [VirtualMesh(node=2, local=2), VirtualMesh(replica=2, node=1, local=2), VirtualMesh(node=2, local=1)]

OPS = (Op("dense"), Op("linear", x=1, layer=1), Op("dense", x=2, layer=2))
STEP = TrainStep(MESHES[0], OPS, layers=3, width=4, rows=2)
"""A step that gathers its layers twice."""


@example(STEP, MESHES[0])
@given(strategies.train_steps(max_world=1, max_ops=2), st.sampled_from(MESHES))
@settings(max_examples=max(1, settings.default.max_examples // 15))  # each example runs four programs, twice or more
def test_gathers_by_node_and_in_two_hops_keep_results_bit_for_bit(step: TrainStep, mesh: VirtualMesh) -> None:
    step = replace(step, mesh=mesh)
    near = {"rtol": step.tolerance, "atol": step.tolerance}
    check_equivalence(step, step.state(), step.batch(), ranks=mesh, stage=step.stage, **near)
    for rewrite in (hpz, mics):
        try:
            check_pass(rewrite, cases=[step])
        except FzeroError as error:  # which says so where nothing is gathered, or nothing twice
            assert step != STEP
            assert "refuses all 1 steps, the last with: pass " in str(error) or "changes none" in str(error)
