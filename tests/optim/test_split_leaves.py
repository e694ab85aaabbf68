"""Optimizers that look at a whole leaf, on leaves that are split over model axes: Muon, Adafactor, 8-bit moments and
stochastic rounding, beside one device; and their state in checkpoints."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from split_optimizers import EXAMPLES, OPTIMIZERS, SPLIT, WHOLE, init, step

import fzero
from fzero import FzeroError, VirtualMesh, checkpoint, optim, tree

GRID = VirtualMesh(fsdp=2, tp=2)


@functools.cache
def train(mesh: VirtualMesh | None, stage: int = 0) -> Any:
    """The results of two steps, whole."""
    if mesh is None:
        first, states, _ = step(WHOLE, init(WHOLE), EXAMPLES)
        return step(first, states, EXAMPLES)
    held = fzero.partition(WHOLE, mesh, split=SPLIT, unit=256)
    data = tuple(axis for axis in mesh.names if axis != "tp")
    run = fzero.simulate(step, mesh, data=data, stage=stage)
    first, states, _ = run(held, init(held), EXAMPLES)
    return fzero.unpartition(run(first, states, EXAMPLES))


MESHES = [(GRID, 1), (GRID, 3), (VirtualMesh(tp=2, replica=2, fsdp=2), 3), (VirtualMesh(fsdp=3, tp=2), 2)]
LAID = VirtualMesh(fsdp=2, replica=2, tp=2).lay_state(("fsdp", "tp"))
"""State along the model axis too, with another between them."""
MESHES.append((LAID, 3))


@pytest.mark.parametrize(("mesh", "stage"), MESHES, ids=str)
def test_updates_are_those_of_one_device(mesh: VirtualMesh, stage: int) -> None:
    torch.testing.assert_close(train(mesh, stage), train(None), rtol=1e-12, atol=1e-14)
    moved = tree.map(lambda new, old: (new - old).abs().max() > 1e-3, train(None)[0], WHOLE)
    assert all(tree.leaves(moved))


def test_outside_of_a_step_updates_are_those_of_one_device() -> None:
    held, grads = (fzero.partition(x, GRID, split=SPLIT, unit=256) for x in (WHOLE, tree.map(torch.cos, WHOLE)))
    for each in OPTIMIZERS.values():
        got = each.update(grads, each.init(held), held)
        right = each.update(tree.map(torch.cos, WHOLE), each.init(WHOLE), WHOLE)
        torch.testing.assert_close(fzero.unpartition(got), right, rtol=1e-12, atol=1e-14)


OTHERS: list[tuple[VirtualMesh, Any]] = [
    (VirtualMesh(fsdp=4, tp=1), SPLIT),
    (VirtualMesh(fsdp=1, tp=4), SPLIT),
    (VirtualMesh(fsdp=3), None),
    (LAID, SPLIT),
    (VirtualMesh(fsdp=1, tp=2).lay_state(("fsdp", "tp")), {"experts": ("tp", 1)}),
    (VirtualMesh(fsdp=1, tp=2), {**SPLIT, "experts": ("tp", 1), "gate_up": ("tp", 0)}),
]


def test_a_checkpoint_with_their_state_loads_at_any_mesh_and_back(tmp_path: Path) -> None:
    whole = train(GRID, 3)[:2]

    def hold(values: Any, mesh: VirtualMesh, split: Any) -> Any:
        params = fzero.partition(values[0], mesh, split=split, unit=256)
        return params, fzero.partition(values[1], mesh, like=params)

    checkpoint.save(tmp_path / "grid", hold(whole, GRID, SPLIT), step=1)
    for number, (mesh, split) in enumerate(OTHERS):
        folder, zeros = tmp_path / str(number), tree.map(torch.zeros_like, whole)
        moved = checkpoint.load(tmp_path / "grid", hold(zeros, mesh, split))
        torch.testing.assert_close(fzero.unpartition(moved), whole, rtol=0, atol=0)
        checkpoint.save(folder, moved, step=1)
        back = checkpoint.load(folder, hold(zeros, GRID, SPLIT))
        torch.testing.assert_close(fzero.unpartition(back), whole, rtol=0, atol=0)


def test_a_split_that_cuts_blocks_of_8_bits_is_refused() -> None:
    held = fzero.partition({"w": torch.ones(256, 64), "b": torch.ones(64)}, GRID, split={"*": ("tp", -1)}, unit=256)
    words = "w: is split over 'tp' into runs of 32 elements, which cut blocks of 256; split it so that runs"
    with pytest.raises(FzeroError, match=words):
        optim.adamw8bit(0.1).init(held)
    whole = optim.adamw8bit(0.1).init({"w": torch.ones(256, 64), "b": torch.ones(64)})
    with pytest.raises(FzeroError, match=words):
        fzero.partition(whole, GRID, like=held)


def test_functions_of_a_user_see_whole_shapes() -> None:
    seen = dict[str, tuple[int, ...]]()

    def note(path: str, leaf: Any) -> bool:
        seen[path] = tuple(leaf.shape)
        return leaf.ndim == 2 and leaf.shape[0] >= 6

    masked = optim.adamw(0.1, weight_decay=0.5, mask=note)
    labelled = optim.multi_transform({True: optim.sgd(0.1), False: optim.adam(0.1)}, note)
    chosen = optim.muon(0.1, where=note, eps=1e-3)
    whole = {name: x for name, x in WHOLE.items() if x.ndim == 2}
    rules = {name: rule for name, rule in SPLIT.items() if name in whole}
    held, grads = (fzero.partition(x, GRID, split=rules) for x in (whole, tree.map(torch.cos, whole)))
    assert any(x.shape != x.global_shape for x in held.values())
    for each in (masked, labelled, chosen):
        got, _ = each.update(grads, each.init(held), held)
        right, _ = each.update(tree.map(torch.cos, whole), each.init(whole), whole)
        torch.testing.assert_close(fzero.unpartition(got), right, rtol=1e-12, atol=1e-14)
        assert {path: tuple(x.shape) for path, x in whole.items()} == seen
