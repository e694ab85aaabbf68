"""Stochastic rounding: of single numbers against their two neighbours, and of whole steps on every number of ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from processes import run_cases, values
from programs import calls, names
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import fzero
from fzero import optim, tree
from fzero.base.errors import FzeroError
from fzero.base.mesh import VirtualMesh
from fzero.optim.rounding import CHUNK, LARGEST, draw_bits, make_key, round_to_bfloat16

BF16 = torch.bfloat16
SHAPES = {"a": (37, 5), "b": (13,), "n": {"c": (64, 9), "s": (), "e": (0, 3)}}


def draw_tree(seed: int, scale: float = 1.0, dtype: torch.dtype = BF16) -> tree.Tree:
    generator = torch.Generator().manual_seed(seed)

    def draw(shape: Any) -> Any:
        if isinstance(shape, dict):
            return {name: draw(each) for name, each in shape.items()}
        return (torch.randn(shape, generator=generator) * scale).to(dtype)

    return draw(SHAPES)


def assert_same(got: tree.Tree, want: tree.Tree) -> None:
    for path, a, b in zip(tree.paths(want), tree.leaves(got), tree.leaves(want), strict=True):
        assert a.dtype == b.dtype and torch.equal(a.nan_to_num(7), b.nan_to_num(7)), path


# numbers


def neighbours(x: Tensor) -> tuple[Tensor, Tensor]:
    """The bfloat16 numbers next to each float32 of `x`, toward zero and away from zero, as float32."""
    inner = (x.view(torch.int32) & -0x10000).view(torch.float32)
    outer = (inner.view(torch.int32) + 0x10000).view(torch.float32)
    return inner, torch.where(inner == x, inner, outer)


def test_a_number_becomes_one_of_its_two_neighbours() -> None:
    x = torch.cat([torch.randn(10**5), torch.randn(10**5) * 1e-39, torch.randn(10**5) * 1e38])  # subnormal ones too
    x = x[x.abs() <= LARGEST]
    inner, outer = neighbours(x)
    got = round_to_bfloat16(x, draw_bits(torch.tensor(5), 0, x.numel())).float()
    assert bool(((got == inner) | (got == outer)).all())
    assert 0.4 < (got == outer).float().mean() < 0.6  # both occur: the fraction between them is about uniform


def test_every_fraction_is_rounded_away_by_as_many_of_the_random_numbers() -> None:
    fractions = torch.tensor([0, 1, 2, 0x7FFF, 0x8000, 0xFFFF], dtype=torch.int32)
    bits = torch.arange(2**16, dtype=torch.int32)  # each once
    for sign in (0, -(2**31)):
        x = (fractions + 0x3F800000 + sign).view(torch.float32)
        for each, fraction in zip(x, fractions.tolist()):
            got = round_to_bfloat16(each.expand(2**16).contiguous(), bits).float()
            assert int((got != neighbours(each.reshape(1))[0]).sum()) == fraction


@pytest.mark.parametrize("over", ["elements", "steps"])
def test_the_mean_over_draws_is_the_number(over: str) -> None:
    count, p, u = 2**14, torch.ones((), dtype=BF16), torch.tensor(0.0011)
    if over == "elements":
        got = optim.apply_updates(p.expand(count), u.expand(count), bf16_stochastic_round=3)
    else:
        got = torch.stack([optim.apply_updates(p, u, bf16_stochastic_round=(1, step)) for step in range(count // 8)])
    spacing, fraction = 2.0**-7, 0.0011 * 2**7
    sigma = spacing * (fraction * (1 - fraction) / got.numel()) ** 0.5
    for lane in [got, *(got[i::4] for i in range(4) if over == "elements")]:  # a hash serves four elements
        scale = (got.numel() / lane.numel()) ** 0.5
        assert abs(lane.double().mean().item() - (1 + u.item())) < 4 * sigma * scale


def test_numbers_that_bfloat16_has_stay() -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(BF16)  # all of bfloat16
    got = optim.apply_updates(every, torch.full(every.shape, -0.0), bf16_stochastic_round=9)
    finite = every.isfinite()
    assert torch.equal(got[finite].view(torch.int16), every[finite].view(torch.int16))
    assert torch.equal(got[every.isinf()], every[every.isinf()]) and got[every.isnan()].isnan().all()


def test_beyond_bfloat16_torch_decides() -> None:
    top = torch.finfo(torch.float32).max
    x = torch.tensor([LARGEST * 1.001, LARGEST * 1.003, top, -top, torch.inf, -torch.inf, torch.nan])
    for seed in range(20):
        got = round_to_bfloat16(x, draw_bits(torch.tensor(seed), 0, len(x)))
        torch.testing.assert_close(got, x.to(BF16), rtol=0, atol=0, equal_nan=True)


def test_bits_do_not_depend_on_where_a_draw_begins() -> None:
    key = torch.tensor(11)
    whole = draw_bits(key, 0, 100)
    assert whole.min() >= 0 and whole.max() < 2**16 and len(whole.unique()) > 95
    for start in range(0, 9):
        assert torch.equal(draw_bits(key, start, 50), whole[start : start + 50])
    assert torch.equal(draw_bits(key, 7, 0), whole[:0])
    far = draw_bits(key, 2**40, 8)  # leaves may have more elements than int32 counts
    assert not torch.equal(far, whole[:8])


def test_a_leaf_is_rounded_in_chunks() -> None:
    p, u = torch.ones(CHUNK + 5, dtype=BF16), torch.full((CHUNK + 5,), 1e-3)
    got = optim.apply_updates({"p": p}, {"p": u}, bf16_stochastic_round=1)["p"]
    part = optim.apply_updates({"p": p[:8]}, {"p": u[:8]}, bf16_stochastic_round=1)["p"]
    assert torch.equal(got[:8], part) and len(got[CHUNK:].unique()) <= 2


def test_each_leaf_step_and_seed_has_bits_of_its_own() -> None:
    p, u = torch.ones(400, dtype=BF16), torch.full((400,), 2.0**-8)
    keys: list[Any] = [0, 1, (0, 1), (1, 0), (1, 1), (2**62, 2**62), torch.tensor(2)]
    drawn = [
        optim.apply_updates({"p": p, "q": p}, {"p": u, "q": u}, bf16_stochastic_round=key)[name]
        for key in keys
        for name in ("p", "q")
    ]
    for i, a in enumerate(drawn):
        for j, b in enumerate(drawn[:i]):
            if {i // 2, j // 2} != {1, 2} or i % 2 != j % 2:  # 1 is (0, 1)
                assert 100 < int((a != b).sum()) < 300
    assert make_key((1, 2), p) == make_key((torch.tensor(1), torch.tensor(2)), p)


def test_leaves_of_other_dtypes_are_added_as_ever() -> None:
    for dtype in (torch.float32, torch.float64, torch.float16):
        params, updates = draw_tree(0, dtype=dtype), draw_tree(1, 1e-3, torch.float32)
        got = optim.apply_updates(params, updates, bf16_stochastic_round=1)
        assert_same(got, optim.apply_updates(params, updates))


def test_a_leaf_of_other_strides_is_rounded_as_a_contiguous_one() -> None:
    p, u = torch.randn(6, 8).to(BF16), torch.randn(6, 8) * 1e-3
    turned = p.T.contiguous().T
    got = optim.apply_updates({"p": turned}, {"p": u}, bf16_stochastic_round=1)
    assert_same(got, optim.apply_updates({"p": p}, {"p": u}, bf16_stochastic_round=1))


@pytest.mark.parametrize("key", [1.0, torch.tensor(1.0), torch.ones(2, dtype=torch.int64), (1, 2.5), "1"])
def test_a_key_that_is_no_whole_number_is_refused(key: Any) -> None:
    with pytest.raises(FzeroError, match=r"bf16_stochastic_round: is .*; give whole numbers"):
        optim.apply_updates(torch.ones(3, dtype=BF16), torch.ones(3), bf16_stochastic_round=key)


# ranks

PARAMS, UPDATES = draw_tree(0), draw_tree(1, 1e-3, torch.float32)
EXPECTED = optim.apply_updates(PARAMS, UPDATES, bf16_stochastic_round=(3, 7))
CUTS: dict[str, Any] = {
    "by layer": {},
    "one bucket": {"layers": lambda path: "all"},
    "a bucket each": {"layers": lambda path: path},
    "units": {"unit": 64},
    "replicated": {"persist": 10**6},
    "some replicated": {"persist": 20},
}


def update(params: tree.Tree, updates: tree.Tree, count: Any) -> Any:
    return optim.apply_updates(params, updates, bf16_stochastic_round=(3, count)), count + 1


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_every_mesh_and_cut_has_the_same_bits(world: int, cut: str) -> None:
    mesh = VirtualMesh(fsdp=world)
    params, updates = fzero.partition(PARAMS, mesh, **CUTS[cut]), fzero.partition(UPDATES, mesh, **CUTS[cut])
    count = tree.leaves(params)[0].new_zeros((), dtype=torch.int32) + 7
    assert_same(fzero.unpartition(update(params, updates, 7)[0]), EXPECTED)  # outside of a step
    step = fzero.simulate(update, mesh)
    assert names(step.trace(params, updates, count)).count("_foreach_stochastic_add_") == 1
    assert_same(fzero.unpartition(step(params, updates, count)[0]), EXPECTED)


def test_replicas_round_alike() -> None:
    mesh = VirtualMesh(replica=2, fsdp=2)
    params, updates = fzero.partition(PARAMS, mesh), fzero.partition(UPDATES, mesh)
    assert_same(fzero.unpartition(fzero.simulate(update, mesh)(params, updates, 7)[0]), EXPECTED)


def on_a_mesh(mesh: DeviceMesh, is_step: bool) -> tree.Tree:
    params, updates = fzero.partition(PARAMS, mesh), fzero.partition(UPDATES, mesh)
    count = tree.leaves(params)[0].new_zeros((), dtype=torch.int32) + 7
    function = fzero.shard(update, mesh) if is_step else update
    return fzero.unpartition(function(params, updates, count)[0])


def test_processes_round_as_virtual_ranks() -> None:
    cases = {str(is_step): partial(on_a_mesh, is_step=is_step) for is_step in (True, False)}
    for outcomes in run_cases(2, cases).values():
        for got in values(outcomes):
            assert_same(got, EXPECTED)


ROWS = torch.tensor([[3.0, -1.0, 2.0, 5.0]]).expand(24, 4).contiguous()
"""Equal rows of small whole numbers: means over them are exact in any order, so gradients have the same bits too."""


def train(params: tree.Tree, state: Any, rows: Tensor) -> Any:
    loss, grads = fzero.value_and_grad(lambda p: (rows @ p["layer"]["w"].float()).sum(1).mean())(params)
    updates, state = OPTIMIZER.update(grads, state, params)
    params = optim.apply_updates(params, updates, bf16_stochastic_round=state[0].count)
    return params, state, loss


OPTIMIZER = optim.cast_state(optim.adamw(2e-3), torch.float32)
WEIGHTS = {"layer": {"w": torch.randn(4, 9, generator=torch.Generator().manual_seed(0)).to(BF16)}}


def run_steps(params: tree.Tree, step: Any, count: int = 3) -> tree.Tree:
    state = OPTIMIZER.init(params)
    for _ in range(count):
        params, state, _ = step(params, state, ROWS)
    return params


@pytest.mark.parametrize("donate", [True, False])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_training_has_the_same_bits_at_every_stage(world: int, stage: int, donate: bool) -> None:
    mesh = VirtualMesh(fsdp=world)
    step = fzero.simulate(train, mesh, stage=stage, donate=donate)
    got = run_steps(fzero.partition(WEIGHTS, mesh), step)
    assert_same(fzero.unpartition(got), run_steps(WEIGHTS, train))


def test_small_steps_add_up() -> None:
    """300 steps of a fifth of bfloat16's spacing; rounded to nearest, not one of them moves anything."""
    p, u = {"w": torch.ones(4096, dtype=BF16)}, {"w": torch.full((4096,), 2.0**-7 / 5)}
    moved = still = p
    for step in range(300):
        still = optim.apply_updates(still, u)
        moved = optim.apply_updates(moved, u, bf16_stochastic_round=step)
    assert torch.equal(still["w"], p["w"])
    # 60 spacings on average; each step has a variance of 4/25, and spacings stay below 2.
    assert abs(moved["w"].float().mean().item() - (1 + 300 * 2.0**-7 / 5)) < 4 * 2.0**-7 * (300 * 4 / 25 / 4096) ** 0.5


