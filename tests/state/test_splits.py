"""Leaves that are split over a model axis, on virtual ranks: where their elements lie, what a step makes of them beside
one device, checkpoints at any mesh and split, and what knows no split leaves yet."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from axes import ADAMW, EXAMPLES, F64, SPLIT, WEIGHTS, WIDTH, block, loss_of, split_mlp, split_sequence, train
from torch import Tensor

import fzero
from fzero import FzeroError, VirtualMesh, checkpoint, optim, tree

GRID = VirtualMesh(fsdp=2, tp=2)
MESHES = [GRID, VirtualMesh(fsdp=1, tp=4), VirtualMesh(tp=2, replica=2, fsdp=2), GRID.lay_state(("fsdp", "tp"))]


def microbatches(params: Any, x: Tensor) -> Any:
    def sums(params: Any, x: Tensor) -> Any:
        return split_sequence(params, x).square().sum(), torch.tensor(x.numel())

    return fzero.accumulate(sums, 2)(params, x)


def by_leaf(params: Any, x: Tensor) -> Any:
    """Root mean squares and norms of whole leaves, and a mean that is taken by hand."""
    grads = fzero.grad(loss_of(split_mlp))(params, x)
    found = [each.update(grads, each.init(params), params)[0] for each in BY_LEAF]
    return found, tree.map(lambda w: w.square().sum() / w.numel() + torch.numel(w) - w.nelement(), params)


BY_LEAF = [optim.clip_by_block_rms(0.01), optim.scale_by_param_block_rms(), optim.scale_by_trust_ratio()]


def decayed(params: Any, x: Tensor) -> Any:
    """Each sum, mean and extreme of a leaf counts the elements of all ranks once."""

    def loss(params: Any) -> Tensor:
        penalty = sum(w.square().sum() for w in params.values()) + params["up"].mean() + params["down"].max()
        return loss_of(split_mlp)(params, x) + 0.1 * penalty

    sizes = tree.map(lambda w: [w.norm(), w.min(), (w > 0).all()], params)
    return fzero.value_and_grad(loss)(params), sizes, optim.global_norm(params)


def second(params: Any, x: Tensor) -> Any:
    def norm(params: Any) -> Tensor:
        return sum(g.square().sum() for g in tree.leaves(fzero.grad(loss_of(split_mlp))(params, x)))

    return fzero.grad(norm)(params)


def forward_mode(params: Any, x: Tensor) -> Any:
    ones = tree.map(torch.ones_like, params)
    return torch.func.jvp(lambda params: loss_of(split_mlp)(params, x), (params,), (ones,))[1]


def looped(params: Any, x: Tensor) -> Tensor:
    return fzero.scan(lambda x, _: (split_mlp(params, x), None), x, None, length=3)[0]


STEPS: dict[str, tuple[Callable[..., Any], bool]] = {
    "tensor parallel": (train(split_mlp), True),
    "sequence parallel": (train(split_sequence), True),
    "recomputed": (train(fzero.remat(split_mlp)), True),
    "in a loop": (train(looped), True),
    "microbatches": (microbatches, False),
    "penalties": (decayed, False),
    "leaf by leaf": (by_leaf, False),
    "second derivatives": (second, False),
    "forward mode": (forward_mode, False),
}
"""A step, and whether it takes the state of `ADAMW`."""


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("name", STEPS)
def test_a_step_of_split_leaves_is_that_of_one_device(name: str, mesh: VirtualMesh) -> None:
    step, has_state = STEPS[name]
    data = tuple(axis for axis in mesh.names if axis != "tp")
    for stage in (3, 2, 1) if mesh is GRID else (3,):
        held = fzero.partition(WEIGHTS, mesh, split=SPLIT)
        got: Any = (held, ADAMW.init(held)) if has_state else (held,)
        right: Any = (WEIGHTS, ADAMW.init(WEIGHTS)) if has_state else (WEIGHTS,)
        run = fzero.simulate(step, mesh, data=data, stage=stage)
        for _ in range(2 if has_state else 1):
            got, right = run(*got[:2], EXAMPLES), step(*right[:2], EXAMPLES)
            torch.testing.assert_close(fzero.unpartition(got), right, rtol=1e-12, atol=1e-14)


def test_a_collective_of_a_split_leaf_takes_parts() -> None:
    whole = {"w": torch.arange(8.0, dtype=F64).view(4, 2)}
    held = fzero.partition(whole, GRID, split={"w": ("tp", 0)})

    def step(params: Any) -> Any:
        w, axes = params["w"], ("fsdp", "tp")
        found = [fzero.psum(w, "tp"), fzero.pmean(w, axes), fzero.pmax(w, "tp"), fzero.all_gather(w, "tp")]
        return [*found, fzero.pmin(w, "fsdp").full_tensor() * 1, fzero.psum_scatter(w, "tp")]

    total, mean, largest, joined, same, block = fzero.simulate(step, GRID, data=("fsdp",))(held)
    parts = whole["w"].chunk(2)
    assert torch.equal(total, parts[0] + parts[1]) and torch.equal(mean, (parts[0] + parts[1]) / 2)
    assert torch.equal(largest, parts[1]) and torch.equal(joined, whole["w"])
    assert torch.equal(same.view(2, 2, 2, 2)[0].flatten(0, 1), whole["w"])
    assert torch.equal(block.view(2, 2, 2)[0], parts[0] + parts[1])


def experts(params: Any, x: Tensor) -> Tensor:
    """Each rank along the data axis "ep" has some experts, which take the tokens of all ranks, weighed by a router."""
    weights = (x @ params["router"].T).softmax(-1)
    tokens, mine = fzero.all_gather(x, "ep"), block(fzero.all_gather(weights, "ep"), 1, "ep")
    hidden = torch.einsum("nd,ehd->neh", tokens, params["up"]).relu()
    added = torch.einsum("neh,edh,ne->nd", hidden, params["down"], mine)
    return x + fzero.psum_scatter(added, "ep")


def test_experts_along_a_data_axis_have_the_gradients_of_one_device() -> None:
    draw = torch.Generator().manual_seed(3)
    shapes = {"router": (4, WIDTH), "up": (4, 6, WIDTH), "down": (4, WIDTH, 6)}
    whole = {name: torch.randn(shape, dtype=F64, generator=draw) for name, shape in shapes.items()}
    for mesh in (VirtualMesh(fsdp=2, ep=2), VirtualMesh(ep=4, fsdp=1)):
        held = fzero.partition(whole, mesh, split=dict.fromkeys(("up", "down"), ("ep", 0)))
        got, right = [held, ADAMW.init(held)], [whole, ADAMW.init(whole)]
        step = fzero.simulate(train(experts), mesh, data=mesh.names)
        for _ in range(2):
            (*got, loss), (*right, expected) = step(*got, EXAMPLES), train(experts)(*right, EXAMPLES)
            torch.testing.assert_close((fzero.unpartition(got[0]), loss), (right[0], expected), rtol=1e-12, atol=1e-14)


def test_parts_and_bytes_of_a_split_leaf() -> None:
    whole = {"gate_up": torch.arange(24.0).view(8, 3), "down": torch.arange(12.0).view(3, 4), "norm": torch.ones(3)}
    mesh = VirtualMesh(tp=2, fsdp=1)
    held = fzero.partition(whole, mesh, split={"gate*": ("tp", 0, 2), "down": ("tp", -1)})
    assert [tuple(held[name].shape) for name in whole] == [(4, 3), (3, 2), (3,)]
    assert [tuple(held[name].global_shape) for name in whole] == [(8, 3), (3, 4), (3,)]
    parts = held["gate_up"].local.view(2, 4, 3)
    assert parts[:, :, 0].tolist() == [[0, 3, 12, 15], [6, 9, 18, 21]]  # rows 0, 1, 4, 5, and rows 2, 3, 6, 7
    assert held["down"].local.view(2, 3, 2)[1].tolist() == [[2, 3], [6, 7], [10, 11]]
    torch.testing.assert_close(fzero.unpartition(held), whole, rtol=0, atol=0)


def test_bytes_are_those_of_megatron() -> None:
    """Two all-reduces of the residual stream in a step of one block, one of them backward, and what ZeRO-3 moves: of
    this rank's part alone."""
    mesh = VirtualMesh(fsdp=2, tp=2)
    held = fzero.partition(WEIGHTS, mesh, split=SPLIT)
    step = fzero.simulate(lambda p, x: fzero.value_and_grad(loss_of(split_mlp))(p, x), mesh, data=("fsdp",))
    moved: dict[tuple[str, str, str | None], int] = {}
    for entry in step.trace(held, EXAMPLES).comm():
        moved[entry.op, entry.axis, entry.bucket] = moved.get((entry.op, entry.axis, entry.bucket), 0) + entry.nbytes
    stream, half = EXAMPLES.nbytes // 2, WEIGHTS["up"].nbytes // 2
    assert moved.pop(("all_reduce", "tp", None)) == 2 * stream
    assert moved["reduce_scatter", "fsdp", "up:tp"] == moved["reduce_scatter", "fsdp", "down:tp"] == _pad(half)
    assert {axis for op, axis, bucket in moved if bucket in ("up:tp", "down:tp")} == {"fsdp"}


