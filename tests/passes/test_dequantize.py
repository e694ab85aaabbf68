"""A step on quantized leaves: equal to the step on the dequantized ones, bit for bit, and nothing of these stays."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from programs import calls, measure_peak, training
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fzero
from fzero import ops, tree
from fzero.base.frozen import freeze
from fzero.program.records import record
from fzero.values.quantized import is_quantized
from fzero.variants.int8_gather import int8_gather

WIDTH, LAYERS = 32, 2
Loss = Callable[[Any, Tensor], Tensor]


class Block(nn.Module):
    """Two frozen products, a norm, and the trained factors of LoRA."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.requires_grad_(False)
        self.norm = nn.LayerNorm(WIDTH)
        self.a, self.b = nn.Parameter(torch.randn(WIDTH, 4)), nn.Parameter(torch.randn(4, WIDTH) / 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x)))) + (x @ self.a) @ self.b


class Net(nn.Module):
    """Equal blocks, between a frozen embedding and a head that has its weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(16, WIDTH)
        self.embed.requires_grad_(False)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


params, apply = fzero.lower(Net())
block = fzero.lower(Net().layers[0])[1]


def plain(p: Any, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(apply(p, tokens).flatten(0, 1), tokens.roll(-1, 1).flatten())


def of_functions(p: Any, tokens: Tensor, each: Callable[..., Any] = lambda fn: fn) -> Tensor:
    """`plain`, with `each(function)` in the place of a layer's function."""
    x = nn.functional.embedding(tokens, p["embed"]["weight"])
    for layer in p["layers"]:
        x = each(block)(layer, x)
    return nn.functional.cross_entropy((x @ p["embed"]["weight"].T).flatten(0, 1), tokens.roll(-1, 1).flatten())


def in_a_loop(p: Any, tokens: Tensor, each: Callable[..., Any] = lambda fn: fn) -> Tensor:
    x = nn.functional.embedding(tokens, p["embed"]["weight"])
    x, _ = fzero.scan(lambda x, _, layer: (each(block)(layer, x), None), x, layers=p["layers"])
    return nn.functional.cross_entropy((x @ p["embed"]["weight"].T).flatten(0, 1), tokens.roll(-1, 1).flatten())


LOSSES: dict[str, Loss] = {
    "plain": plain,
    "remat": functools.partial(of_functions, each=fzero.remat),
    "remat dots": functools.partial(of_functions, each=lambda fn: fzero.remat(fn, "dots")),
    "checkpoint": functools.partial(
        of_functions, each=lambda fn: functools.partial(checkpoint, fn, use_reentrant=False)
    ),
    "scan": in_a_loop,
    "scan, remat": functools.partial(in_a_loop, each=fzero.remat),
    "bfloat16": fzero.precision(torch.bfloat16, reduce=torch.float32, output=torch.float32)(plain),
}


def quantize(bits: int = 8) -> Any:
    levels = "nf4" if bits == 4 else "even"
    return fzero.quantize(params, bits=bits, block=64, levels=levels, where=r"embed|up\.weight|down\.weight")


def read(held: Any) -> Any:
    """A tree with its quantized leaves dequantized, and frozen."""
    leaves, _ = tree.flatten(held, is_leaf=is_quantized)
    dense = [x.full_tensor() if is_quantized(x) else x for x in leaves]
    return tree.map(freeze, tree.unflatten(tree.flatten(params)[1], dense), params)


def tokens(rows: int = 12) -> Tensor:
    return torch.randint(16, (rows, 6), generator=torch.Generator().manual_seed(1))


def train(given: Any, loss: Loss, world: int, steps: int = 2, **how: Any) -> list[Tensor]:
    """Losses and trained leaves after some steps."""
    mesh, optimizer = fzero.VirtualMesh(fsdp=world), fzero.optim.adamw(1e-2)
    held = fzero.partition(given, mesh)
    state, step, losses = optimizer.init(held), fzero.simulate(training(optimizer, loss), mesh, **how), []
    for _ in range(steps):
        held, state, value = step(held, state, tokens())
        losses.append(value)
    whole = [x for x in tree.leaves(fzero.unpartition(held)) if x.dtype != torch.uint8]
    return [*losses, *(x for x in whole if not isinstance(x, nn.Parameter))]


STAGES = {name: 3 - i % 3 for i, name in enumerate(LOSSES)}  # each with a stage; "plain" with all of them


@pytest.mark.parametrize(("name", "stage"), [*STAGES.items(), ("plain", 2)])
def test_a_step_equals_that_on_dequantized_leaves_bit_for_bit(name: str, stage: int) -> None:
    held = quantize(bits=4 if stage == 2 else 8)
    how: dict[str, Any] = {"stage": stage, "donate": stage != 1}
    got, expected = train(held, LOSSES[name], 2, **how), train(read(held), LOSSES[name], 2, **how)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_one_rank_equals_plain_torch_bit_for_bit_and_many_to_rounding() -> None:
    held = quantize()
    module = Net()
    dense = read(held)
    with torch.no_grad():
        for path, x in zip(tree.paths(dense), tree.leaves(dense), strict=True):
            module.get_parameter(path).copy_(x)
    expected = plain_step(module)
    for world, tolerance in ((1, 0.0), (2, 1e-6), (4, 1e-6)):
        mesh = fzero.VirtualMesh(fsdp=world)
        value, grads = fzero.simulate(fzero.value_and_grad(plain), mesh)(fzero.partition(held, mesh), tokens())
        torch.testing.assert_close(value.mean(), expected, rtol=tolerance, atol=0)
        for path, x in zip(tree.paths(grads), tree.leaves(fzero.unpartition(grads)), strict=True):
            exact = module.get_parameter(path).grad
            largest = float(exact.abs().max())  # sums over the rows of a rank, then over ranks
            torch.testing.assert_close(x, exact, rtol=0, atol=tolerance * largest, msg=lambda text: f"{path}: {text}")  # noqa: B023