def test_a_skipped_step_changes_no_bit() -> None:
    optimizer = optim.apply_if_finite(optim.sgd(0.1), 3)
    mesh = VirtualMesh(fsdp=2)
    params = fzero.partition(PARAMS, mesh)
    grads = fzero.partition(tree.map(lambda x: torch.full(x.shape, torch.nan), PARAMS), mesh)

    def step(params: tree.Tree, state: Any, grads: tree.Tree) -> Any:
        updates, state = optimizer.update(grads, state, params)
        return optim.apply_updates(params, updates, bf16_stochastic_round=1), state

    assert_same(fzero.unpartition(fzero.simulate(step, mesh)(params, optimizer.init(params), grads)[0]), PARAMS)


def test_a_step_has_one_node_for_any_number_of_leaves() -> None:
    mesh = VirtualMesh(fsdp=2)
    counts = set()
    for size in (2, 20):
        params = fzero.partition({f"p{i}": torch.ones(8, dtype=BF16) for i in range(size)}, mesh)
        program = fzero.simulate(update, mesh).trace(params, tree.map(lambda x: x.float(), params), 1)
        counts.add(sum(node.op == "call_function" for node in program.graph.nodes))
        assert len(calls(program, torch.ops.fzero._foreach_stochastic_add_.default)) == 1
    assert len(counts) == 1