def _pad(nbytes: int) -> int:
    return -(-nbytes // (2 * 16 * 8)) * 2 * 16 * 8


SAVED = {**WEIGHTS, "gate_up": torch.randn(16, 3, dtype=F64), "odd": torch.randn(5)}
GATED = {**SPLIT, "gate_up": ("tp", 0, 2)}


@pytest.mark.parametrize("mesh", [MESHES[-1], VirtualMesh(replica=2, tp=2, fsdp=3), GRID, VirtualMesh(fsdp=4)], ids=str)
def test_a_checkpoint_loads_at_any_mesh_and_split(mesh: VirtualMesh, tmp_path: Path) -> None:
    held = fzero.partition(SAVED, mesh, split=GATED if "tp" in mesh.names else None)
    checkpoint.save(tmp_path, {"p": held, "s": ADAMW.init(held)}, step=1)
    assert checkpoint.verify(tmp_path) == 1
    stored = checkpoint.open_checkpoint(tmp_path)["p.gate_up"]
    for start, stop in ((0, 48), (7, 41), (23, 24), (5, 5)):
        out = torch.empty(stop - start, dtype=F64)
        stored.read(start, out)
        assert torch.equal(out, SAVED["gate_up"].view(-1)[start:stop])
    others: list[tuple[VirtualMesh, Any]] = [
        (VirtualMesh(fsdp=3), None),
        (VirtualMesh(fsdp=1, tp=4), GATED),
        (VirtualMesh(fsdp=1, tp=2), {"up": ("tp", 1), "gate_up": ("tp", 0)}),
    ]
    for other, split in others:
        zeros = fzero.partition(tree.map(torch.zeros_like, SAVED), other, split=split)
        loaded = checkpoint.load(tmp_path, {"p": zeros, "s": ADAMW.init(zeros)})
        torch.testing.assert_close(fzero.unpartition(loaded["p"]), SAVED, rtol=0, atol=0)
        rules = split and {f"*.{name}": rule for name, rule in split.items()}
        loaded = checkpoint.load(tmp_path, {"p": SAVED, "s": ADAMW.init(SAVED)}, mesh=other, split=rules)
        torch.testing.assert_close(fzero.unpartition(loaded["p"]), SAVED, rtol=0, atol=0)


def test_the_optimizer_state_of_a_state_is_split_as_its_parameters() -> None:
    whole = fzero.State(params=WEIGHTS, opt_state=ADAMW.init(WEIGHTS), step=torch.zeros((), dtype=torch.int64))
    held = fzero.partition(whole, GRID, split=SPLIT)
    moments = [x for x in tree.leaves(held.opt_state) if x.path in SPLIT]
    assert len(moments) == 4 and all(x.form.layout.split_axes == ("tp",) for x in moments)
    torch.testing.assert_close(fzero.unpartition(held.params), WEIGHTS, rtol=0, atol=0)


def test_values_of_a_file_are_read_by_parts(tmp_path: Path) -> None:
    fzero.save_safetensors(SAVED, tmp_path / "w.safetensors")
    held = fzero.partition(dict(fzero.open_safetensors(tmp_path / "w.safetensors")), GRID, split=GATED, chunk=40)
    torch.testing.assert_close(fzero.unpartition(held), SAVED, rtol=0, atol=0)


def test_a_mean_over_the_elements_of_a_part_is_refused() -> None:
    """A sum over a split leaf is of all elements, and the shape in a step is that of a part."""

    def penalty(params: Any, x: Tensor) -> Tensor:
        return loss_of(split_mlp)(params, x) + params["up"].square().sum().sqrt() / math.prod(params["up"].shape)

    def size(params: Any, x: Tensor) -> Any:
        grads = fzero.grad(loss_of(split_mlp))(params, x)
        return tree.map(lambda g: (g.square().sum() / math.prod(g.shape)).sqrt(), grads)

    def scaled(params: Any, x: Tensor) -> Tensor:
        return params["down"].square().sum() * (1 / math.prod(params["down"].shape))

    held = fzero.partition(WEIGHTS, GRID, split=SPLIT)
    for step, leaf in ((fzero.grad(penalty), "up"), (size, "down"), (scaled, "down")):
        words = f"{leaf}: its sum over all ranks is divided by 24, the elements of a rank's part.*; take .mean"
        with pytest.raises(FzeroError, match=words):
            fzero.simulate(step, GRID, data=("fsdp",)).trace(held, EXAMPLES)
    other = fzero.partition(WEIGHTS, VirtualMesh(fsdp=4, tp=1), split=SPLIT)  # a part is all
    fzero.simulate(size, VirtualMesh(fsdp=4, tp=1), data=("fsdp",)).trace(other, EXAMPLES)


RULES: dict[str, tuple[Any, str]] = {
    "no leaf": ({"ups": ("tp", 0)}, r"split 'ups': matches no leaf; near to it are up, "),
    "no axis": ({"up": ("pp", 0)}, "mesh axis 'pp': this mesh has"),
    "the shard axis": ({"up": ("fsdp", 0)}, r"split 'up': names 'fsdp', over which .* cuts all state already"),
    "axes with all of it": ({"up": (("tp", "fsdp"), 0)}, "split 'up': names '.*fsdp.*', over which"),
    "no dim": ({"up": ("tp", 2)}, r"up: has the shape \[12, 4\], and is split along dim 2"),
    "no pair": ({"up": "tp"}, r"split 'up': is 'tp'; give \(axis, dim\)"),
    "no parts": ({"up": ("tp", 0, 0)}, "split 'up': has 0 parts"),
    "a dim that does not divide": ({"odd": ("tp", 0)}, "odd: has 5 elements along dim 0, to be split into 2 ranks"),
    "parts that do not divide": ({"up": ("tp", 0, 4)}, "up: .* 4 parts of it for each of 2 ranks along 'tp'"),
}


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_that_cannot_be_is_refused(rule: str) -> None:
    split, words = RULES[rule]
    with pytest.raises(FzeroError, match=words):
        fzero.partition(SAVED, GRID, split=split)


def test_the_largest_number_of_ranks_is_told() -> None:
    words = "up: has 12 elements along dim 0, to be split into 8 ranks along 'tp'; 6 ranks divide it"
    with pytest.raises(FzeroError, match=re.escape(words)):
        fzero.partition(SAVED, VirtualMesh(fsdp=1, tp=8), split={"up": ("tp", 0)})


def taken(use: Callable[[Any], Any]) -> Callable[[], Any]:
    return lambda: use(fzero.partition(WEIGHTS, GRID, split=SPLIT))


UNKNOWN: dict[str, tuple[Callable[[], Any], str]] = {
    "the part of one rank, outside of a step": (
        taken(lambda held: held["up"].full_tensor()),
        "up: gather: it is split over 'tp', and one process has all parts; use it in a step, or whole, by fzero.unpart",
    ),
}


@pytest.mark.parametrize("what", UNKNOWN)
def test_what_knows_no_split_leaves_says_so(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    use, words = UNKNOWN[what]
    with pytest.raises(FzeroError, match=words):
        use()
    assert not list(tmp_path.iterdir())
