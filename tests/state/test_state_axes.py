"""State along several axes of a mesh, as `partition(..., state=)` lays it: its bytes, its moves, and who follows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from axes import ADAMW, EXAMPLES, SPLIT, WEIGHTS, split_mlp, train
from peaks import Peaks
from torch import Tensor

import fzero
from fzero import FzeroError, VirtualMesh, checkpoint, optim, tree
from fzero.passes import Plan

GRID = VirtualMesh(fsdp=2, tp=2)
BOTH = ("fsdp", "tp")
CUBE = VirtualMesh(fsdp=2, sp=2, tp=2)


def hold(mesh: VirtualMesh = GRID, state: Any = BOTH, **how: Any) -> Any:
    return fzero.partition(WEIGHTS, mesh, split=SPLIT, state=state, **how)


def count_bytes(leaf: Any) -> int:
    """The bytes of a leaf on the fullest rank."""
    layout = leaf.form.layout
    return max(len(layout.part(leaf.index, rank)) for rank in range(layout.world)) * leaf.dtype.itemsize


def test_each_rank_of_a_sequence_holds_a_slice_of_its_own() -> None:
    """Along "sp" ranks have parts of examples, and beside that cut state as ranks along "fsdp" do."""
    w = {"w": torch.randn(32, 12, dtype=torch.float64), "up": torch.randn(32, 12, dtype=torch.float64)}
    held = fzero.partition(w, CUBE, split={"up": ("tp", 0)}, state=("fsdp", "sp"))
    assert [count_bytes(held[name]) for name in ("w", "up")] == [w["w"].nbytes // 4, w["up"].nbytes // 8]
    usual = fzero.partition(w, CUBE, split={"up": ("tp", 0)})
    assert [count_bytes(usual[name]) for name in ("w", "up")] == [w["w"].nbytes // 2, w["up"].nbytes // 4]

    def step(params: Any, state: Any, x: Tensor) -> Any:
        """Each token looks at the first of its example."""

        def loss(params: Any) -> Tensor:
            first = fzero.all_gather(x[:, :1], "sp", 1)[:, :1]
            hidden = fzero.psum((x + first) @ params["w"] @ params["up"].T @ params["up"], "tp")
            return hidden.square().mean()

        value, grads = fzero.value_and_grad(loss)(params)
        updates, state = ADAMW.update(grads, state, params)
        return optim.apply_updates(params, updates), state, value

    def cut(x: Tensor) -> Tensor:
        """The rows of all data ranks: ranks along "sp" have halves of a sequence."""
        return x.unflatten(0, (2, -1)).unflatten(2, (2, -1)).movedim(2, 1).flatten(0, 2)

    x, state = torch.randn(4, 6, 32, dtype=torch.float64), ADAMW.init(held)
    run = fzero.simulate(step, CUBE, data=("fsdp", "sp"))
    found = {(each.op, each.axis) for each in run.trace(held, state, cut(x)).comm()}
    assert {("all_gather", "fsdp+sp"), ("reduce_scatter", "fsdp+sp")} <= found
    params, _, value = run(held, state, cut(x))
    right, _, expected = step(w, ADAMW.init(w), x)
    torch.testing.assert_close((fzero.unpartition(params), value), (right, expected), rtol=1e-12, atol=1e-14)


def test_experts_lie_along_the_axes_that_they_are_not_split_over() -> None:
    held = hold()
    assert {name: leaf.form.layout.shard_axis for name, leaf in held.items()} == {
        name: "fsdp" if name in SPLIT else "fsdp+tp" for name in WEIGHTS
    }
    step = fzero.simulate(train(split_mlp), GRID, data=("fsdp",))
    comm = step.trace(held, ADAMW.init(held), EXAMPLES).comm()
    axes = {each.bucket: each.axis for each in comm if each.op in ("all_gather", "reduce_scatter")}
    assert {axis for bucket, axis in axes.items() if bucket.endswith(":tp")} == {"fsdp"}
    assert {axis for bucket, axis in axes.items() if not bucket.endswith(":tp")} == {"fsdp+tp"}


def test_gradients_of_the_rest_take_one_reduction_over_all_ranks() -> None:
    """Without `state` a leaf that is not split is scattered over "fsdp", and its mean over "tp" is a reduction more."""
    step, found = fzero.simulate(train(split_mlp), GRID, data=("fsdp",)), []
    for state in (None, BOTH):
        held = hold(state=state)
        comm = step.trace(held, ADAMW.init(held), EXAMPLES).comm()
        found.append([(each.op, each.axis) for each in comm if each.bucket == "norm" and each.op != "all_gather"])
    assert found == [[("reduce_scatter", "fsdp"), ("all_reduce", "tp")], [("reduce_scatter", "fsdp+tp")]]


@pytest.mark.parametrize("options", [{}, {"stage": 1}, {"chunk": 256}, {"memory": "6KiB"}], ids=str)
@pytest.mark.parametrize("to", [None, "host", "disk"])
def test_steps_follow_where_state_lies(options: dict[str, Any], to: str | None, tmp_path: Path) -> None:
    place = {"host": fzero.host(), "disk": fzero.disk(tmp_path)}.get(to or "")
    params, state = (held := hold(to=place)), ADAMW.init(held, to=place)
    step, right = fzero.simulate(train(split_mlp), GRID, data=("fsdp",), **options), (WEIGHTS, ADAMW.init(WEIGHTS))
    for _ in range(2):
        *right, expected = train(split_mlp)(*right, EXAMPLES)
        params, state, loss = step(params, state, EXAMPLES)
    torch.testing.assert_close(fzero.unpartition((params, loss)), (right[0], expected), rtol=1e-12, atol=1e-14)
    assert {x.on.mesh.state for x in tree.leaves((params, state))} == {BOTH}


def test_state_that_is_like_parameters_lies_as_they_do() -> None:
    held = hold()
    moments = fzero.partition(tree.map(torch.zeros_like, WEIGHTS), GRID, like=held)
    assert all(a.form.layout == b.form.layout for a, b in zip(tree.leaves(held), tree.leaves(moments)))
    state = fzero.State(params=WEIGHTS, opt_state=tree.map(torch.zeros_like, WEIGHTS))
    found = fzero.partition(state, GRID, split=SPLIT, state=BOTH)
    assert found.opt_state["norm"].form.layout == held["norm"].form.layout


def test_a_step_goes_on_with_state_that_lies_otherwise() -> None:
    """A step keeps no memory of where state lay at its first call."""
    step, found = fzero.simulate(train(split_mlp), GRID, data=("fsdp",)), []
    for state in (None, BOTH, None):
        held = hold(state=state)
        found.append(fzero.unpartition(step(held, ADAMW.init(held), EXAMPLES)[0]))
    torch.testing.assert_close(found[1:], found[:1] * 2, rtol=1e-12, atol=1e-14)


def test_a_plan_and_a_cached_program_have_the_state_of_the_mesh(tmp_path: Path) -> None:
    held = hold()
    args = held, ADAMW.init(held), EXAMPLES
    found = fzero.simulate(train(split_mlp), GRID, data=("fsdp",), memory="6KiB").plan(*args)
    found.save(tmp_path / "plan.json")
    step = fzero.simulate(train(split_mlp), GRID, data=("fsdp",), plan=Plan.load(tmp_path / "plan.json"))
    params, _, _ = step(*args)
    right = train(split_mlp)(WEIGHTS, ADAMW.init(WEIGHTS), EXAMPLES)[0]
    torch.testing.assert_close(fzero.unpartition(params), right, rtol=1e-12, atol=1e-14)


def test_a_checkpoint_loads_where_state_lies_elsewhere_and_back(tmp_path: Path) -> None:
    """Slices of a leaf lie in files that are not side by side, and those of experts in fewer."""
    meshes = [(GRID, None), (GRID, BOTH), (CUBE, ("fsdp", "tp")), (CUBE, ("sp", "tp")), (CUBE, CUBE.names)]
    checkpoint.save(tmp_path / "0", hold(*meshes[0]), step=1)
    for number, (mesh, state) in enumerate(meshes[1:], 1):
        like = fzero.partition(tree.map(torch.zeros_like, WEIGHTS), mesh, split=SPLIT, state=state)
        loaded = checkpoint.load(tmp_path / str(number - 1), like)
        torch.testing.assert_close(fzero.unpartition(loaded), WEIGHTS, rtol=0, atol=0)
        checkpoint.save(tmp_path / str(number), loaded, step=1)
        assert b'"version": 3' in (tmp_path / str(number) / "step-1" / "manifest.json").read_bytes()[:200]
    back = checkpoint.load(tmp_path / str(len(meshes) - 1), hold(*meshes[0]))
    torch.testing.assert_close(fzero.unpartition(back), WEIGHTS, rtol=0, atol=0)


@pytest.mark.parametrize("axes", ["tp", ("sp", "tp")], ids=str)
@pytest.mark.parametrize("layers", [("dense", "experts"), ("experts",)], ids=str)
def test_the_predicted_peak_is_that_of_a_run(axes: Any, layers: tuple[str, ...]) -> None:
    """The second leaf of a layer lies on the last ranks, and that of experts on the last along the rest of the axes."""
    whole = {layer: {name: torch.ones(4, 64) for name in ("a", "b")} for layer in layers}
    held = fzero.partition(whole, CUBE, split={"experts.*": (axes, 0)}, state=CUBE.names)

    def compute(params: Any) -> Any:
        return [layer["b"] * 2 for layer in params.values()]

    step = fzero.simulate(compute, CUBE, data=CUBE.names, donate=False)
    program = step.program(held)
    step(held, watch=(peaks := Peaks(program)).watch)
    assert program.memory().peak == peaks.most["device"]


WRONG = {
    "no axis": (("pp",), "mesh axis 'pp': this mesh has"),
    "twice": (("fsdp", "fsdp"), "mesh axes: are .*each once"),
    "a string": ("fsdp", "state: is 'fsdp'; give a list or a tuple"),
    "none": ((), "mesh axes: are"),
    "all of a split": (
        ("tp",),
        "split 'up': names 'tp', over which .* with state along .*'tp'.* cuts all state",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_axes_that_cannot_be_are_refused(name: str) -> None:
    state, words = WRONG[name]
    with pytest.raises(FzeroError, match=words):
        hold(state=state)


def test_leaves_of_one_step_lie_along_the_same_axes() -> None:
    step = fzero.simulate(lambda a, b: a["norm"].sum() + b["norm"].sum(), GRID, data=("fsdp", "tp"))
    with pytest.raises(
        FzeroError, match=r"down: .* on VirtualMesh\(fsdp=2, tp=2\) as .*; give partition state=\('fsdp', 'tp'\) for"
    ):
        step(hold(), hold(state=None))


def test_the_usual_axis_is_no_other_state() -> None:
    assert hold(state=("fsdp",))["norm"].on is hold(state=None)["norm"].on
    nodes = VirtualMesh(node=2, local=2, tp=2)
    assert nodes.lay_state(("local", "node")) == nodes != nodes.lay_state(("node",)) == nodes.lay_state(["node"])
