"""A gradient is sent as soon as it is there, under every option that leaves gradients cut, and not at the end."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import fzero
from fzero import optim
from fzero.program import ops

ONE, TWO = fzero.VirtualMesh(fsdp=4), fzero.VirtualMesh(replica=2, fsdp=2)
ADAMW = optim.adamw(1e-3)
CASES: dict[str, dict[str, Any]] = {
    "stage 3": {},
    "stage 2": {"stage": 2},
    "a budget": {"memory": "300KiB"},
    "sent in float64": {"reduce_dtype": torch.float64},
    "sent in float64, stage 2": {"reduce_dtype": torch.float64, "stage": 2},
    "replicas, sent in float64": {"mesh": TWO, "reduce_dtype": torch.float64},
    "in chunks": {"chunk": "4KiB"},
    "state on the host": {"to": fzero.host()},
    "small leaves whole": {"persist": 65},
    "clipped": {"optimizer": optim.chain(optim.clip_by_global_norm(1.0), ADAMW)},
    "muon": {"optimizer": optim.muon(1e-3)},
    "narrow compute": {"narrow": fzero.precision(torch.bfloat16)},
    "narrow compute, sent in float32": {"narrow": fzero.precision(torch.bfloat16, reduce=torch.float32)},
    "computed again": {"wrap": fzero.remat},
}


def make_program(
    mesh: fzero.VirtualMesh = ONE,
    optimizer: Any = ADAMW,
    narrow: Any = lambda loss: loss,
    wrap: Any = lambda apply: apply,
    to: Any = None,
    persist: int = 0,
    **options: Any,
) -> fzero.Program:
    """A step of five layers and a loss of their squares."""
    torch.manual_seed(0)
    params, apply = fzero.lower(nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(5)]))
    params = fzero.partition(params, mesh, to=to, persist=persist)

    def loss_of(params: Any, x: Tensor) -> Tensor:
        return wrap(apply)(params, x).float().square().mean()

    def step(params: Any, state: Any, x: Tensor) -> Any:
        loss, grads = fzero.value_and_grad(narrow(loss_of))(params, x)
        updates, state = optimizer.update(grads, state, params)
        return optim.apply_updates(params, updates), state, loss

    return fzero.simulate(step, mesh, **options).trace(params, optimizer.init(params), torch.zeros(16, 64))


def count_products_behind(program: fzero.Program) -> list[int]:
    """For each reduce-scatter the products of matrices that follow it."""
    products = [i for i, node in enumerate(program.graph.nodes) if "mm" in str(node.target)]
    sent = (i for i, node in enumerate(program.graph.nodes) if node.target is ops.reduce_scatter)
    return [sum(product > i for product in products) for i in sent]


def test_gradients_are_sent_as_they_come() -> None:
    """Two products behind the gradient of a layer are those of the layer before it."""
    found = {name: count_products_behind(make_program(**case)) for name, case in CASES.items()}
    assert {name: behind for name, behind in found.items() if behind != [7, 5, 3, 1, 0]} == {}