def test_codes_on_the_host_under_a_budget() -> None:
    mesh = fzero.VirtualMesh(fsdp=2)

    def run(given: Any, **how: Any) -> list[Tensor]:
        step = fzero.simulate(fzero.grad(lambda p, tokens: plain(p, tokens)), mesh, **how)
        return tree.leaves(fzero.unpartition(step(given, tokens())))

    got = run(fzero.partition(quantize(), mesh, to=fzero.host()), memory="1MiB")
    expected = run(fzero.partition(read(quantize()), mesh))
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def plain_step(module: Net) -> Tensor:
    """The loss of plain torch, whose gradients are in the module then."""
    loss = nn.functional.cross_entropy(module(tokens()).flatten(0, 1), tokens().roll(-1, 1).flatten())
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize("combine", [torch.add, lambda q, t: t + q, lambda q, t: torch.addcmul(t, q, t)], ids="abc")
def test_a_quantized_leaf_meets_a_sharded_one(combine: Any) -> None:
    mesh, embed = fzero.VirtualMesh(fsdp=2), quantize()["embed"]["weight"]
    dense = nn.Parameter(embed.full_tensor(), requires_grad=False)

    def loss(p: Any, tokens: Tensor) -> Tensor:
        return nn.functional.embedding(tokens, combine(p["frozen"], p["delta"])).square().mean()

    step = fzero.simulate(fzero.value_and_grad(loss), mesh)
    got, expected = (
        tree.leaves(
            fzero.unpartition(step(fzero.partition({"frozen": x, "delta": torch.ones(16, WIDTH)}, mesh), tokens()))
        )
        for x in (embed, dense)
    )
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_a_trained_leaf_beside_a_quantized_one_is_scattered_once() -> None:
    """Although two functions use both."""
    mesh = fzero.VirtualMesh(fsdp=2)
    params = {"w": torch.randn(16, 16), "b": torch.randn(16)}

    def loss(p: Any, x: Tensor) -> Tensor:
        return nn.functional.linear(torch.tanh(nn.functional.linear(x, p["w"], p["b"])), p["w"], p["b"]).square().mean()

    held = fzero.partition(fzero.quantize(params, block=64, where="w"), mesh)
    program = fzero.simulate(fzero.grad(loss), mesh).trace(held, torch.ones(4, 16))
    assert len(calls(program, ops.reduce_scatter)) == 1


def program_of(given: Any, loss: Loss, **how: Any) -> Any:
    mesh = fzero.VirtualMesh(fsdp=2)
    return fzero.simulate(fzero.grad(loss), mesh, **how).trace(fzero.partition(given, mesh), tokens())


@pytest.mark.parametrize("name", ["plain", "remat dots", "scan", "bfloat16"])
def test_a_dequantized_leaf_has_one_use(name: str) -> None:
    program = program_of(quantize(), LOSSES[name], stage=2)
    bodies = [node.args[0] for node in calls(program, ops.loop)]
    found = [node for each in (program, *bodies) for node in calls(each, ops.dequantize)]
    assert len(found) >= (4 if bodies else 2 * 2 * LAYERS - 1)
    for node in found:
        users = list(node.users)
        while len(users) == 1 and record(users[0]).is_derived:
            users = list(users[0].users)
        assert len(users) == 1, f"{node} is used by {users}"


def test_a_variant_that_gathers_trained_leaves_as_codes_leaves_quantized_ones_alone() -> None:
    how = {"passes": fzero.passes.insert(fzero.passes.defaults(stage=3), int8_gather, before="prefetch")}
    held = quantize()
    both, alone = (program_of(held, plain, **each).comm() for each in (how, {}))
    assert {entry.dtype for entry in both if entry.op == "all_gather"} == {torch.uint8}
    assert [entry for entry in alone if entry.dtype == torch.uint8] == [
        entry for entry, before in zip(both, alone, strict=True) if before.dtype == torch.uint8
    ]
    (loss, *_), (exact, *_) = train(held, plain, 2, **how), train(held, plain, 2)
    torch.testing.assert_close(loss, exact, rtol=0.02, atol=0)  # weights change by up to 1/254 of the largest
    assert not torch.equal(loss, exact)


@pytest.mark.parametrize("bits", [8, 4])
def test_codes_move_as_they_are_stored(bits: int) -> None:
    held = quantize(bits)
    stored = sum(x.numel() for x in tree.leaves(held) if x.dtype == torch.uint8)
    moved = [entry for entry in program_of(held, plain, stage=2).comm() if entry.dtype == torch.uint8]
    assert stored <= sum(entry.nbytes for entry in moved) < stored + 32 * len(moved)
    assert len(moved) == LAYERS + 1, "a bucket a layer, codes and scales together"
    again = [entry for entry in program_of(held, plain, stage=3).comm() if entry.dtype == torch.uint8]
    assert len(again) == 2 * (LAYERS + 1), "a layer gathers once in each direction"


def test_the_peak_is_as_predicted_and_lower() -> None:
    mesh = fzero.VirtualMesh(fsdp=2)

    def measure(given: Any) -> int:
        step = fzero.simulate(fzero.grad(plain), mesh, stage=2)
        program, peak = measure_peak(step, fzero.partition(given, mesh), tokens(2))
        assert peak <= program.memory().peak <= 1.05 * peak
        return peak

    held = quantize(bits=4)
    dense = sum(4 * x.numel() for x in tree.leaves(read(held)) if isinstance(x, nn.Parameter))
    assert measure(held) < measure(read(held)) - dense // 4
