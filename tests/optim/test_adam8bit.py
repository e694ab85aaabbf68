"""8-bit Adam: its numbers, its steps against a slow reference by hand, and the same codes on any number of ranks."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import pytest
import torch
from processes import run_cases, values
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import fzero
from fzero import optim, tree
from fzero.base.errors import FzeroError
from fzero.base.mesh import VirtualMesh
from fzero.optim.quantized import BLOCK, LEAST, dequantize, list_values, quantize
from fzero.program.records import name_of

SHAPES = {"block": {"big": (65, 80), "even": (64, 64), "small": (40,)}, "top": (4101,), "scale": ()}
"""Leaves of 20 and a bit, 16, 16 and a bit blocks, and two small ones."""


def draw(seed: int, shapes: Any = SHAPES) -> tree.Tree:
    generator = torch.Generator().manual_seed(seed)
    build = functools.partial(torch.randn, generator=generator)
    return {name: draw(seed, x) if isinstance(x, dict) else build(x) for name, x in shapes.items()}


def assert_equal(got: tree.Tree, want: tree.Tree) -> None:
    assert tree.paths(got) == tree.paths(want)
    for path, a, b in zip(tree.paths(got), tree.leaves(got), tree.leaves(want)):
        assert a.dtype == b.dtype and torch.equal(a, b), path


def assert_same_codes(got: tree.Tree, want: tree.Tree) -> None:
    """Large leaves have the same bits. For small ones a step calls torch's fused kernel, which rounds otherwise."""
    assert tree.paths(got) == tree.paths(want)
    for path, a, b in zip(tree.paths(got), tree.leaves(got), tree.leaves(want)):
        is_small = path.endswith(("small", "scale"))
        torch.testing.assert_close(a, b, rtol=1e-6 * is_small, atol=1e-6 * is_small, msg=path)


# numbers


def test_values_are_those_of_the_paper() -> None:
    signed, unsigned = list_values(True), list_values(False)
    assert len(set(signed)) == len(set(unsigned)) == 256
    assert signed[-1] == unsigned[-1] == 1 and unsigned[0] == 0 and 0 in signed
    assert [x for x in signed if x < 0] == [-x for x in reversed(signed) if 0 < x < 1]
    # In each decade middles of equal parts of [0.1, 1]: 64 in the last one with a sign, 1 in the first, at 0.55e-6.
    assert signed[-2] == pytest.approx(1 - 0.9 / 128) and unsigned[-2] == pytest.approx(1 - 0.9 / 256)
    assert min(x for x in signed if x > 0) == pytest.approx(0.55e-6)
    assert Counter(len(f"{x:.0e}") and int(f"{x:e}".partition("e")[2]) for x in unsigned if 0 < x < 1) == {
        -1 - k: 2 ** (7 - k) for k in range(7)
    }


@pytest.mark.parametrize("is_signed", [True, False])
def test_a_value_comes_back_as_the_nearest_one(is_signed: bool) -> None:
    x = draw(0, {"x": (3 * BLOCK + 5,)})["x"]
    x = x if is_signed else x.square()
    x[BLOCK : 2 * BLOCK] = 0
    codes, scales = quantize(x, is_signed)
    assert codes.shape == x.shape and scales.tolist() == [
        x[i : i + BLOCK].abs().max().item() for i in range(0, len(x), BLOCK)
    ]
    table = torch.tensor(list_values(is_signed))
    each = scales.repeat_interleave(BLOCK)[: len(x)]
    nearest = (x[:, None] - table * each[:, None]).abs().min(1).values
    got = dequantize(codes, scales, is_signed)
    torch.testing.assert_close((x - got).abs(), nearest, rtol=0, atol=1e-6)  # ties, and roundings of 6e-8
    assert not got[BLOCK : 2 * BLOCK].any()


# steps


def reference(params: Tensor, grads: list[Tensor], rate: float, b1: float, b2: float, eps: float) -> Tensor:
    """Adam with moments that go through 8 bits after each step, block by block."""
    m, v = torch.zeros(2, params.numel()).unbind()
    for step, grad in enumerate(grads, 1):
        g = grad.flatten()
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        params = params - (rate * (m / (1 - b1**step)) / ((v / (1 - b2**step)).sqrt() + eps)).view(params.shape)
        for moment, is_signed in ((m, True), (v, False)):
            table = torch.tensor(list_values(is_signed))
            for block in moment.split(BLOCK):
                scale = block.abs().max()
                block.copy_(scale * table[(block[:, None] / scale - table).abs().argmin(1)])
    return params


def test_steps_are_those_of_the_reference() -> None:
    params, grads = draw(0), [draw(seed) for seed in range(1, 6)]
    optimizer = optim.adamw8bit(0.01, weight_decay=0.0)
    moved, state = params, optimizer.init(params)
    for grad in grads:
        updates, state = optimizer.update(grad, state, moved)
        moved = optim.apply_updates(moved, updates)
    for name in ("big", "even"):
        want = reference(params["block"][name], [grad["block"][name] for grad in grads], 0.01, 0.9, 0.999, 1e-8)
        difference = (moved["block"][name] - want).abs()
        # Where a moment lies between two codes, rounding may choose the other: a step of 0.01 then differs by percents.
        assert difference.median() < 1e-6 and (difference > 1e-5).float().mean() < 0.01


