"""The stream pass: leaves larger than a chunk are used chunk by chunk, and are never whole."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from programs import measure_peak
from torch import Tensor, nn
from torch.nn import functional

import fzero
from fzero import optim, tree
from fzero.base.mesh import VirtualMesh
from fzero.program.program import Program
from fzero.program.records import early_of, find_bodies, starts

WIDTH, HIDDEN, BATCH = 16, 64, 8
CHUNK = 1024  # bytes: a quarter of a weight of the MLP
OPTIMIZER = optim.adamw(1e-2)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.relu(self.up(x)))


def lower(module: nn.Module) -> tuple[tree.Tree, Any]:
    torch.manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    return fzero.lower(module)


def make_step(loss: Any) -> Any:
    """A step of AdamW on `loss(params, batch)`."""

    def step(params: Any, state: Any, batch: Any) -> Any:
        value, gradients = fzero.value_and_grad(loss)(params, batch)
        updates, state = OPTIMIZER.update(gradients, state, params)
        return optim.apply_updates(params, updates), state, value

    return step


def train(step: Any, params: tree.Tree, batch: Any, mesh: VirtualMesh, steps: int = 3, **how: Any) -> Any:
    """Losses and final parameters of some steps, on virtual ranks."""
    simulated, params = fzero.simulate(step, mesh, **how), fzero.partition(params, mesh)
    state, losses = OPTIMIZER.init(params), []
    for _ in range(steps):
        params, state, loss = simulated(params, state, batch)
        losses.append(loss)
    return losses, fzero.unpartition(params)


def trace(step: Any, params: tree.Tree, batch: Any, mesh: VirtualMesh, **how: Any) -> Program:
    params = fzero.partition(params, mesh)
    return fzero.simulate(step, mesh, **how).trace(params, OPTIMIZER.init(params), batch)


def list_programs(program: Program) -> Iterator[Program]:
    """The program and the bodies of its loops, those within bodies too."""
    yield program
    for body in find_bodies(program.graph):
        yield from list_programs(body)


def list_gathered(program: Program) -> list[int]:
    """The bytes of each gathered buffer."""
    nodes = [node for each in list_programs(program) for node in each.graph.nodes]
    return [node.meta["val"].nbytes for node in nodes if starts(node) == "gathered"]


def count_comm(program: Program) -> dict[str, int]:
    """Collective -> the bytes that it moves."""
    total: dict[str, int] = {}
    for entry in program.comm():
        total[entry.op] = total.get(entry.op, 0) + entry.nbytes
    return total


def assert_close(ours: Any, theirs: Any, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    """Losses and parameters are equal up to the order of sums in float32."""
    torch.testing.assert_close(tree.leaves(ours), tree.leaves(theirs), rtol=rtol, atol=atol)


def mlp() -> tuple[Any, tree.Tree, Tensor]:
    """A step of an MLP, its parameters, and a batch."""
    params, apply = lower(Mlp())
    return make_step(lambda p, x: (apply(p, x) - x).square().mean()), params, torch.randn(BATCH, WIDTH)


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("donate", [True, False])
def test_a_streamed_mlp_trains_as_the_whole_one(world: int, donate: bool) -> None:
    step, params, batch = mlp()
    mesh = VirtualMesh(fsdp=world)
    given = [fzero.tree.map(Tensor.clone, params), batch, mesh]
    assert_close(train(step, *given, donate=donate, chunk=CHUNK), train(step, *given, donate=donate))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_streamed_leaf_is_never_whole_and_moves_as_many_bytes(stage: int) -> None:
    step, params, batch = mlp()
    mesh = VirtualMesh(fsdp=4)
    whole = trace(step, params, batch, mesh)
    streamed = trace(step, params, batch, mesh, stage=stage, chunk=CHUNK)
    assert max(list_gathered(whole)) == 4 * CHUNK and max(list_gathered(streamed)) == CHUNK
    values = [x.meta.get("val") for each in list_programs(streamed) for x in each.graph.nodes]
    assert max(x.numel() for x in values if isinstance(x, Tensor)) < WIDTH * HIDDEN
    assert not streamed.remarks
    # the forward pass uses both weights, the backward pass that of `down`, which stage 3 gathers once for both
    assert count_comm(streamed) == count_comm(whole) | {"all_gather": 3 * 4 * CHUNK}


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("donate", [True, False])
def test_the_peak_is_as_predicted(world: int, donate: bool) -> None:
    step, params, batch = mlp()
    mesh = VirtualMesh(fsdp=world)
    params = fzero.partition(params, mesh)
    simulated = fzero.simulate(step, mesh, donate=donate, chunk=CHUNK)
    program, most = measure_peak(simulated, params, OPTIMIZER.init(params), batch)
    early = max(sum(x.meta["val"].nbytes for x in early_of(loop)) for loop in _find_loops(program))
    # virtual ranks start no chunk one turn early
    assert most <= program.memory().peak <= most + early + 64


def _find_loops(program: Program) -> list[Any]:
    return [node for node in program.graph.nodes if node.op == "call_function" and node.name.startswith("loop")]
