"""State of passes: it lies as its parameter does, or is each rank's own, and goes on on another number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fzero
from fzero import FzeroError, Program, ops, passes

aten = torch.ops.aten
BOTH = fzero.VirtualMesh(replica=2, fsdp=2)
WEIGHT = torch.arange(15.0).view(5, 3)


def train_step(params: Any, x: Tensor) -> Any:
    grads = fzero.grad(lambda params: (x @ params["w"]).square().mean() + params["b"].sum())(params)
    return fzero.tree.map(lambda p, g: p - 0.1 * g, params, grads)


def begin(rewrite: Any, mesh: Any, stage: int = 3, before: str = "bucket") -> tuple[Any, Any, Tensor]:
    step = fzero.simulate(train_step, mesh, passes=passes.insert(passes.defaults(stage=stage), rewrite, before=before))
    params = fzero.partition({"w": WEIGHT, "b": torch.ones(3)}, mesh)
    return step, params, torch.arange(20.0).view(4, 5) / 10


def average_weights(program: Program) -> Program:
    """Keep the mean of w over all steps, as w lies."""
    program, average = program.copy().add_state("mean.w", like="w", initial=2.0)
    program, count = program.step_count()
    new = program.output.args[0][[x.path for x in program.results].index("w")]
    with program.graph.inserting_before(program.output):
        weight = program.emit(aten.reciprocal.default, program.emit(aten.add.Scalar, count, 1))
        step = program.emit(aten.mul.Tensor, program.emit(aten.sub.Tensor, new, average), weight)
        program.return_state("mean.w", program.emit(aten.add.Tensor, average, step))
    return program


def keep_errors(program: Program) -> Program:
    """Keep, for each rank, its own gradient of w, whole; and for each replica its mean, in slices."""
    program = program.copy()
    (scatter,) = [
        x for x in program.graph.find_nodes(op="call_function", target=ops.scatter) if x.args[0].meta["val"].ndim == 2
    ]
    program, _ = program.add_state("own", like=scatter, differs=program.mesh.names)
    program, _ = program.add_state("mine", like="w", differs=("replica",))
    with program.graph.inserting_before(scatter):
        program.return_state("own", program.emit(aten.reshape.default, scatter.args[0], [-1]))
        program.return_state("mine", program.emit(ops.scatter, *scatter.args, replicas=False))
    return program


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_state_lies_as_its_parameter_and_counts_steps(stage: int) -> None:
    step, params, x = begin(average_weights, fzero.VirtualMesh(fsdp=2), stage)
    state, seen = step.init_pass_state(params, x), []
    assert state["mean.w"].form.layout == params["w"].form.layout
    assert torch.equal(fzero.unpartition(state["mean.w"]), torch.full((5, 3), 2.0))
    for _ in range(3):
        params, state = step(params, x, pass_state=state)
        seen.append(fzero.unpartition(params["w"]).clone())
    assert int(fzero.unpartition(state["passes.step_count"])) == 3
    torch.testing.assert_close(fzero.unpartition(state["mean.w"]), torch.stack(seen).mean(0))


def test_state_goes_on_on_another_number_of_ranks(tmp_path: Path) -> None:
    ends = []
    for world in (2, 4):
        step, params, x = begin(average_weights, fzero.VirtualMesh(fsdp=2))
        state = step.init_pass_state(params, x)
        params, state = step(params, x, pass_state=state)
        fzero.checkpoint.save(tmp_path / str(world), {"params": params, "state": state}, step=1)
        step, fresh, x = begin(average_weights, fzero.VirtualMesh(fsdp=world))
        like = {"params": fresh, "state": step.init_pass_state(fresh, x)}
        held = fzero.checkpoint.load(tmp_path / str(world), like)
        _, state = step(held["params"], x, pass_state=held["state"])
        ends.append(fzero.unpartition(state["mean.w"]))
    torch.testing.assert_close(*ends)


def test_state_is_each_ranks_own(tmp_path: Path) -> None:
    """Four ranks: a whole gradient of each; for each of two replicas the mean of its two ranks, in slices."""
    step, params, x = begin(keep_errors, BOTH)
    _, state = step(params, x, pass_state=step.init_pass_state(params, x))
    rows = [fzero.grad(lambda w, row=row: (row @ w).square().mean())(WEIGHT) for row in x.split(1)]
    expected = torch.stack(rows).view(2, 2, 5, 3)
    torch.testing.assert_close(fzero.unpartition(state["own"]), expected)
    torch.testing.assert_close(fzero.unpartition(state["mine"]), expected.mean(1))
    fzero.checkpoint.save(tmp_path / "at", state, step=1)
    for path, leaf in fzero.checkpoint.load(tmp_path / "at", step.init_pass_state(params, x)).items():
        assert torch.equal(leaf.local, state[path].local)
    step, params, x = begin(keep_errors, fzero.VirtualMesh(replica=2, fsdp=1))
    fresh = step.init_pass_state(params, x)
    held = fzero.checkpoint.load(tmp_path / "at", {"mine": fresh["mine"]}, strict=False)
    torch.testing.assert_close(fzero.unpartition(held["mine"]), expected.mean(1))
    with pytest.raises(FzeroError, match=r"own: .*\[2, 2, 5, 3\]"):
        fzero.checkpoint.load(tmp_path / "at", fresh)


def test_first_values_are_drawn_alike_on_any_mesh() -> None:
    def draw(program: Program) -> Program:
        program, _ = program.copy().add_state(
            "like", like="w", initial=lambda shape, g: torch.randn(shape, generator=g)
        )
        program, _ = program.add_state(
            "mine", (3,), initial=lambda shape, g: torch.rand(shape, generator=g), differs=("fsdp",)
        )
        return program

    one, two = (
        step.init_pass_state(params, x) for step, params, x in (begin(draw, fzero.VirtualMesh(fsdp=n)) for n in (1, 2))
    )
    assert torch.equal(*(fzero.unpartition(each["like"]) for each in (one, two)))
    assert torch.equal(fzero.unpartition(two["mine"]), fzero.unpartition(one["mine"]).expand(2, 3))


def test_equivalence_carries_the_state() -> None:
    """The step counts to two: the second step is the first with no gradients, so that it differs at step 2."""

    def forget(program: Program) -> Program:
        program, count = program.copy().step_count()
        for node in program.graph.find_nodes(op="call_function", target=ops.scatter):
            with program.graph.inserting_after(node):
                first = program.emit(aten.eq.Scalar, count, 0)
            with program.graph.inserting_after(first):
                kept = program.emit(aten.mul.Tensor, node, first)
            node.replace_all_uses_with(kept, delete_user_cb=lambda user, kept=kept: user is not kept)
        return program

    state, x = ({"w": WEIGHT, "b": torch.ones(3)},), (torch.arange(20.0).view(4, 5) / 10,)
    given: Any = {"ranks": BOTH, "passes": passes.insert(passes.defaults(stage=3), forget, before="bucket")}
    fzero.check_equivalence(train_step, state, x, **given)
    with pytest.raises(FzeroError, match="step 2, rank"):
        fzero.check_equivalence(train_step, state, x, steps=2, **given)


def drift(program: Program) -> Program:
    """Return a replica's own weights as the step's."""
    program, own = program.copy().add_state("own", like="w", differs=("replica",))
    at = [x.path for x in program.results].index("w")
    new = program.output.args[0][at]
    with program.graph.inserting_before(program.output):
        returned = list(program.output.args[0])
        returned[at] = program.emit(aten.add.Tensor, new, own)
        program.output.args = (returned,)
    return program


def adds(*args: Any, **kwargs: Any) -> Any:
    def rewrite(program: Program) -> Program:
        return program.copy().add_state("s", *args, **kwargs)[0]

    return rewrite


MISTAKES = {
    "own weights as the step's": (drift, "result 'w' is a slice of w that differs along .'replica'."),
    "no leaf": (adds(like="v"), "is like 'v', which is no leaf of the step; give a leaf's path"),
    "both": (adds((3,), like="w"), r"has shape=\(3,\) and like=w; give a state's shape, or a leaf"),
    "no axis": (adds((3,), differs=("tp",)), "differs along 'tp', and this mesh has"),
    "replicated and own": (adds((3,), replicated=True, differs=("fsdp",)), "is replicated, and differs along"),
    "replicated slices": (adds(like="w", replicated=True), "is replicated, and like a leaf that ranks have slices of"),
    "another shape": (adds((3,), initial=lambda *_: torch.ones(2)), r"its initial gives \[2\] for the shape \[3\]"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_named(name: str) -> None:
    rewrite, words = MISTAKES[name]
    step, params, x = begin(rewrite, BOTH)
    with pytest.raises(FzeroError, match=words):
        step.init_pass_state(params, x)