def test_small_leaves_are_adams() -> None:
    params, grads = draw(0), [draw(seed) for seed in range(1, 4)]
    ours, theirs = optim.scale_by_adam8bit(), optim.scale_by_adam()
    state, other = ours.init(params), theirs.init(params)
    for grad in grads:
        updates, state = ours.update(grad, state)
        expected, other = theirs.update(grad, other)
        for path in (("block", "small"), ("scale",)):
            assert_equal(*(functools.reduce(lambda node, key: node[key], path, each) for each in (updates, expected)))
    sizes = {path: leaf.dtype for path, leaf in zip(tree.paths(state.mu), tree.leaves(state.mu))}
    large = {"block.big", "block.even", "top"}
    assert sizes == {path: torch.uint8 if path in large else torch.float32 for path in tree.paths(params)}
    assert tree.paths(state.mu_scales) == tree.paths(state.nu_scales) == sorted(large)
    assert all(leaf.numel() < LEAST for path, leaf in zip(tree.paths(params), tree.leaves(params)) if path not in large)


# ranks

OPTIMIZER = optim.chain(optim.scale_by_adam8bit(), optim.scale(-0.01))


def update(params: tree.Tree, state: Any, grads: tree.Tree) -> Any:
    """A step that is given its gradients, so that they have the same bits on any number of ranks."""
    updates, state = OPTIMIZER.update(grads, state, params)
    return optim.apply_updates(params, updates), state


@functools.cache
def plain() -> Any:
    state = draw(0), OPTIMIZER.init(draw(0))
    for seed in (1, 2, 3):
        state = update(*state, draw(seed))
    return state


@pytest.mark.parametrize(("world", "donate"), [(1, True), (2, False), (3, True), (8, True), (8, False), (64, True)])
def test_codes_are_the_same_on_any_number_of_ranks(world: int, donate: bool) -> None:
    mesh = VirtualMesh(fsdp=world)
    params = fzero.partition(draw(0), mesh, unit=BLOCK)
    state, step = (params, OPTIMIZER.init(params)), fzero.simulate(update, mesh, donate=donate)
    for seed in (1, 2, 3):
        state = step(*state, fzero.partition(draw(seed), mesh, like=params))
    assert_same_codes(fzero.unpartition(state), plain())


@pytest.mark.parametrize("mesh", [VirtualMesh(fsdp=4), VirtualMesh(replica=2, fsdp=2)], ids=str)
def test_replicated_leaves_and_replicas_have_the_same_codes(mesh: VirtualMesh) -> None:
    params = fzero.partition(draw(0), mesh, unit=BLOCK, persist=4200)
    state, step = (params, OPTIMIZER.init(params)), fzero.simulate(update, mesh)
    for seed in (1, 2, 3):
        state = step(*state, fzero.partition(draw(seed), mesh, like=params))
    assert_same_codes(fzero.unpartition(state), plain())


def test_outside_of_a_step_codes_are_the_same() -> None:
    mesh = VirtualMesh(fsdp=5)
    params = fzero.partition(draw(0), mesh, unit=BLOCK)
    state = params, OPTIMIZER.init(params)
    for seed in (1, 2, 3):
        state = update(*state, fzero.partition(draw(seed), mesh, like=params))
    assert_same_codes(fzero.unpartition(state), plain())


def on_a_mesh(mesh: DeviceMesh) -> Any:
    params = fzero.partition(draw(0), mesh, unit=BLOCK)
    state, step = (params, OPTIMIZER.init(params)), fzero.shard(update, mesh)
    for seed in (1, 2, 3):
        state = step(*state, fzero.partition(draw(seed), mesh, like=params))
    return fzero.unpartition(state)


def test_two_processes_have_the_same_codes() -> None:
    for got in values(run_cases(2, {"update": on_a_mesh})["update"]):
        assert_same_codes(got, plain())


@pytest.mark.parametrize("stage", [1, 3])
def test_a_training_step_is_the_plain_one(stage: int) -> None:
    optimizer, mesh = optim.adamw8bit(0.01), VirtualMesh(fsdp=8)

    def train_step(params: tree.Tree, state: Any, x: Tensor) -> Any:
        loss, grads = fzero.value_and_grad(lambda p: (x @ p["w"].T + p["b"]).square().mean())(params)
        updates, state = optimizer.update(grads, state, params)
        return optim.apply_updates(params, updates), state, loss

    whole, x = draw(0, {"w": (80, 64), "b": (80,)}), draw(1, {"x": (16, 64)})["x"]
    params = fzero.partition(whole, mesh, unit=BLOCK)
    step = fzero.simulate(train_step, mesh, stage=stage)
    (*got, loss), (*want, expected) = (
        step(params, optimizer.init(params), x),
        train_step(whole, optimizer.init(whole), x),
    )
    torch.testing.assert_close(loss.mean(), expected)
    # Means over ranks round gradients in another order: a moment between two codes may get the other one.
    assert all(leaf.float().quantile(0.99) < 1e-4 for leaf in tree.leaves(
        tree.map(lambda a, b: (a.double() - b.double()).abs().flatten(), fzero.unpartition(got), want)
    ))  # fmt: skip


