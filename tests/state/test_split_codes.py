"""Quantized leaves that are split over a model axis: parts of codes, beside one device that has the whole."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from axes import F64
from torch import Tensor

import fzero
from fzero import FzeroError, VirtualMesh, checkpoint, tree

DRAW = torch.Generator().manual_seed(0)
SHAPES = {"up": (64, 16), "down": (16, 64), "gate_up": (128, 16)}
CODED = {name: torch.randn(shape, dtype=F64, generator=DRAW) / 4 for name, shape in SHAPES.items()}
TRAINED = {"a": torch.randn(4, 16, dtype=F64, generator=DRAW), "b": torch.zeros(64, 4, dtype=F64)}
RULES: dict[str, Any] = {"up": ("tp", 0), "down": ("tp", 1), "gate_up": ("tp", 0, 2), "b": ("tp", 0)}
EXAMPLES = torch.randn(8, 16, dtype=F64, generator=DRAW)
GRID = VirtualMesh(fsdp=2, tp=2)
CODINGS: dict[str, dict[str, Any]] = {
    "int8": {"bits": 8, "block": 16},
    "nf4": {"bits": 4, "block": 8, "levels": "nf4"},
    "nf4-dq": {"bits": 4, "block": 2, "levels": "nf4", "double_quant": True},  # two groups of scales in a leaf
}


def quantize(how: Any) -> Any:
    return {**TRAINED, **fzero.quantize(CODED, where="", **how)}


def forward(params: Any, x: Tensor) -> Tensor:
    up = x @ params["up"].T + x @ params["a"].T @ params["b"].T
    gate, other = (x @ params["gate_up"].T).chunk(2, -1)
    return x + fzero.psum((up * gate.sigmoid() + other) @ params["down"].T, "tp")


def differentiate(params: Any, x: Tensor) -> Any:
    """The loss, gradients of the trained leaves, and whole dequantized ones."""
    trained, frozen = ({name: params[name] for name in names} for names in (TRAINED, CODED))

    def loss_of(trained: Any, x: Tensor) -> Tensor:
        return fzero.remat(forward)({**trained, **frozen}, x).square().mean()

    whole = [fzero.all_gather(params["up"] + 0, "tp"), fzero.all_gather(params["down"] + 0, "tp", 1)]
    return fzero.value_and_grad(loss_of)(trained, x), whole


TRIES: list[tuple[str, VirtualMesh, Any]] = [
    ("int8", GRID, {}),
    ("nf4", VirtualMesh(replica=2, fsdp=1, tp=2), {}),
    ("nf4-dq", VirtualMesh(fsdp=2, tp=4), {}),
    ("int8", GRID.lay_state(GRID.names), {}),
    ("nf4-dq", VirtualMesh(fsdp=2, sp=2, tp=2).lay_state(("sp", "tp")), {"chunk": 1024}),
    ("nf4-dq", GRID, {"chunk": 256, "to": fzero.host()}),
]


def test_a_step_is_that_of_one_device() -> None:
    for name, mesh, options in TRIES:
        whole = quantize(CODINGS[name])
        held = fzero.partition(whole, mesh, split=RULES, to=options.pop("to", None))
        assert held["down"].shape == (16, 64 // mesh.size("tp")) and held["down"].global_shape == (16, 64)
        data = tuple(axis for axis in mesh.names if axis != "tp")
        got = fzero.unpartition(fzero.simulate(differentiate, mesh, data=data, **options)(held, EXAMPLES))
        assert torch.equal(got[1][0], whole["up"].full_tensor())
        assert torch.equal(got[1][1], whole["down"].full_tensor())
        torch.testing.assert_close(got, differentiate(whole, EXAMPLES), rtol=1e-12, atol=1e-14)


def same(got: Any, expected: Any) -> None:
    found = tree.leaves(fzero.unpartition(got))
    assert all(map(torch.equal, found, tree.leaves(expected))) and len(found) == len(tree.leaves(expected))


@pytest.mark.parametrize("state", [None, GRID.names])
@pytest.mark.parametrize("name", CODINGS)
def test_codes_of_parts_are_those_of_the_whole_wherever_they_come_from(name: str, state: Any, tmp_path: Path) -> None:
    whole, file, folder = quantize(CODINGS[name]), str(tmp_path / "a.safetensors"), str(tmp_path / "saved")
    held = fzero.partition(whole, GRID, split=RULES, state=state)
    same(held, whole)
    exact = fzero.partition({**TRAINED, **CODED}, GRID, split=RULES, state=state)
    made = fzero.quantize(exact, where="^up|down", **CODINGS[name])
    same(made, {**whole, "gate_up": CODED["gate_up"]})
    assert [made[key].codes.form.layout.splits for key in SHAPES if key != "gate_up"] == [2, 2]
    like = {**TRAINED, **fzero.quantize(tree.map(lambda w: w.to("meta"), CODED), where="", **CODINGS[name])}
    fzero.save_safetensors(held, file)
    checkpoint.save(folder, held, step=0)
    for mesh, rules in ((VirtualMesh(fsdp=3, tp=4), RULES), (VirtualMesh(fsdp=3), None)):
        same(fzero.load_safetensors(file, like, mesh, split=rules), whole)
        same(checkpoint.load(folder, fzero.partition(like, mesh, split=rules)), whole)


def test_a_part_lies_where_its_leaf_does_and_is_as_large() -> None:
    held = fzero.partition(quantize(CODINGS["nf4"]), GRID, split={"up*": ("tp", 0), "down": ("tp", 1)})
    assert (
        held["up"].codes.form.layout.shard * 4 == 64 * 16 // 2 + 4 * 128 and held["up"].scales.form.layout.splits == 2
    )
    with pytest.raises(FzeroError, match="one process has all parts; use it in a step, or whole, by fzero.unpartition"):
        held["up"].full_tensor()


def test_a_split_that_cuts_blocks_is_refused_with_the_block_that_it_does_not_cut() -> None:
    given = fzero.quantize({"w": torch.ones(8, 96)}, where="w", block=64)
    for split in ({"w": ("tp", 1)}, {"w": ("tp", 0)}):  # along an axis of one rank no block is cut
        same(fzero.partition(given, VirtualMesh(fsdp=2, tp=1), split=split), given)
    words = "blocks of 64, which a split over 'tp' into runs of 48 would cut; quantize it with block=16, or"
    with pytest.raises(FzeroError, match=re.escape(words)):
        fzero.partition(given, GRID, split={"w": ("tp", 1)})
    with pytest.raises(FzeroError, match=re.escape(words)):
        fzero.quantize(fzero.partition({"w": torch.ones(8, 96)}, GRID, split={"w": ("tp", 1)}), where="w", block=64)
    with pytest.raises(FzeroError, match="w: has 8 elements along dim 0, to be split into 3 ranks along 'tp'; 2 ranks"):
        fzero.partition(given, VirtualMesh(fsdp=1, tp=3), split={"w": ("tp", 0)})
