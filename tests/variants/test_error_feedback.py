"""Error feedback: what int8 rounding leaves is state of the step, that the user holds, saves and gives back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from mlp import Held, Run, on_real, on_virtual
from processes import run, run_cases, values
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import fzero
from fzero import FzeroError, tree
from fzero.variants.int8_mean import int8_mean
from fzero.variants.int8_scatter import int8_scatter

HALF, ALL = range(3), range(6)
REST = range(3, 6)


def test_it_begins_as_zeros_a_row_a_rank() -> None:
    state = on_virtual("int8_scatter", 3, 4).begin().pass_state
    assert {path: tuple(leaf.shape) for path, leaf in state.items()} == {
        "int8_error.0.2": (4, 4 * 96), "int8_error.1.1": (4, 4 * 1248), "int8_error.2.0": (4, 4 * 448),
    }  # fmt: skip
    assert all(not leaf.local.any() for leaf in state.values())


def test_a_bucket_may_have_one_leaf() -> None:
    """Without state of its own, and with a gradient as the step's result."""
    mesh, passes = fzero.VirtualMesh(fsdp=2), fzero.passes.defaults(stage=3)
    step = fzero.simulate(
        fzero.grad(lambda p, x: (x @ p["w"]).square().mean()),
        mesh,
        passes=fzero.passes.insert(passes, int8_scatter, before="release"),
    )
    p, x = fzero.partition({"w": torch.ones(4, 4)}, mesh), torch.eye(4)
    state = step.init_pass_state(p, x)
    assert list(state) == ["int8_error.0.w"]
    grads, _ = step(p, x, pass_state=state)
    torch.testing.assert_close(fzero.unpartition(grads)["w"], torch.full((4, 4), 0.125), rtol=1e-2, atol=0)


@pytest.mark.parametrize("rewrite", [int8_scatter, int8_mean])
def test_an_overflow_shows_and_is_not_kept(rewrite: Any) -> None:
    """The gradient of a batch that overflows is not finite, so that a loss scale falls. The next one is as before."""
    mesh, passes = fzero.VirtualMesh(fsdp=2), fzero.passes.defaults(stage=3)
    step = fzero.simulate(
        fzero.grad(lambda p, x: (x @ p["w"]).sum()),
        mesh,
        passes=fzero.passes.insert(passes, rewrite, before="release"),
    )
    p, x = fzero.partition({"w": torch.ones(4, 4)}, mesh), torch.eye(4)
    state = step.init_pass_state(p, x)
    for scale in (1.0, torch.inf, 1.0):
        returned = step(p, (x * scale).nan_to_num(0, torch.inf), **({"pass_state": state} if state else {}))
        grads, state = returned if state else (returned, state)
        found = fzero.unpartition(grads)["w"]
        assert found.isfinite().all() == (scale == 1.0)
    torch.testing.assert_close(found, torch.full((4, 4), 0.5), rtol=1e-2, atol=0)


def test_it_is_what_rounding_takes_from_gradient_and_error() -> None:
    """Rounding loses nothing: what all ranks sent and what they keep add up to their gradients."""
    sent, exact = (on_virtual(variant, 3, 2) for variant in ("int8_scatter", None))
    after, expected = (run.train(run.begin(), range(1))[0] for run in (sent, exact))
    mu, mu_exact = ({leaf.path: leaf for leaf in moments(held)} for held in (after, expected))
    left = {path.rpartition(".")[2]: fzero.unpartition(leaf) for path, leaf in after.pass_state.items()}
    for path, leaf in mu.items():
        layout, index = leaf.form.layout, leaf.index
        rows = left[layout.bucket].mean(0)  # [N * S] the mean over ranks of what they kept back
        where = layout.leaf_ranges[index]
        whole = fzero.unpartition(leaf).view(-1) / 0.1 + rows[where.start : where.stop]  # 0.1 is 1 - b1
        torch.testing.assert_close(whole, fzero.unpartition(mu_exact[path]).view(-1) / 0.1, rtol=1e-4, atol=1e-6)


def moments(held: Held) -> list[Any]:
    """Adam's first moments, which after one step are a tenth of the gradients."""
    found = [(path, leaf) for path, leaf in zip(tree.paths(held.opt_state), tree.leaves(held.opt_state))]
    return [leaf for path, leaf in found if "mu" in path.split(".")]


def test_it_is_carried_from_step_to_step() -> None:
    run = on_virtual("int8_scatter", 3, 4)
    held, _ = run.train(run.begin(), HALF)
    kept = {path: leaf.local.clone() for path, leaf in held.pass_state.items()}
    assert all(value.any() for value in kept.values())
    after, _ = run.train(held, REST)
    assert all(not torch.equal(leaf.local, kept[path]) for path, leaf in after.pass_state.items())


def test_forgetting_it_changes_the_run() -> None:
    run = on_virtual("int8_scatter", 3, 4)
    remembering, forgetting = (run.train(run.begin(), HALF)[0] for _ in range(2))
    forgetting = forgetting._replace(pass_state=run.begin().pass_state)
    assert not torch.equal(run.train(remembering, REST)[1], run.train(forgetting, REST)[1])