def test_state_is_partitioned_like_its_parameters() -> None:
    mesh = VirtualMesh(fsdp=3)
    params = fzero.partition(draw(0), mesh, unit=BLOCK)
    moved, whole = plain()
    state = fzero.partition(whole, mesh, like=params)
    expected = OPTIMIZER.init(params)
    assert [x.form for x in tree.leaves(state)] == [x.form for x in tree.leaves(expected)]
    step, grads = fzero.simulate(update, mesh), draw(4)
    got = step(fzero.partition(moved, mesh, like=params), state, fzero.partition(grads, mesh, like=params))
    assert_same_codes(fzero.unpartition(got), update(moved, whole, grads))


def test_a_traced_step_has_one_node_and_moves_nothing() -> None:
    mesh = VirtualMesh(fsdp=8)
    params = fzero.partition(draw(0), mesh, unit=BLOCK)
    state = OPTIMIZER.init(params)
    program = fzero.simulate(update, mesh).trace(params, state, fzero.partition(draw(1), mesh, like=params))
    called = Counter(name_of(node) for node in program.graph.nodes if node.op == "call_function")
    assert (called["scale_by_adam8bit"], program.comm()) == (1, [])
    large = [leaf for leaf in tree.leaves(params) if leaf.numel() >= LEAST]
    held = sum(x.local.nbytes for x in tree.leaves(state) if x.dtype == torch.uint8 or x.path in tree.paths(large))
    assert held == sum(2 * leaf.numel() for leaf in large)  # and 4 bytes a block:
    scales = tree.leaves(state[0].mu_scales) + tree.leaves(state[0].nu_scales)
    assert sum(x.local.nbytes for x in scales) == sum(2 * 4 * -(-leaf.numel() // BLOCK) for leaf in large)


# bad input


def test_ranks_that_cut_blocks_are_refused() -> None:
    params = fzero.partition(draw(0), VirtualMesh(fsdp=3))
    with pytest.raises(FzeroError, match=r"^block\.big: ranks may cut blocks of 256 elements.*unit=256"):
        OPTIMIZER.init(params)


def test_state_of_blocks_of_another_size_is_refused() -> None:
    params = draw(0)
    state = OPTIMIZER.init(params)
    scales = tree.map(lambda x: x.new_zeros(2 * x.numel()), state[0].mu_scales)
    with pytest.raises(
        FzeroError, match=r"^block\.big: 8-bit state has scales of shape \(42,\), blocks of 256 .* \(21,\)"
    ):
        OPTIMIZER.update(draw(1), (state[0]._replace(mu_scales=scales), state[1]), params)


def test_codes_without_scales_and_scales_without_codes_are_refused() -> None:
    params = draw(0)
    state = OPTIMIZER.init(params)
    without = tree.map(lambda x: None, state[0].mu_scales)
    with pytest.raises(FzeroError, match=r"^block\.big: 8-bit state has scales of shape None"):
        OPTIMIZER.update(draw(1), (state[0]._replace(mu_scales=without), state[1]), params)
    plain_mu = tree.map(torch.zeros_like, params)
    with pytest.raises(FzeroError, match=r"has scales and no 8-bit codes"):
        OPTIMIZER.update(draw(1), (state[0]._replace(mu=plain_mu), state[1]), params)


def test_scales_that_lie_elsewhere_are_refused() -> None:
    mesh = VirtualMesh(fsdp=3)
    params = fzero.partition(draw(0), mesh, unit=BLOCK)
    state = OPTIMIZER.init(params)
    strays = fzero.partition(fzero.unpartition(state[0].nu_scales), mesh)
    wrong = (state[0]._replace(nu_scales=strays), state[1])
    with pytest.raises(FzeroError, match=r"^block\.big: its 8-bit state lies otherwise than blocks of 256"):
        fzero.simulate(update, mesh)(params, wrong, fzero.partition(draw(1), mesh, like=params))


def test_state_made_in_a_step_is_refused() -> None:
    mesh = VirtualMesh(fsdp=2)
    params = fzero.partition(draw(0), mesh, unit=BLOCK)
    with pytest.raises(FzeroError, match=r"8-bit state is made in a step; call optimizer.init outside"):
        fzero.simulate(lambda params: OPTIMIZER.init(params), mesh)(params)


@pytest.mark.parametrize("options", [{"b1": 1.0}, {"b2": -0.1}, {"eps": -1.0}, {"b1": torch.tensor(0.9)}])
def test_bad_hyperparameters_are_named(options: dict[str, float]) -> None:
    (name,) = options
    with pytest.raises(FzeroError, match=f"^scale_by_adam8bit: {name} is"):
        optim.scale_by_adam8bit(**options)