# saved and loaded


def like(held: Any) -> Any:
    return tree.map(lambda leaf: torch.empty(leaf.shape, dtype=leaf.dtype, device="meta"), held)


def save_and_load(run: Run, held: Held, folder: Path) -> Held:
    """What a fresh process would begin with."""
    for name, part in held._asdict().items():
        fzero.save_safetensors(part, folder / f"{name}.safetensors")
    shapes = run.begin()
    params = fzero.load_safetensors(folder / "params.safetensors", like(shapes.params), run.mesh)
    sources = fzero.open_safetensors(folder / "opt_state.safetensors")
    paths = tree.paths(shapes.opt_state)
    opt_state = fzero.partition(
        tree.unflatten(tree.flatten(shapes.opt_state)[1], [sources[path] for path in paths]), run.mesh, like=params
    )
    state = fzero.load_safetensors(folder / "pass_state.safetensors", like(shapes.pass_state), run.mesh)
    return Held(params, opt_state, state)


def resumed(run: Run, again: Run, folder: Path) -> tuple[Tensor, Tensor]:
    """The last losses of a run, and those of one that was stopped and begun again from files."""
    whole = run.train(run.begin(), ALL)[1][len(HALF) :]
    held = save_and_load(again, run.train(run.begin(), HALF)[0], folder)
    return whole, again.train(held, REST)[1]


def test_a_restarted_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    expected, got = resumed(*(on_virtual("int8_scatter", 3, 4) for _ in range(2)), tmp_path)
    assert torch.equal(got, expected)


def test_it_is_the_same_after_a_round_trip(tmp_path: Path) -> None:
    run = on_virtual("int8_scatter", 3, 4)
    held, _ = run.train(run.begin(), HALF)
    fzero.save_safetensors(held.pass_state, tmp_path / "state")
    back = fzero.load_safetensors(tmp_path / "state", like(held.pass_state), run.mesh)
    assert list(back) == list(held.pass_state)
    for path, leaf in held.pass_state.items():
        assert torch.equal(back[path].local, leaf.local) and back[path].form.layout == leaf.form.layout


def on_real_ranks(mesh: DeviceMesh, folder: Path) -> tuple[Tensor, Tensor]:
    return resumed(*(on_real("int8_scatter", 3, mesh) for _ in range(2)), folder)


def test_so_it_does_on_real_ranks(tmp_path: Path) -> None:
    for expected, got in run(2, on_real_ranks, tmp_path):
        assert torch.equal(got, expected)


# named mistakes


def attempt(run: Run, state: Any) -> str:
    """The error of a step with this state. Afterwards the arguments are still there."""
    held = run.begin()
    with pytest.raises(FzeroError) as caught:
        run.step(held.params, held.opt_state, *run.batch(0), pass_state=state)
    fzero.unpartition((held.params, held.opt_state))
    return str(caught.value)


def mistakes(run: Run, other: Run) -> dict[str, str]:
    """A step with each wrong state -> what it says."""
    held = run.begin()
    paths = list(held.pass_state)
    first = paths[0]
    exact = Run(other.step, run.mesh, run.rows)
    return {
        "missing": attempt(run, None),
        "one missing": attempt(run, {path: held.pass_state[path] for path in paths[1:]}),
        "left over": attempt(run, held.pass_state | {"mine": held.pass_state[first]}),
        "of another": attempt(run, held.pass_state | {first: held.pass_state[paths[1]]}),
        "plain": attempt(run, held.pass_state | {first: held.pass_state[first].local}),
        "nobody's": attempt(exact, held.pass_state),
    }


def assert_named(said: dict[str, str]) -> None:
    ways_out = "give pass_state=step.init_pass_state", "make it with step.init_pass_state(*args)"
    assert said["missing"].startswith(
        "pass_state 'int8_error.0.2': a pass of this step keeps this state, and it is not"
    )
    assert said["one missing"].startswith("pass_state 'int8_error.")
    assert said["left over"].startswith("pass_state 'mine': no pass keeps this state")
    assert "is not the state that this step's passes keep on its mesh" in said["of another"]
    assert "is not the state that this step's passes keep on its mesh" in said["plain"]
    assert "no pass keeps this state" in said["nobody's"]
    assert all(any(way_out in message for way_out in ways_out) for message in said.values())


def test_mistakes_on_virtual_ranks_are_named() -> None:
    assert_named(mistakes(on_virtual("int8_scatter", 3, 2), on_virtual(None, 3, 2)))


def mistakes_on_real_ranks(mesh: DeviceMesh) -> dict[str, str]:
    return mistakes(on_real("int8_scatter", 3, mesh), on_real(None, 3, mesh))


def test_mistakes_on_real_ranks_are_named() -> None:
    for said in values(run_cases(2, {"mistakes": mistakes_on_real_ranks})["mistakes"]):
        assert_named(said)


def test_state_of_another_mesh_is_refused() -> None:
    run, other = on_virtual("int8_scatter", 3, 2), on_virtual("int8_scatter", 3, 4)
    assert "is not the state that this step's passes keep on its mesh" in attempt(run, other.begin().pass_state)
